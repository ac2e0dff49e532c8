"""What `make release` would refuse: wheels by hand with one thing wrong in each, changelogs, sdists, signatures.

The real wheels take minutes to build: `make wheels` and `make release` are for those who release.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from horovod import _core
from release import check, contents, wheels
from release.sbom import sbom
from release.targets import Target

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.0.0"
TARGET = Target("3.12", os.uname().machine)
INFO = f"horovod-{VERSION}.dist-info"
CORE = f"horovod/_core{TARGET.extension_suffix}"
TENSORFLOW = "horovod/libhorovod_tensorflow.so"
METADATA = f"""Metadata-Version: 2.4
Name: horovod
Version: {VERSION}
Summary: a summary
Requires-Python: >=3.10
License-Expression: Apache-2.0
{chr(10).join(f"License-File: {name}" for name in contents.LICENCES)}
Description-Content-Type: text/markdown

A description.
"""


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("there is no C compiler")
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The smallest library that is as ours must be."""
    folder = tmp_path_factory.mktemp("library")
    return linked(folder, "int horovod_here(void) { return 0; } int (*const horovod_there)(void) = horovod_here;")


def linked(folder: Path, source: str, *options: str) -> bytes:
    (folder / "a.c").write_text(source)
    hardened = ("-Wl,-z,relro,-z,now,-z,noexecstack", "-s", "-nostdlib", "-nostartfiles")
    command = [compiler(), "-shared", "-fPIC", *hardened, *options, "-o", folder / "a.so", folder / "a.c"]
    subprocess.run(command, check=True, timeout=60)
    return (folder / "a.so").read_bytes()


def good_files(library: bytes) -> dict[str, bytes]:
    files = {CORE: library, TENSORFLOW: library, "horovod/libhorovod_jax.so": library}
    files[f"{INFO}/METADATA"] = METADATA.encode()
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nTag: cp312-cp312-{TARGET.platform}\n".encode()
    files[f"{INFO}/sboms/horovod.cdx.json"] = json.dumps(sbom(VERSION, "3.1.0", "22.1.8", "0.17.1")).encode()
    return files | {f"{INFO}/licenses/{name}": b"as it is" for name in contents.LICENCES}


def written(
    folder: Path, files: dict[str, bytes], name: str = f"horovod-{VERSION}-cp312-cp312-{TARGET.platform}"
) -> Path:
    """The wheel of these files, with a record of them."""
    rows = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for file, data in files.items()
    ]
    wheel = folder / f"{name}.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        for file, data in {**files, f"{INFO}/RECORD": "".join(rows).encode()}.items():
            content.writestr(zipfile.ZipInfo(file, (2026, 1, 1, 0, 0, 0)), data)
    return wheel


def test_a_wheel_as_it_must_be_has_no_problems(library: bytes, tmp_path: Path) -> None:
    assert contents.problems(written(tmp_path, good_files(library)), TARGET, VERSION, [ROOT]) == []


@pytest.mark.parametrize(
    ("file", "data", "problem"),
    [
        (f"{INFO}/METADATA", METADATA.replace("1.0.0", "0.9").encode(), "Version is 0.9, not 1.0.0"),
        (f"{INFO}/METADATA", METADATA.replace("licenses/zig.txt", "zig.txt").encode(), "its licences are"),
        (f"{INFO}/METADATA", METADATA.replace("A description.", "").encode(), "no description"),
        (f"{INFO}/licenses/LICENSE", None, "the licence LICENSE is missing"),
        (f"{INFO}/WHEEL", b"Tag: cp312-cp312-linux_any\n", "which is not its name"),
        (f"{INFO}/sboms/horovod.cdx.json", None, "no software bill of materials"),
        ("horovod/tests/test_it.py", b"", "horovod/tests/test_it.py does not belong into a wheel"),
        (TENSORFLOW, None, f"{TENSORFLOW} is missing"),
        ("horovod/big.bin", bytes(contents.MOST_BYTES), "are too many"),
    ],
)
def test_what_is_wrong_with_the_files_is_found(
    file: str, data: bytes | None, problem: str, library: bytes, tmp_path: Path
) -> None:
    files = good_files(library)
    if data is None:
        del files[file]
    else:
        files[file] = data
    (found,) = contents.problems(written(tmp_path, files), TARGET, VERSION)
    assert problem in found


def test_tags_and_record_are_compared(library: bytes, tmp_path: Path) -> None:
    wheel = written(tmp_path, good_files(library), f"horovod-{VERSION}-cp311-cp311-linux_{TARGET.machine}")
    assert len(contents.problems(wheel, TARGET, VERSION)) == 2
    with zipfile.ZipFile(wheel, "a") as content:
        content.writestr(zipfile.ZipInfo("horovod/added.py", (2026, 1, 1, 0, 0, 0)), b"")
    assert "RECORD does not know horovod/added.py as it is" in contents.problems(wheel, TARGET, VERSION)


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("int other(void) { return 0; }", (), "exports 1 symbols that are not ours: other"),
        ("int horovod_a(void) { return 0; }", ("-Wl,-rpath,/opt/lib",), "a search path of its own"),
        ("int horovod_a(void) { return 0; }", ("-Wl,-z,lazy",), "no BIND_NOW"),
        ("int horovod_a(void) { return 0; }", ("-Wl,-z,execstack",), "an executable stack"),
        ('const char *const horovod_a = "/opt/build/a.cc";', (), "names /opt/build, a folder of the build"),
    ],
)
def test_what_is_wrong_with_a_library_is_found(
    source: str, options: tuple[str, ...], problem: str, library: bytes, tmp_path: Path
) -> None:
    files = good_files(library) | {CORE: linked(tmp_path, source, *options)}
    found = contents.problems(written(tmp_path, files), TARGET, VERSION, [Path("/opt/build")])
    assert any(one.startswith(CORE) and problem in one for one in found), found


@pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="the library is of this machine")
def test_a_library_that_the_system_s_compiler_made_is_refused(library: bytes, tmp_path: Path) -> None:
    """It needs libstdc++.so, and whichever glibc is here."""
    files = good_files(library) | {CORE: Path(_core.__file__).read_bytes()}
    found = contents.problems(written(tmp_path, files), TARGET, VERSION)
    assert any("needs libstdc++.so.6, which not every system has" in one for one in found), found


def test_a_library_for_another_machine_is_refused(library: bytes, tmp_path: Path) -> None:
    other = Target("3.12", {"x86_64": "aarch64"}.get(os.uname().machine, "x86_64"))
    files = {f"horovod/_core{other.extension_suffix}": library}
    (problem,) = (
        one
        for one in contents.problems(written(tmp_path, files | good_files(library)), other, VERSION)
        if "_core" in one
    )
    assert "it is for EM_" in problem


# -- targets -----------------------------------------------------------------------------------------------------------
def test_extensions_have_the_names_that_python_looks_for() -> None:
    machine = sysconfig.get_platform().removeprefix("linux-")
    here = Target(f"{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}", machine)
    assert here.extension_suffix == sysconfig.get_config_var("EXT_SUFFIX")
    free_threaded = Target("3.14t", "aarch64")
    assert (free_threaded.interpreter, free_threaded.abi) == ("cp314", "cp314t")
    assert free_threaded.extension_suffix == ".cpython-314t-aarch64-linux-gnu.so"


# -- the sdist ---------------------------------------------------------------------------------------------------------
def test_the_sdist_is_the_commit_and_always_the_same(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    first, second = (wheels.make_sdist(Path(sys.executable), tmp_path / n, tmp_path / "work" / n) for n in "ab")
    assert first.read_bytes() == second.read_bytes()
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines()
    assert check.sdist_problems(first, wheels.version(), names) == []
    assert (
        "1 files of the commit are missing, such as base/new.py"
        in check.sdist_problems(first, wheels.version(), [*names, "base/new.py"])[0]
    )
    assert (
        "1 files are not in the commit, such as LICENSE"
        in check.sdist_problems(first, wheels.version(), [name for name in names if name != "LICENSE"])[0]
    )
    with tarfile.open(first) as content:
        assert {one.mtime for one in content.getmembers()} == {int(wheels.commit_time())}


# -- the changelog and the checksums -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heading", "number", "good"),
    [
        ("## 1.0.0 (2026-12-01)", "1.0.0", True),
        ("## 1.0.0.dev0 (unreleased)", "1.0.0.dev0", True),
        ("## 1.0.0 (unreleased)", "1.0.0", False),
        ("## 1.0.0.dev0 (2026-12-01)", "1.0.0.dev0", False),
        ("## 1.0.0 (2026-12-01)", "1.0.1", False),
        ("## 1.0.0", "1.0.0", False),
    ],
)
def test_a_release_has_its_date_in_the_changelog(heading: str, number: str, good: bool) -> None:
    text = f"# Changelog\n\n{heading}\n\n* a change\n\n## 0.9.0 (2026-01-01)\n"
    assert (check.changelog_problems(text, number) == []) == good


def test_this_tree_s_changelog_and_version_agree() -> None:
    assert check.changelog_problems((ROOT / "CHANGELOG.md").read_text(), wheels.version()) == []


def test_users_can_verify_the_checksums(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen (openssh-client)")
    for name in ("b.whl", "a.tar.gz"):
        (tmp_path / name).write_text(name)
    file = tmp_path / check.SUMS
    file.write_text(check.sums(tmp_path.iterdir()))
    subprocess.run(["sha256sum", "--check", "--strict", file.name], cwd=tmp_path, check=True, capture_output=True)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signature = check.sign(file, key)
    signers = tmp_path / "signers"
    signers.write_text(f"releases {key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "releases", "-n", check.NAMESPACE, "-s", signature]
    for text, good in ((file.read_text(), True), (file.read_text() + " ", False)):
        done = subprocess.run(verify, input=text, text=True, capture_output=True, timeout=20)
        assert (done.returncode == 0) == good, done.stdout
