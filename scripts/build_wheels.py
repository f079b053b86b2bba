"""Build the source archive and a wheel for each kind of machine, with the CPU kernels compiled in, and try them.

    python scripts/build_wheels.py --output dist

Needs `build`, `setuptools` (77 or newer), and for the checks `auditwheel` and `twine`, in the Python it runs in; a C++
compiler, and Debian's g++-aarch64-linux-gnu for the second wheel, which is left out without it. The wheel for this
machine is installed into an empty environment, without a compiler, with --site as the place of PyTorch and what else we
need; there every library that this processor can run is held against the eager form.

What is compiled has no OpenMP in it: it finds PyTorch's when it is loaded. The newest symbols it asks for are of
glibc 2.27, GCC 9's libstdc++ is enough, and so its tag is that of PyTorch's own wheels.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src" / "subquad" / "kernels" / "cpu"))

from shipping import ELEMENTS, LEVELS, PORTABLE_FLAGS, digest_of, flags_of, library_name  # noqa: E402  without PyTorch

KERNELS = Path("src") / "subquad" / "kernels" / "cpu"
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
PLATFORM = "manylinux_2_28"
PARTS = ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "MANIFEST.in", "src")

# a function that newer compilers call and that an older libstdc++ has not
OLD_LIBRARY = """
namespace std {
[[noreturn]] void __throw_bad_alloc();
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { __throw_bad_alloc(); }
}
"""

SETUP = """
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Binary(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", "{platform}"


setup(distclass=Binary, cmdclass={{"bdist_wheel": Wheel}})
"""

TRIAL = """
import shutil
import sys
from pathlib import Path

site = Path(sys.argv[1])
import subquad
assert Path(subquad.__file__).is_relative_to(site), subquad.__file__
assert not any(map(shutil.which, ("c++", "g++", "clang++", "gcc", "cc")))

import torch
from subquad.attention import traits_of
from subquad.kernels.cpu import library, shipping

names = [path for path in shipping.shipped_libraries() if path.is_file()]
assert names, "no shipped library fits this processor"
tried = []
for path in names:
    library.shipped_libraries = lambda: [path]
    library._state.cache_clear()
    assert library.missing() is None, library.missing()
    worst = 0.0
    for name in subquad.ATTENTION:
        torch.manual_seed(0)
        alone = "prefix" in traits_of(subquad.ATTENTION[name]).refuses
        mean = {"class_token": False, "global_pool": "avg"} if alone else {}
        model = subquad.create_model("deit_tiny", attention=name, img_size=(96, 80), depths=(2,), **mean).eval()
        x = torch.randn(2, 3, 96, 80)
        outputs = []
        # asked for by name, a kernel that can't run is an error
        for backend in ("eager", "native"):
            with torch.no_grad(), subquad.use_backend(backend):
                outputs.append(model(x))
        error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
        assert error < 1e-4, (path.name, name, float(error))
        worst = max(worst, float(error))
    tried.append(f"{path.name}: {worst:.1e}")
assert not list(Path(sys.argv[2]).rglob("*.so")), "something was compiled"
print("native kernels equal the eager form, worst relative error: " + ", ".join(tried))
"""


def compile_kernels(machine: str, tree: Path) -> None:
    """Put a library for each level of a machine into the package at `tree`."""
    folder = tree / KERNELS / "shipped"
    folder.mkdir()
    compiler = COMPILERS[machine]
    with tempfile.TemporaryDirectory() as place:
        old = Path(place) / "old.cpp"
        old.write_text(OLD_LIBRARY)
        for level in LEVELS[machine]:
            kernels, library = [Path(place) / f"{element}.o" for element in ELEMENTS], Path(place) / "kernels.so"
            flags = [*PORTABLE_FLAGS, *flags_of(level), "-fopenmp"]
            for element, part in zip(ELEMENTS, kernels, strict=True):
                source = tree / KERNELS / "source" / "kernels.cpp"
                _run(compiler, *flags, f"-DELEMENT={element}", "-c", source, "-o", part)
            # without -fopenmp: no OpenMP is named
            _run(compiler, *PORTABLE_FLAGS, "-shared", "-s", *kernels, old, "-o", library)
            content = library.read_bytes()
            (folder / library_name(level)).write_bytes(content + digest_of(content))


def copy_tree(tree: Path) -> None:
    """Copy what a package is made of to `tree`, so that nothing is left in the repository."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "shipped")
    tree.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=unwanted)
        else:
            shutil.copy(ROOT / part, tree / part)


def build(kind: str, tree: Path, output: Path) -> Path:
    """Build `kind` of package, which is "wheel" or "sdist", from `tree` into `output`."""
    with tempfile.TemporaryDirectory() as made:
        _run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", made, tree)
        (file,) = Path(made).iterdir()
        return Path(shutil.copy(file, output / file.name))


def build_wheel(machine: str, place: Path, output: Path) -> Path:
    """Build the wheel of a kind of machine."""
    tree = place / machine
    copy_tree(tree)
    compile_kernels(machine, tree)
    (tree / "setup.py").write_text(SETUP.format(platform=f"{PLATFORM}_{machine}"))
    wheel = build("wheel", tree, output)
    with zipfile.ZipFile(wheel) as archive:
        shipped = {Path(name).name for name in archive.namelist() if "/shipped/" in name}
    assert shipped == {library_name(level) for level in LEVELS[machine]}, shipped
    return wheel


def check(files: list[Path]) -> None:
    """Let auditwheel and twine look at what was built, where they are there."""
    for file in files:
        if file.suffix == ".whl":
            words = " ".join(_run(sys.executable, "-m", "auditwheel", "show", file).split())
            machine = file.stem.rsplit(PLATFORM, 1)[-1]
            found = re.search(rf'following platform tag: "manylinux_2_(\d+){machine}"', words)
            assert found and int(found[1]) <= int(PLATFORM.rsplit("_", 1)[-1]), words
            print(f"{file.name}: {found[0]}")
    print(_run(sys.executable, "-m", "twine", "check", "--strict", *files).strip())


def try_wheel(wheel: Path, site: str, place: Path) -> None:
    """Install a wheel into an empty environment and run its kernels, without a compiler and this repository."""
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('platlib'))"
    own = Path(_run(python, "-c", asked).strip())
    _run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (own / "others.pth").write_text(f"{Path(site).resolve()}\n")
    (place / "trial.py").write_text(TRIAL)
    environment = {"PATH": str(python.parent), "SUBQUAD_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    print(_run(python, "-I", place / "trial.py", own, place / "home", env=environment, cwd=place).strip())
    said = _run(python.parent / "subquad", "--version", env=environment, cwd=place)
    print(f"{wheel.name}: installed, {said.strip()}")


def main() -> None:
    """Build, try and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--machines", nargs="+", choices=sorted(LEVELS), default=sorted(LEVELS))
    parser.add_argument("--no-checks", action="store_true", help="without auditwheel and twine")
    parser.add_argument("--site", help="site-packages with PyTorch; the wheel is not tried if left out")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copy_tree(place / "source")
        files = [build("sdist", place / "source", arguments.output)]
        for machine in arguments.machines:
            if shutil.which(COMPILERS[machine]) is None:
                print(f"no wheel for {machine}: there is no {COMPILERS[machine]}")
                continue
            files.append(build_wheel(machine, place, arguments.output))
            if machine == platform.machine() and arguments.site:
                try_wheel(files[-1], arguments.site, place)
        if not arguments.no_checks:
            check(files)
    print(*files, sep="\n")


def _run(*words: object, **settings: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **settings)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    os.nice(10)
    main()
