"""The attacks that SECURITY.md names, all at once: `make attack`.

Each row of its table (who attacks, what they can do, what stops them) names in the source of the page the tests that
attack. This program runs them in namespaces of their own, so that nothing leaves them: no network but loopback, no
processes, /tmp or shared memory but their own. It then says for each row whether it holds. What this machine can't do
(only root has namespaces and other users) is said by name: such a row was not tried, or not in whole.

Other pages whose rows name their tests are read in the same way: docs/elastic-promises.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PRIVATE = ("/tmp", "/dev/shm")  # folders that all users share
NAMESPACES = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
LIMIT_S = 1200
SECURITY, ATTACKERS = "SECURITY.md", "\n## What Horovod does by design\n"

_NAMED = re.compile(r"<!-- (.*?) -->")
_DEFINED = {
    ".py": re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE),
    ".cc": re.compile(r"^void (test_\w+)", re.MULTILINE),
}


@dataclass(frozen=True)
class Row:
    """Of a page: the first cell, and the tests that its comment names, as "folder/test_file.py::test_name"."""

    text: str
    tests: tuple[str, ...]


def rows(page: str) -> list[Row]:
    """Of the page's tables, without their heads; of SECURITY.md only of the one of attackers."""
    text = (ROOT / page).read_text()
    section = text.partition(ATTACKERS)[2].partition("\n## ")[0] if page == SECURITY else text
    lines = section.splitlines()
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    return [
        Row(line.split("|")[1].strip(), tuple(name for names in _NAMED.findall(line) for name in names.split()))
        for number, line in enumerate(lines)
        if line.startswith("| ") and number not in heads
    ]


def defects(page: str) -> list[str]:
    """What is wrong with the page's rows: they name no test, or one that is not there."""
    found = [f"{page}: no test is named in the row: {row.text}" for row in rows(page) if not row.tests]
    for name in (name for row in rows(page) for name in row.tests):
        path, _, test = name.partition("::")
        file = TESTS / path
        if not file.is_file() or test not in _DEFINED[file.suffix].findall(file.read_text()):
            found.append(f"{page}: there is no test {name}")
    return found


def as_pytest_has_it(name: str) -> str:
    """What selects the test: those in C++ are programs, each of which is one test of pytest."""
    path, _, test = name.partition("::")
    if path.endswith(".cc"):
        return f"{TESTS / 'native/test_native.py'}::test_program[{Path(path).stem}]"
    return f"{TESTS / path}::{test}"


# -- running them ------------------------------------------------------------------------------------------------------
def missing() -> list[str]:
    """What this machine lacks, each with what follows."""
    found = []
    if os.geteuid() != 0:
        found.append("not root: no namespaces, and attacks of another user are left out")
    for program, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("mount", "mount")):
        if shutil.which(program) is None:
            found.append(f"no {program} (package {package}): no namespaces")
    tried = [*NAMESPACES, "true"]
    if not found and subprocess.run(tried, capture_output=True, check=False).returncode:
        found.append("the kernel allows no new namespaces here")
    return found


def inside(command: Sequence[str]) -> int:
    """The first process of the namespaces: readies them, runs the command, and reaps what that leaves."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for folder in PRIVATE:
        if not any(Path(path).resolve().is_relative_to(folder) for path in (ROOT, sys.prefix, sys.executable)):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder], check=True)
    running = subprocess.Popen(command)
    while True:
        pid, status = os.wait()
        if pid == running.pid:
            return os.waitstatus_to_exitcode(status)


def outcomes(report: Path) -> dict[str, list[tuple[str, str]]]:
    """By name of the test, without parameters: what became of each of its cases, and why."""
    found: dict[str, list[tuple[str, str]]] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"\[(?!\w+_test\]).*", "", case.get("name", ""))
        module = case.get("classname", "").rpartition(".")[2]
        ends = [end for end in case if end.tag in ("failure", "error", "skipped")]
        why = " ".join((ends[0].get("message") or "").split())[:200] if ends else ""
        found.setdefault(f"{module}::{name}", []).append((ends[0].tag if ends else "passed", why))
    return found


def verdict(row: Row, found: dict[str, list[tuple[str, str]]]) -> tuple[bool, str]:
    """Whether nothing is wrong, and how the row is shown."""
    cases = []
    for name in row.tests:
        path, _, test = as_pytest_has_it(name).partition("::")
        cases += found.get(f"{Path(path).stem}::{test}", [("error", f"{name} did not run")])
    wrong = [why for end, why in cases if end in ("failure", "error")]
    left_out = sorted({why for end, why in cases if end == "skipped"})
    if wrong:
        return False, f"BROKEN     {row.text}: {wrong[0]}"
    if left_out:
        did = "in part   " if any(end == "passed" for end, _ in cases) else "not tried "
        return True, f"{did} {row.text} ({'; '.join(left_out)})"
    return True, f"holds      {row.text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs the attacks that SECURITY.md names, in namespaces.")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        return inside(options.inside)
    if wrong := defects(SECURITY):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    lacks = missing()
    for one in lacks:
        print(f"Missing here: {one}.")
    names = sorted({as_pytest_has_it(name) for row in rows(SECURITY) for name in row.tests})
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *names]
        if not lacks:
            command = [*NAMESPACES, sys.executable, __file__, "--inside", *command]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"The attacks were not over after {LIMIT_S} s.", file=sys.stderr)
            return 1
        if not report.is_file():
            return code or 1
        found = outcomes(report)
    shown = [verdict(row, found) for row in rows(SECURITY)]
    print("\n".join(["", *(line for _, line in shown)]))
    return 0 if code == 0 and all(good for good, _ in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
