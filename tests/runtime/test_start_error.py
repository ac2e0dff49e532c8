"""A program whose world can't form ends with one sentence; the traceback is there for those who ask."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode

FAILING = "import horovod.common.basics as hvd; hvd.init()"


def run(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **extra}, capture_output=True, text=True, timeout=60, check=False
    )


def test_one_sentence_and_no_traceback() -> None:
    ended = run(FAILING, HOROVOD_SIZE="2")
    assert ended.returncode == 1
    assert ended.stderr.startswith("horovod: Horovod initialization failed. ")
    assert re.search(ends_with(SettingCode.MISSING_SETTING, "HOROVOD_SIZE=2"), ended.stderr)
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("level", ["debug", "trace"])
def test_the_traceback_on_request(level: str) -> None:
    assert "Traceback" in run(FAILING, HOROVOD_SIZE="2", HOROVOD_LOG_LEVEL=level).stderr


def test_other_errors_keep_their_traceback() -> None:
    code = f"""
try:
    {FAILING.replace("; ", chr(10) + "    ")}
except ValueError:
    pass
raise KeyError("mine")
"""
    ended = run(code, HOROVOD_SIZE="2")
    assert "Traceback" in ended.stderr
    assert "KeyError: 'mine'" in ended.stderr


def test_a_program_with_its_own_hook_keeps_it() -> None:
    code = f"import sys; sys.excepthook = lambda *a: print('mine', file=sys.stderr); {FAILING}"
    assert run(code, HOROVOD_SIZE="2").stderr == "mine\n"
