"""`make release`: checks what `make wheels` has put into dist/, and signs the checksums.

Checked are the sdist, the changelog, each wheel's tags, metadata, licences, bill of materials and libraries; that a
second build elsewhere gives the same bytes; and that each wheel works in a new environment of its Python without a
compiler. RELEASE_KEY names the private key for ssh-keygen; only a development version may go without.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from release import contents, smoke
from release.targets import MACHINES, OPTIONAL, REQUIRED, ROOT, WORK, Target
from release.wheels import built, version

SUMS: Final = "SHA256SUMS"
NAMESPACE: Final = "horovod-release"  # what the signature is for, so that it can't be shown for something else


def changelog_problems(text: str, number: str) -> list[str]:
    """A release has a date in CHANGELOG.md, and a development version has none."""
    first = re.search(r"^## (\S+) \((.+)\)$", text, re.MULTILINE)
    if first is None or first[1] != number:
        return [f"CHANGELOG.md does not begin with {number}"]
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", first[2]) is not None
    if dated == is_development(number) or (not dated and first[2] != "unreleased"):
        return [f"CHANGELOG.md says {first[2]!r} of {number}: a release has a date, a development version `unreleased`"]
    return []


def is_development(number: str) -> bool:
    return ".dev" in number


def sdist_problems(sdist: Path, number: str, listed: Iterable[str]) -> list[str]:
    """listed: the files of the last commit."""
    with tarfile.open(sdist) as content:
        members = content.getmembers()
        names = {one.name.partition("/")[2] for one in members if one.isfile()}
        metadata = content.extractfile(f"horovod-{number}/PKG-INFO")
        said = metadata.read().decode() if metadata else ""
    found = [f"{one.name} has an absolute path" for one in members if one.name.startswith("/") or ".." in one.name]
    found += [f"{one.name} belongs to {one.uname or one.uid}" for one in members if one.uid or one.gid or one.uname]
    left_out = {name for name in filter(None, listed) if not name.startswith((".", "docs/img/"))} - names
    if left_out:
        found.append(f"{len(left_out)} files of the commit are missing, such as {sorted(left_out)[0]}")
    strange = names - set(listed) - {"PKG-INFO"}
    if strange:
        found.append(f"{len(strange)} files are not in the commit, such as {sorted(strange)[0]}")
    if f"\nVersion: {number}\n" not in said:
        found.append(f"PKG-INFO is not of version {number}")
    return [f"{sdist.name}: {problem}" for problem in found]


def sums(files: Iterable[Path]) -> str:
    """As sha256sum writes and checks them."""
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    return "".join(sorted(lines, key=lambda line: line[66:]))


def sign(file: Path, key: Path) -> Path:
    """The signature beside the file."""
    signature = file.with_name(file.name + ".sig")
    signature.unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(file)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return signature


def differences(files: Iterable[Path], target: Target) -> list[str]:
    """Builds once more, in another folder and with an empty cache. Names of files that came out otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        again = built([target], Path(folder, "dist"), Path(folder, "work"))
        first = {file.name: file.read_bytes() for file in files}
        return [
            f"{file.name}: a second build is different" for file in again if first.get(file.name) != file.read_bytes()
        ]


class Report:
    """What was checked, what is wrong and what was not checked."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def checked(self, what: str, problems: list[str]) -> None:
        print(f"{'FAILED' if problems else 'good  '} {what}", flush=True)
        self.problems += problems

    def tried(self, what: str, action: Callable[[], list[str]]) -> None:
        try:
            said = action()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.checked(what, [f"{what}: {error}"])
        else:
            self.checked(f"{what}: {', '.join(said)}", [])


def check_wheels(files: list[Path], number: str, report: Report, skipped: set[str]) -> None:
    for target in (Target(python, machine) for machine in MACHINES for python in REQUIRED + OPTIONAL):
        ending = re.compile(rf".*-{target.abi}-[\w.]*_{target.machine}\.whl")
        wheels = [file for file in files if ending.fullmatch(file.name)]
        if not wheels and target.python in REQUIRED:
            report.checked(str(target), [f"{target}: there is no wheel: run `make wheels`"])
        elif not wheels:
            report.notes.append(f"There is no wheel for {target}.")
        for wheel in wheels:
            problems = contents.problems(wheel, target, number, [ROOT, WORK])
            problems = [f"{wheel.name}: {problem}" for problem in problems]
            report.checked(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", problems)
            if "smoke" not in skipped:
                try_wheel(wheel, target, report, skipped)


def try_wheel(wheel: Path, target: Target, report: Report, skipped: set[str]) -> None:
    if not target.is_of_this_machine:
        if target.python in smoke.DEBIAN:
            report.tried(f"{target}, emulated", functools.partial(smoke.other_machine, target, wheel))
        else:
            report.notes.append(f"The wheel for {target} was inspected, not run: no release of Debian has that Python.")
        return
    frameworks = [one for one in smoke.PACKAGES if one == "no_framework" or "frameworks" not in skipped]
    for framework in frameworks:
        if target.python in smoke.NOT_FOR.get(framework, ()):
            report.notes.append(f"{framework} has no package for Python {target.python}.")
            continue
        report.tried(f"{target}", functools.partial(smoke.in_new_environment, target, wheel, framework))


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--key", type=Path, help="private key for ssh-keygen")
    parser.add_argument(
        "--skip", default="", help="of rebuild, smoke and frameworks, with commas; it is said at the end"
    )
    asked = parser.parse_args()
    skipped = set(filter(None, asked.skip.split(",")))
    number, report = version(), Report()

    report.checked("changelog", changelog_problems((ROOT / "CHANGELOG.md").read_text(), number))
    files = sorted(asked.dist.glob(f"horovod-{number}*.tar.gz")) + sorted(asked.dist.glob(f"horovod-{number}-*.whl"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sdists = [file for file in files if file.name.endswith(".tar.gz")]
    missing = [] if sdists else ["there is no sdist: run `make wheels`"]
    report.checked(
        "sdist", missing + [one for file in sdists for one in sdist_problems(file, number, listed.split("\n"))]
    )
    check_wheels(files, number, report, skipped)
    if "rebuild" not in skipped:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        for machine in MACHINES:
            target = Target(python, machine)
            report.checked(f"a second build for {target}", differences(files, target))

    if skipped:
        report.notes.append(f"Left out: {', '.join(sorted(skipped))}.")
    if not report.problems:
        file = asked.dist / SUMS
        file.write_text(sums(files))
        if asked.key:
            print(f"{file} and {sign(file, asked.key)}")
        elif is_development(number):
            report.notes.append(f"{SUMS} is not signed: RELEASE_KEY names no key.")
        else:
            report.problems.append(f"{SUMS} is not signed: set RELEASE_KEY to a private key for ssh-keygen.")
    for line in (*report.notes, *report.problems):
        print(line)
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
