"""Run timm's own contract tests over all of our models: `make timm-contract`, or with --fast one of each host.

The tests are those of the installed timm, fetched from its source archive into $SUBQUAD_HOME; nothing of them is kept
here. This file is also the pytest plugin that shows them our models instead of timm's.
"""

import argparse
import fnmatch
import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HOME = Path(os.environ.get("SUBQUAD_HOME", Path.home() / ".cache" / "subquad"))
FAST = (
    "agent_deit_tiny linear_eva02_tiny inline_pvt_tiny focused_pvt_v2_b0 agent_swin_tiny inline_cswin_tiny soft_tiny "
    "lavit_tiny mlla_tiny nala_xtiny ttt_hvit3_tiny"
)
MARKERS = "base", "cfg", "cfg_nonstd", "torchscript", "features", "fxforward", "fxbackward", "forward", "backward"


def fetch_tests() -> Path:
    """The test_models.py of the timm that is installed."""
    version = importlib.metadata.version("timm")
    folder = HOME / "timm-tests"
    archive = folder / f"timm-{version}.tar.gz"
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [f"timm=={version}", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--retries=1",
            "--timeout=10",
        ]
        subprocess.run([*pip, *wanted], check=True, capture_output=True)
    file = folder / f"timm-{version}" / "tests" / "test_models.py"
    if not file.is_file():
        with tarfile.open(archive) as tar:
            tar.extract(f"timm-{version}/tests/test_models.py", folder, filter="data")
    return file


def main() -> int:
    """Fetch and run; the rest of the arguments are pytest's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help=f"only {FAST}")
    parser.add_argument("--models", default="*", help="only models that match one of these patterns")
    parser.add_argument("--fetch", action="store_true", help="fetch the tests and stop")
    arguments, rest = parser.parse_known_args()
    try:
        file = fetch_tests()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"timm's tests could not be fetched: {error}", file=sys.stderr)
        return 3
    if arguments.fetch:
        return 0
    environment = os.environ | {
        "SUBQUAD_CONTRACT_MODELS": FAST if arguments.fast else arguments.models,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-p", "timm_contract", "-c", os.devnull, "--rootdir", file.parent]
    markers = ["-W", "ignore", "-o", "addopts=", "-q", *rest, file]
    return subprocess.run([*map(str, command), *map(str, markers)], env=environment).returncode


# from here on: the plugin


def pytest_configure(config) -> None:  # type: ignore[no-untyped-def]
    """Before timm's tests are read: let timm list our models and no others."""
    import timm

    import subquad  # noqa: F401 - registers the models

    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: of timm's tests")
    timm.list_models = _list_models
    timm.list_pretrained = lambda *_, **__: []


def pytest_collection_modifyitems(config, items) -> None:  # type: ignore[no-untyped-def]
    """Leave out tests of timm's own models, and TorchScript: torch.export has taken its place."""
    ours = set(_ours())
    kept = [item for item in items if "torchscript" not in item.name and _model_of(item) in ours]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _model_of(item) -> str | None:  # type: ignore[no-untyped-def]
    return item.callspec.params.get("model_name") if hasattr(item, "callspec") else None


def _ours() -> list[str]:
    from subquad.models.networks import NETWORKS

    patterns = os.environ["SUBQUAD_CONTRACT_MODELS"].split()
    return [name for name in NETWORKS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _list_models(filter="", module="", pretrained=False, exclude_filters="", **_):  # type: ignore[no-untyped-def]
    """As timm's tests ask it: for all models, for those with a class token ("non-standard"), or for those without."""
    from subquad.models import create_model

    def has_prefix(name: str) -> bool:
        return create_model(name, device="meta").output_fmt == "NLC"

    if pretrained or (isinstance(filter, str) and filter):
        return []
    if "vit_*" in filter:
        return [name for name in _ours() if has_prefix(name)]
    if "vit_*" in exclude_filters:
        return [name for name in _ours() if not has_prefix(name)]
    return _ours()


if __name__ == "__main__":
    raise SystemExit(main())
