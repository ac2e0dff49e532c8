"""Ranks that print more than anybody can take: nothing is lost, and no process on the way holds more than its bounds.

MEGABYTES=2000 prints as much in each test as one wants to see, with what it took and who used how much memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agents import Agents, CoordinatorProcess
from launching import Launched
from resources import eventually

PREFIX = b"[0]<stdout>:"
MEGABYTES = int(os.environ.get("MEGABYTES", "40"))
GROWTH_BYTES = 48 << 20  # of one process: its windows and queues are 1 MiB each, Python and gRPC round up


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path, coordinator=CoordinatorProcess(tmp_path)) as agents:
        agents.add("h1", 2, "--log-limit-mb", "4")
        yield agents


class Flood:
    """A rank that prints `count` lines of `width` bytes as fast as it can, once `go` is written to."""

    def __init__(self, agents: Agents, count: int, width: int) -> None:
        self.count, self.width = count, width
        self.go = agents.folder / "go"
        os.mkfifo(self.go)
        program = agents.folder / "flood.py"
        program.write_text(
            f"""
import os, sys
print("up", flush=True)
open({str(self.go)!r}).read()
rest, batch = "x" * {width - 21}, max(1, (1 << 20) // {width})
for start in range(0, {count}, batch):
    text = "".join(f"{{number:020d}}{{rest}}\\n" for number in range(start, min(start + batch, {count})))
    view = memoryview(text.encode())
    while view:
        view = view[os.write(1, view):]
"""
        )
        coordinator = agents.coordinator
        assert isinstance(coordinator, CoordinatorProcess)
        assert coordinator.process is not None
        self.launched = Launched(
            *(*agents.options, "-np", "1", sys.executable, str(program)), environ=agents.environ, child=True
        )
        assert self.launched.process.stdout is not None
        self.out = self.launched.process.stdout.buffer  # type: ignore[union-attr]
        assert self.out.readline() == PREFIX + b"up\n"
        agent = psutil.Process(agents.processes["h1"].pid)
        self.rank = next(one for one in family(agents) if str(program) in one.cmdline())
        self.ways = {
            "rank's shim": psutil.Process(self.rank.ppid()),
            "agent": agent,
            "coordinator": psutil.Process(coordinator.process.pid),
            "launcher": psutil.Process(self.launched.process.pid),
        }
        self.before = {name: peak_bytes(process) for name, process in self.ways.items()}
        self.peaks = dict(self.before)

    def begin(self) -> None:
        with self.go.open("w"):
            pass

    def stalls(self) -> bool:
        """Whether the rank has written nothing for a while: everything on the way is full."""

        def written() -> int:
            return int(self.rank.io_counters().write_chars)

        def unchanged() -> bool:
            before = written()
            time.sleep(0.3)  # no event tells that nothing happens; too short a look fails the count below
            return written() == before > 0

        return eventually(unchanged, 60)

    def check(self) -> None:
        """Reads everything: every line, once, in order, as it was printed; and looks how much memory that takes."""
        began = time.monotonic()
        expected, found = hashlib.sha256(), hashlib.sha256()
        rest = b"x" * (self.width - 21)
        looks = max(1, (4 << 20) // self.width)
        for number in range(self.count):
            if number % looks == 0:
                self.look()
            line = self.out.readline()
            assert line.startswith(PREFIX + b"%020d" % number), (number, line[:80])
            found.update(line[len(PREFIX) :])
            expected.update(b"%020d%s\n" % (number, rest))
        assert self.out.read() == b""
        assert found.hexdigest() == expected.hexdigest()
        code, _, err = self.launched.finish()
        assert (code, err) == (0, "")
        seconds = time.monotonic() - began
        growth = {name: self.peaks[name] - before for name, before in self.before.items()}
        words = ", ".join(f"{name} {grown >> 20} MiB" for name, grown in growth.items())
        print(f"{self.count * self.width / 1e6:.0f} MB in {seconds:.1f} s; peaks rose by: {words}")
        assert {name: grown for name, grown in growth.items() if grown > GROWTH_BYTES} == {}

    def look(self) -> None:
        """Peaks of memory; the shim ends when the rank has written the last byte, before the others have it."""
        for name, process in self.ways.items():
            with contextlib.suppress(OSError):
                self.peaks[name] = peak_bytes(process)


def peak_bytes(process: psutil.Process) -> int:
    """The most that was resident."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def family(agents: Agents) -> list[psutil.Process]:
    """What runs below the agent, whose shims are sessions of their own."""
    return psutil.Process(agents.processes["h1"].pid).children(recursive=True)


def test_one_rank_at_full_speed(agents: Agents) -> None:
    flood = Flood(agents, count=MEGABYTES * 1000, width=1000)
    try:
        flood.begin()
        assert flood.stalls()  # nobody reads, and the rank has to wait
        flood.check()
    finally:
        flood.launched.clean_up()


def test_lines_of_a_megabyte(agents: Agents) -> None:
    flood = Flood(agents, count=MEGABYTES, width=1_000_000)
    try:
        flood.begin()
        flood.check()
    finally:
        flood.launched.clean_up()
