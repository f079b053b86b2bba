"""The wheel for aarch64 with PyTorch for aarch64, on this machine: an emulator runs a Python unpacked in a folder.

    SITE=.venv/lib/python3.11/site-packages
    python scripts/emulated_aarch64.py --folder F --wheel dist/subquad-…_aarch64.whl --site $SITE
    python scripts/emulated_aarch64.py --folder F --wheel … --site $SITE -- -m pytest -q -p pytest_timeout tests/native

Needs Debian's qemu-user, apt (not as root) and pip with their network. It unpacks Debian's Python and what is compiled
of our dependencies, some 6 GB with what PyTorch's wheel for such machines asks of CUDA, into `--folder`, where they are
found again the next time; whatever is Python alone is taken from `--site`. What is run there is the trial of
`build_wheels.py`: every mechanism by the library of the wheel against the eager form. Behind `--` stands another
command. An emulator says whether it is right, not how fast it is.
"""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from build_wheels import TRIAL

DEBS = ("python3.11", "libgomp1", "libstdc++6", "libnuma1")
COMPILED = ("torch", "torchvision", "numpy", "pillow", "pyyaml", "markupsafe", "safetensors")
CUDA = (
    *("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-cufft"),
    *("nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-nvjitlink", "nvidia-cufile", "nvidia-cudnn-cu13"),
    *("nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
)
"""What PyTorch's library names and no CPU uses."""

PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (17, 18, 25, 27, 28)] + ["manylinux2014_aarch64"]
MARK = "made-by-emulated_aarch64"
"""A file of this name says that what lies in a folder may be made anew."""

PROCESSOR = "neoverse-n1"
CPUINFO = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""As Linux describes such a processor: PyTorch looks there, where the emulator shows that of this machine."""


def unpack_python(root: Path, place: Path) -> None:
    """Debian's Python for aarch64, with what it needs, at `root`."""
    settings = ["APT::Architecture=arm64", "APT::Architectures::=arm64", f"Dir::State={place}"]
    settings += [f"Dir::State::status={place / 'status'}", f"Dir::Cache={place / 'cache'}"]
    for folder in ("lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    (place / "status").touch()
    apt = ["apt-get", "-q", *(word for setting in settings for word in ("-o", setting))]
    run([*apt, "update"])
    run([*apt, "install", "-y", "--download-only", "--no-install-recommends", *DEBS])
    for package in sorted((place / "cache" / "archives").glob("*.deb")):
        run(["dpkg", "-x", package, root])
    cpus = range(os.cpu_count() or 1)
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text("".join(CPUINFO.format(number=number) for number in cpus))
    for number in cpus:
        folder = root / "sys" / "devices" / "system" / "cpu" / f"cpu{number}" / "regs" / "identification"
        folder.mkdir(parents=True)
        (folder / "midr_el1").write_text("0x00000000410fd0c0\n")


def install(site: Path) -> None:
    """What is compiled of the dependencies, of the versions that are here, at `site`."""
    words = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--only-binary=:all:", "--target", site]
    words += ["--python-version", "3.11", "--implementation", "cp"]
    words += [word for name in PLATFORMS for word in ("--platform", name)]
    run([*words, *(f"{name}=={version(name).partition('+')[0]}" for name in COMPILED), *CUDA])


def run(words: list[object]) -> None:
    """Run a program; what it says is shown where it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]} ends with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}")


def main() -> None:
    """Prepare what is not there, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where Python and packages for aarch64 lie")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True, help="site-packages of here, for what is Python alone")
    parser.add_argument("--processor", default=PROCESSOR, help="what the emulator is (qemu-aarch64 -cpu help)")
    parser.add_argument("command", nargs="*", help="of Python, behind --; the trial of the wheel if left out")
    arguments = parser.parse_args()
    if missing := [tool for tool in ("qemu-aarch64", "apt-get", "dpkg") if shutil.which(tool) is None]:
        raise SystemExit(f"there is no {', '.join(missing)}")
    folder: Path = arguments.folder.resolve()
    root, site, own, home = (folder / name for name in ("root", "site", "own", "home"))
    ours, done = folder / MARK, folder / "complete"
    if not ours.exists() and folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} has other things in it: give a --folder that is empty or new")
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        ours.touch()
        for place in (root, site):  # begun and broken off
            shutil.rmtree(place, ignore_errors=True)
        unpack_python(root, folder / "apt")
        install(site)
        done.touch()
    for place in (own, home):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    with zipfile.ZipFile(arguments.wheel) as archive:
        archive.extractall(own)
    (folder / "trial.py").write_text(TRIAL)
    libraries = [*sorted({path.parent for path in site.glob("nvidia/**/*.so*")}), root / "lib/aarch64-linux-gnu"]
    settings = {
        "LD_LIBRARY_PATH": [*libraries, root / "usr/lib/aarch64-linux-gnu"],
        "PYTHONPATH": [own, site, arguments.site.resolve()],
        "PATH": [folder / "nothing"],
        "SUBQUAD_HOME": [home],
        "PYTHONHOME": [root / "usr"],
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": [1],  # of what lies in --site some is compiled for this machine
    }
    inside = [word for name, value in settings.items() for word in ("-E", f"{name}={':'.join(map(str, value))}")]
    emulator = ["qemu-aarch64", "-L", str(root), "-cpu", arguments.processor, *inside]
    command = arguments.command or [str(folder / "trial.py"), str(own), str(home)]
    python = str(root / "usr" / "bin" / "python3.11")
    ended = subprocess.run([*emulator, python, *command], check=False, env={"PATH": os.environ["PATH"]})
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
