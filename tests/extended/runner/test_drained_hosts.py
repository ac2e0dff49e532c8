"""Agents that get SIGTERM while ranks of an elastic job run there: the job goes on elsewhere, and no step fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import Agents
from event_words import DRAINED, REPLACED, tells
from launching import Launched, still_alive
from test_changing_sizes import sizes, source

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

# Steps until one process has seen a smaller world and then a larger one again.
PROGRAM = source("pass")
for old, new in {
    "while state.steps < 6 or state.last_size < 2:": "while not total(state.sizes == [2, 1, 2]):",
    "        state.last_size = hvd.size()\n": "        state.see(hvd.size())\n",
    "self.saved = self.last_size = 0": "self.saved = 0\n        self.sizes = []",
    "        self.steps = self.saved\n": "        self.steps = self.saved\n        print('went back', flush=True)\n",
    "    def save(self):\n": """    def see(self, size):
        if self.sizes[-1:] != [size]:
            self.sizes.append(size)
    def save(self):
""",
}.items():
    assert PROGRAM.count(old) == 1, old
    PROGRAM = PROGRAM.replace(old, new)


@pytest.mark.parametrize("drained", ["h1", "h2"])
def test_a_job_goes_on_without_a_host_that_is_drained(
    tmp_path: Path, launch: Launch, program: Program, drained: str
) -> None:
    stays = 0 if drained == "h2" else 1
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        agents.add("h2", slots=1)
        options = [*agents.options, "-np", "2", "--min-np", "1", "--max-np", "2", "--reset-limit", "0"]
        launched = launch(*options, *program(PROGRAM), environ=agents.environ)
        said = launched.lines(2)  # each has taken a step
        agents.processes[drained].send_signal(signal.SIGTERM)
        assert agents.processes[drained].wait(60) == 0
        while not any(line.endswith(" 1") for line in said if f"[{stays}]<stdout>:step" in line):
            said += launched.lines(1)
        agents.add("h3", slots=1)
        code, out, err = launched.finish()
    assert code == 0, err
    out = "\n".join([*said, out])
    assert sizes(out, rank=stays) == [2, 1, 2]
    assert "went back" not in out
    assert tells(err, f"Host {drained} {DRAINED}", "1 process")


def test_ranks_that_do_not_leave_in_time_are_ended(tmp_path: Path, launch: Launch, program: Program) -> None:
    never_commits = PROGRAM.replace("state.commit()", "state.save()")
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        agents.add("h2", 1, "--drain-seconds", "0.1")
        options = [*agents.options, "-np", "2", "--min-np", "1", "--max-np", "2", "--reset-limit", "0"]
        launched = launch(*options, *program(never_commits), environ=agents.environ)
        said = launched.lines(2)  # each has taken a step
        agents.processes["h2"].send_signal(signal.SIGTERM)
        assert agents.processes["h2"].wait(60) == 0
        while not any("went back" in line for line in said):
            said += launched.lines(1)
        launched.signal(signal.SIGINT)
        _, _, err = launched.finish()
    assert tells(err, f"Host h2 {DRAINED}", "1 process")


def test_all_hosts_are_drained(tmp_path: Path, launch: Launch, program: Program) -> None:
    """The job waits for others, and says so; its state is lost."""
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=2)
        options = [*agents.options, "-np", "2", "--min-np", "1", "--max-np", "2"]
        launched = launch(*options, *program(PROGRAM), environ={**agents.environ, "HOROVOD_ELASTIC_TIMEOUT": "1"})
        launched.lines(2)  # each has taken a step
        agents.processes["h1"].send_signal(signal.SIGTERM)
        assert agents.processes["h1"].wait(60) == 0
        code, _, err = launched.finish()
    assert code != 0
    assert tells(err, f"Host h1 {DRAINED}", "2 processes")


def test_a_launcher_that_gets_sigterm_ends_the_whole_job(launch: Launch, program: Program) -> None:
    launched = launch("-np", "2", "--min-np", "1", *program(PROGRAM))
    launched.lines(2)  # each has taken a step
    family = launched.remember_family()
    launched.signal(signal.SIGTERM)
    code, _, err = launched.finish()
    assert code == 128 + signal.SIGTERM, err
    assert REPLACED not in err
    assert still_alive(family) == []
