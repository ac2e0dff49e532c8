"""Known vulnerabilities of the packages that Horovod installs with itself: a part of `make lint`.

pip-audit asks the package index about the pinned versions (constraints.txt) of the dependencies that pyproject.toml
names. Many indexes, mirrors above all, serve packages and no advisories. Then, or when the answer does not come soon,
this program says so in one line and the lint goes on; it fails only for a vulnerability that somebody has published.

An answer is kept for a day in build/advisories.json. ACCEPTED has advisories that do not concern Horovod, with reasons.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "advisories.json"
KEPT_S = 24 * 3600
LIMIT_S = 8  # for all packages together
ACCEPTED: dict[str, str] = {}  # the id of an advisory -> why it does not concern Horovod
_EXTRAS = ("tls",)  # and the dependencies that everybody has
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def pins(pyproject: str, constraints: str) -> list[str]:
    """The dependencies in the versions that are tested, as "name==version"."""
    lists = re.findall(rf"^(?:dependencies|{'|'.join(_EXTRAS)}) = \[(.*?)\]\n", pyproject, re.DOTALL | re.MULTILINE)
    wanted = {_NAME.match(one)[0].lower() for text in lists for one in re.findall(r'"(.*?)"', text)}
    pinned = {line.partition("==")[0].lower(): line for line in constraints.splitlines() if "==" in line}
    return [pinned[name] for name in sorted(wanted)]


def judged(answer: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether the packages may be used, and the lines that say so, by the JSON of pip-audit."""
    told, silent = [], []
    for package in answer["dependencies"]:
        if "skip_reason" in package:
            silent.append(package["name"])
        for one in package.get("vulns", ()):
            names = {one["id"], *one.get("aliases", ())}
            if not names & ACCEPTED.keys():
                fixed = ", ".join(one["fix_versions"]) or "no version yet"
                told.append(f"{package['name']} {package['version']} has {one['id']}, fixed in {fixed}.")
    if told:
        last = "Raise the version in constraints.txt, or add the advisory with a reason to tests/advisories.py."
        return False, [*told, last]
    if silent:
        return True, [
            f"Not checked for known vulnerabilities: the index has no advisories of {', '.join(sorted(silent))}."
        ]
    return True, [f"No known vulnerability in {len(answer['dependencies'])} packages."]


def ask(requirements: list[str]) -> dict[str, Any]:
    """pip-audit's answer. Raises OSError, ValueError or subprocess.TimeoutExpired if there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        print("\n".join(requirements), file=file, flush=True)
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if not done.stdout.strip():
        raise ValueError((done.stderr.strip() or "it said nothing").splitlines()[-1])
    return dict(json.loads(done.stdout))


def answer_for(requirements: list[str]) -> dict[str, Any]:
    """That of today if there is one, else a new one."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads(KEPT.read_text())
        if time.time() - KEPT.stat().st_mtime < KEPT_S and kept["requirements"] == requirements:
            return dict(kept["answer"])
    answer = ask(requirements)
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps({"requirements": requirements, "answer": answer}))
    return answer


def main() -> int:
    requirements = pins((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text())
    try:
        good, lines = judged(answer_for(requirements))
    except subprocess.TimeoutExpired:
        good, lines = True, [f"Not checked for known vulnerabilities: the index did not answer in {LIMIT_S} s."]
    except (OSError, ValueError, KeyError) as error:
        good, lines = True, [f"Not checked for known vulnerabilities: pip-audit failed: {error}"]
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
