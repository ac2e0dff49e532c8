"""What becomes of a job on registered agents when its launcher is killed or interrupted twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agents import DEADLINE_S, Agents
from event_words import AGAIN_TO_END_SOONER, tells
from launching import LAUNCHER, Launched, still_alive

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path) as agents:
        agents.add("h1", 2, "--log-limit-mb", "2", "--reader-grace-seconds", "0.5")
        yield agents


def ask(agents: Agents, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`horovodrun ps|logs|wait ...`."""
    return subprocess.run(
        [*LAUNCHER, arguments[0], *agents.options, *arguments[1:]],
        capture_output=True,
        text=True,
        env=agents.environ,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_job_survives_its_launcher(agents: Agents, launch: Launch, program: Program, tmp_path: Path) -> None:
    """kill -9: the ranks run on, wait for a while for a reader that is gone, and others see how the job ends."""
    go = tmp_path / "go"
    os.mkfifo(go)
    source = f"""
print("up", flush=True)
open({str(go)!r}).read()
for number in range(400):
    print(number, "x" * 50_000)
print("done")
sys.exit(3)
"""
    launched = launch(*agents.options, "--job-name", "left", "-np", "1", *program(source), environ=agents.environ)
    launched.lines(1)
    launched.process.kill()
    launched.process.wait(DEADLINE_S)
    table = ask(agents, "ps").stdout
    found = re.search(r"\bleft-[0-9a-f]{6}\b", table)
    assert found, table
    with go.open("w"):
        pass
    waited = ask(agents, "wait", found[0])
    assert waited.returncode == 3, waited.stderr
    shown = ask(agents, "logs", found[0])
    assert shown.stdout.rstrip().endswith("[0]<stdout>:done")
    assert "bytes that rank 0 printed are not kept any more" in shown.stderr  # 20 MB, of which 2 are kept


def test_a_second_ctrl_c_kills_at_once(agents: Agents, launch: Launch, program: Program) -> None:
    """No SIGTERM and no grace in between: ranks would say that they got one."""
    source = """
def told(signum, frame):
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, told)
os.write(1, f"{os.getpid()}\\n".encode())
wait_for_signals()
"""
    launched = launch(*agents.options, "-np", "2", *program(source), environ=agents.environ)
    ranks = [psutil.Process(int(line.partition(":")[2])) for line in launched.lines(2)]
    launched.signal(signal.SIGINT)
    assert sorted(launched.lines(2)) == ["[0]<stdout>:SIGINT", "[1]<stdout>:SIGINT"]
    launched.signal(signal.SIGINT)
    code, out, err = launched.finish()
    assert (code, out) == (128 + signal.SIGINT, ""), err
    assert tells(err, "SIGINT", AGAIN_TO_END_SOONER)
    assert still_alive(ranks) == []
