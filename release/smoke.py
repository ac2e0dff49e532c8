"""Wheels at work, each in a new environment of its Python with no compiler: two ranks run smoke_job.py.

The wheels for another machine, and older processors of this one, run under qemu-user (Debian: qemu-user, mmdebstrap).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from release.targets import ROOT, WORK, Target, interpreter_for

JOB: Final = Path(__file__).with_name("smoke_job.py")
# What each job needs beside the wheel, in the versions of constraints.txt.
PACKAGES: Final = {
    "no_framework": [],
    "torch": ["torch", "numpy"],
    "tensorflow": ["tensorflow-cpu"],
    "keras": ["tensorflow-cpu", "keras"],
    "jax": ["jax", "optax", "numpy"],
    "mxnet": ["mxnet>=1.9.1,<2", "numpy>=1.23.5,<1.24"],
    "lightning": ["lightning", "torch"],
}
NOT_PINNED: Final = ("mxnet",)  # whose NumPy is older than that of the others
# Pythons that a framework has no packages for.
_NEW: Final = ("3.14", "3.14t")
NOT_FOR: Final = {"mxnet": ("3.12", "3.13", *_NEW), "tensorflow": _NEW, "keras": _NEW, "jax": ("3.10",)}
# Processors to try, and the kernels that they must be given: qemu knows no AVX-512, which this machine may have.
PROCESSORS: Final = {
    "x86_64": {"core2duo": "portable", "Nehalem": "portable", "SandyBridge": "portable", "Haswell": "avx2"},
    "aarch64": {"cortex-a53": "portable", "cortex-a72": "portable", "max": "portable"},
}
# The releases of Debian that have a Python for the other machine.
DEBIAN: Final = {"3.11": "bookworm", "3.13": "trixie"}
_LIMIT_S: Final = 1200


def _run(command: Iterable[str | Path], path: Path | None = None, **environment: str) -> str:
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "HOROVOD_", "LD_", "VIRTUAL_ENV"))}
    if path is not None:  # no compiler, nor anything else of this system
        environ |= {"PATH": str(path), "CC": "no-compiler", "CXX": "no-compiler"}
    parts = [str(part) for part in command]
    done = subprocess.run(
        parts, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=_LIMIT_S, cwd=WORK, env={**environ, **environment},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(parts)}\nended with {done.returncode}:\n{done.stdout[-8000:]}")
    return done.stdout


def environment(target: Target, wheel: Path, framework: str) -> Path:
    """The interpreter of a new environment with the wheel, for a Python of this machine."""
    interpreter = interpreter_for(target.python)
    if interpreter is None:
        raise RuntimeError(f"there is no CPython {target.python} here")
    folder = WORK / "smoke" / str(target.abi)
    shutil.rmtree(folder, ignore_errors=True)
    _run([interpreter, "-m", "venv", folder])
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    pinned = [] if framework in NOT_PINNED else ["--constraint", ROOT / "constraints.txt"]
    _run([*pip, "--only-binary", ":all:", *pinned, wheel, *PACKAGES[framework]], path=python.parent)
    _run([python, "-m", "pip", "--disable-pip-version-check", "check"], path=python.parent)
    return python


def job(python: Path, frameworks: Iterable[str], **environment: str) -> list[str]:
    """What two ranks say of the frameworks; both must say the same."""
    launcher = [python, "-m", "horovod.launch", "--start-timeout", "900", "-np", "2", python, JOB]
    said = _run([*launcher, *frameworks], path=python.parent, **environment)
    by_rank = [re.findall(rf"^\[{rank}\]<stdout>:SMOKE (.*)$", said, re.MULTILINE) for rank in range(2)]
    if by_rank[0] != by_rank[1] or not by_rank[0]:
        raise RuntimeError(f"the ranks say different things, or nothing:\n{said[-8000:]}")
    return by_rank[0]


def in_new_environment(target: Target, wheel: Path, framework: str) -> list[str]:
    """The job of one framework, and without any also on older processors."""
    python = environment(target, wheel, framework)
    said = job(python, [framework])
    return said if framework != "no_framework" else said + older_processors(target, python)


def debian_root(release: str, machine: str) -> Path:
    """A folder with a Python of Debian for another machine and its libraries, nothing of which is installed here.

    grpcio needs libstdc++; our wheel does not.
    """
    folder = WORK / "debian" / f"{release}-{machine}"
    if not (folder / "usr" / "bin" / "python3").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        architecture = {"aarch64": "arm64", "x86_64": "amd64"}[machine]
        options = [
            "--mode=root",
            f"--architectures={architecture}",
            "--variant=extract",
            "--include=python3,libstdc++6",
        ]
        _run(["mmdebstrap", *options, release, folder])
        if not (folder / "lib").exists():  # since Debian 13 a link of base-files, which is not unpacked
            (folder / "lib").symlink_to("usr/lib")
    return folder


def emulated(folder: Path, emulator: Iterable[str | Path], interpreter: Path, packages: Path) -> Path:
    """A program that runs `interpreter` under an emulator. It stands for it as sys.executable, so that what starts
    further processes of it starts this program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python"
    words = " ".join(f"'{word}'" for word in (*emulator, "-0", program, interpreter))
    program.write_text(f"#!/bin/sh\nPYTHONPATH='{packages}' exec {words} \"$@\"\n")
    program.chmod(0o755)
    return program


def other_machine(target: Target, wheel: Path) -> list[str]:
    """The job without frameworks on a machine that qemu emulates, by a Python of Debian."""
    root = debian_root(DEBIAN[target.python], target.machine)
    packages = WORK / "smoke" / f"{target.abi}-{target.machine}"
    shutil.rmtree(packages, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_{target.machine}" for minor in range(28, 16, -1)]
    options = [("--platform", platform) for platform in (*platforms, f"manylinux2014_{target.machine}")]
    options += [("--abi", abi) for abi in (target.abi, "abi3", "none")]
    options += [("--python-version", target.python), ("--implementation", "cp"), ("--only-binary", ":all:")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    _run([*pip, *(part for option in options for part in option), "--target", packages, wheel])
    said = []
    for processor, kernels in PROCESSORS[target.machine].items():
        emulator = [which(f"qemu-{target.machine}"), "-cpu", processor, "-L", root]
        interpreter = root / "usr" / "bin" / f"python{target.python}"
        python = emulated(WORK / "emulated" / f"{target.abi}-{target.machine}", emulator, interpreter, packages)
        said.append(_on(processor, kernels, python))
    return said


def older_processors(target: Target, python: Path) -> list[str]:
    """The same on processors of this machine's kind that qemu emulates. python: of `environment`."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    said = []
    for processor, kernels in PROCESSORS[target.machine].items():
        emulator = [which(f"qemu-{target.machine}"), "-cpu", processor]
        program = emulated(WORK / "emulated" / f"{target.abi}-{target.machine}", emulator, python.resolve(), packages)
        said.append(_on(processor, kernels, program))
    return said


def _on(processor: str, kernels: str, python: Path) -> str:
    (said,) = job(python, ["no_framework"])
    if said != f"no_framework: kernels {kernels}":
        raise RuntimeError(f"on {processor}: {said}, but its kernels are {kernels}")
    return f"{processor}: {kernels}"


def which(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"there is no {program} here: apt-get install qemu-user mmdebstrap")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release.smoke", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--frameworks", default="no_framework", help=f"of {','.join(PACKAGES)}, with commas")
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = asked.wheel.resolve()
    (abi, machine) = re.fullmatch(r".*-cp\d+-(cp\d+t?)-.*_(x86_64|aarch64)\.whl", wheel.name).groups()
    target = Target(f"3.{abi.removeprefix('cp3')}", machine)
    if not target.is_of_this_machine:
        print(f"{target}: {', '.join(other_machine(target, wheel))}")
        return
    for framework in asked.frameworks.split(","):
        print(f"{target}: {', '.join(in_new_environment(target, wheel, framework))}", flush=True)


if __name__ == "__main__":
    main()
