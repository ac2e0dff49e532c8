"""What HOROVOD_LOG_LEVEL shows on stderr, and that a program's own logging is left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from horovod.coordinator.server import EmbeddedCoordinator

INIT = """
import logging, os, sys
from horovod.common import basics as hvd
log = logging.getLogger("horovod.test")
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
ALONE = "This process is a world of one: no coordinator is given."


def stderr_of(script: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", INIT + script], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("trace", "TRACE DEBUG INFO WARNING ERROR FATAL"),
        ("DEBUG", "DEBUG INFO WARNING ERROR FATAL"),
        ("info", "INFO WARNING ERROR FATAL"),
        ("", "WARNING ERROR FATAL"),  # the default
        ("error", "ERROR FATAL"),
        ("fatal", "FATAL"),
    ],
)
def test_every_level_shows_itself_and_what_is_worse(level: str, shown: str) -> None:
    lines = stderr_of(
        "hvd.init()\nfor level in (5, 10, 20, 30, 40, 50): log.log(level, 'mark')", HOROVOD_LOG_LEVEL=level
    )
    found = [re.fullmatch(rf"{TIME}horovod rank 0 ([A-Z]+): mark", line) for line in lines]
    assert [match[1] for match in found if match] == shown.split()


def test_a_line_has_time_rank_and_level() -> None:
    (line,) = stderr_of("hvd.init()", HOROVOD_LOG_LEVEL="info")
    assert re.fullmatch(rf"{TIME}horovod rank 0 INFO: {ALONE}", line)


def test_the_time_can_be_left_out() -> None:
    assert stderr_of("hvd.init()", HOROVOD_LOG_LEVEL="info", HOROVOD_LOG_HIDE_TIME="1") == [
        f"horovod rank 0 INFO: {ALONE}"
    ]


def test_importing_shows_nothing_and_adds_no_handler() -> None:
    script = "log.info('unseen'); print(logging.getLogger('horovod').handlers, file=sys.stderr)"
    assert stderr_of(script, HOROVOD_LOG_LEVEL="info") == ["[]"]


def test_a_second_init_does_not_show_lines_twice() -> None:
    script = "hvd.init(); hvd.shutdown(); hvd.init(); log.warning('once')"
    assert stderr_of(script, HOROVOD_LOG_HIDE_TIME="1") == ["horovod rank 0 WARNING: once"]


@pytest.mark.parametrize(
    "configure",
    [
        "logging.basicConfig(format='mine %(message)s'); hvd.init()",
        "hvd.init(); logging.basicConfig(format='mine %(message)s')",
        (
            "handler = logging.StreamHandler(); handler.setFormatter(logging.Formatter('mine %(message)s')); "
            "logging.getLogger('horovod').addHandler(handler); hvd.init()"
        ),
    ],
)
def test_the_programs_own_logging_is_respected(configure: str) -> None:
    assert stderr_of(f"{configure}\nlog.warning('once')") == ["mine once"]


def test_the_programs_own_level_is_respected() -> None:
    script = "logging.getLogger('horovod').setLevel('ERROR'); hvd.init(); log.warning('unseen'); log.error('seen')"
    lines = stderr_of(script, HOROVOD_LOG_LEVEL="info", HOROVOD_LOG_HIDE_TIME="1")
    assert lines == ["horovod rank 0 ERROR: seen"]


def test_a_forked_child_writes_once_and_says_that_it_is_no_rank() -> None:
    script = """
hvd.init()
child = os.fork()
if child == 0:
    log.warning("from the child")
    os._exit(0)
os.waitpid(child, 0)
print(child, file=sys.stderr)
"""
    line, child = stderr_of(script, HOROVOD_LOG_HIDE_TIME="1")
    assert line == f"horovod pid {child} WARNING: from the child"


def test_a_program_without_stderr_goes_on() -> None:
    assert stderr_of("hvd.init(); sys.stderr.close(); sys.stderr = None; log.warning('nobody reads this')") == []


def test_a_member_tells_its_settings_and_its_world(coordinator: EmbeddedCoordinator) -> None:
    lines = stderr_of(
        f"hvd.init('{coordinator.address}', size=1)", HOROVOD_LOG_LEVEL="debug", HOROVOD_LOG_HIDE_TIME="1"
    )
    assert any("is in world 1 of 1 ranks" in line for line in lines), lines
    assert any("DEBUG: Settings: HOROVOD_COORDINATOR=" in line for line in lines)
