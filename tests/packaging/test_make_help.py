"""`make help` says what each command is for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_has_its_meaning() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    said = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(said) == set(phony.split()) - {"ready"}  # a part of `build`
    assert min(len(meaning.split()) for meaning in said.values()) > 1
    assert len(done.stdout.splitlines()) == len(said)
