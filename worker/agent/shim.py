"""The shim of a job on one host: the parent process of the job's ranks there, which writes their output to logs.

The shim is a process of its own, so that the agent can be killed, or updated, while jobs run: the next agent finds the
shim by its socket, `shim.sock` in the folder of the job. A shim that is without an agent for longer than its grace ends
its ranks. When the shim itself is killed, its guardian ends them (guardian.py). So ranks are never orphaned.

The shim runs as a module with the folder as its argument, reads what to start from stdin (JSON, one line), answers "r"
on stdout when its socket listens, and does not use gRPC. In the folder it leaves a log for each rank (log.py) and, at
the end, `over.json`: how the ranks ended. On the socket both sides write lines of JSON:

    shim to agent     {"ranks": [...], "over": false, "error": "", "host_fault": false, "line": 0, "lines_done": 0}
                                                                      the whole state, whenever it changes
                      {"ends": {"0": 4711}}                           how far logs reach, some time after they grew
    agent to shim     the orders of orders.py, where an end may have an "error"
                      {"start": [...]}                                where failed processes are replaced; supervisor.py
                      {"drain": 30.0}                                 of an elastic job: its ranks leave, in this time
                      {"taken": {"0": 4000}}   {"release": true}      a reader has taken so much; it holds logs no more

A job file has several lines, each with processes of its own (coordinator/core/cluster/lines.py): a shim that has
finished a line waits until it is told to run the next. The output of all lines goes to the same logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from horovod.base.words import reason_of
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.log import SEGMENT_BYTES, STREAMS, RankLog
from horovod.worker.agent.orders import ends_job, obey
from horovod.worker.agent.output import Stream
from horovod.worker.agent.supervisor import Slot, Supervisor

# -- what keeps a host from starting any job: too little free space on the agent's disk, and errors of its system ------
SEGMENTS = 2  # segments of each rank's log that are allocated when the rank starts
BESIDE_BYTES = 512 << 10  # disk space for everything else in a job's folder

# After one of these errors the job is tried on another host, which may have what this one lacks. Any other error, as of
# a folder that does not exist, is the job's own fault.
HOST_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    }
)  # fmt: skip


def needed_bytes(ranks: int) -> int:
    """The free disk space without which a job with so many ranks on this host is not started."""
    return ranks * SEGMENTS * SEGMENT_BYTES + BESIDE_BYTES


def free_bytes(folder: Path) -> int:
    """The free space of the disk of `folder` that this process may use."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def bytes_in(folder: Path) -> int:
    """How much of the disk the files in the folder take."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


SOCKET = "shim.sock"
OVER = "over.json"
LINE_LIMIT_BYTES = 16 << 20
_OUTPUT_GRACE_S = 1.0  # how long a reader may still take the last output when the job is to end
_DELAY_S = 0.01  # how long the news that a log has grown may wait for more of it


@dataclasses.dataclass(frozen=True)
class Order:
    """What a shim is to start, and how long it waits for readers and agents."""

    lines: list[list[Slot]]  # lines run one after the other; each but the first waits for "run_line"
    held: bool
    log_limit_bytes: int
    orphan_grace_s: float
    replaces_failed: bool = False
    elastic: bool = False  # the job goes on elsewhere when its ranks here have left

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        fields = json.loads(text)
        return cls([slots_from(line) for line in fields.pop("lines")], **fields)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a process in at least one line."""
        return sorted({slot.rank for line in self.lines for slot in line})


def slots_from(fields: list[dict[str, Any]]) -> list[Slot]:
    """The slots that `dataclasses.asdict` made these of."""
    return [Slot(**{**slot, "descriptors": tuple(slot["descriptors"])}) for slot in fields]


def rank_folder(folder: Path, rank: int) -> Path:
    """The folder with the log of a rank."""
    return folder / f"rank.{rank}"


class _Logs:
    """A sink that writes the output of each rank to its log."""

    def __init__(self, folder: Path, order: Order, grown: Callable[[], None]) -> None:
        self.room: Callable[[], None] = lambda: None
        self.logs: dict[int, RankLog] = {}
        self._folder, self._limit_bytes = folder, order.log_limit_bytes
        self._held = order.held
        self._grown = grown
        self.add(order.ranks)

    def add(self, ranks: Iterable[int]) -> None:
        """Makes the logs of those that have none. OSError when the disk has no room for them."""
        for rank in ranks:
            if rank not in self.logs:
                path = rank_folder(self._folder, rank)
                self.logs[rank] = RankLog(path, limit_bytes=self._limit_bytes, held=self._held)

    def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
        room = self.logs[rank].append(STREAMS.index(stream), data)
        self._grown()
        return room

    def finish(self, rank: int, stream: Stream) -> None:
        pass

    def ends(self) -> dict[str, int]:
        return {str(rank): log.end for rank, log in self.logs.items()}

    def hold(self, positions: dict[str, int] | None) -> None:
        """positions: rank -> up to where the reader has taken its log; None: no reader holds the logs any more."""
        self._held = positions is not None
        for rank, log in self.logs.items():
            if positions is None or str(rank) in positions:
                log.hold(None if positions is None else positions[str(rank)])
        self._grown()
        if not self.wait:  # ranks that went on would fill the memory with output for which the log has no room
            self.room()

    @property
    def wait(self) -> bool:
        """Whether records wait in memory until the reader has made room in the log."""
        return any(log.waits for log in self.logs.values())


class Shim:
    def __init__(self, folder: Path, order: Order) -> None:
        self._folder = folder
        self._order = order
        self._writer: asyncio.StreamWriter | None = None  # to the agent that is connected
        self._supervisor: Supervisor | None = None
        self._logs: _Logs | None = None
        self._line = 0
        self._lines_done = 0
        self._allowed = 0  # the number of the last line that may run
        self._ending = False  # set when no further line is to begin
        self._runs = False  # whether the processes of a line run now
        self._turn = asyncio.Event()  # set when `_allowed` or `_ending` has changed
        self._error = ""
        self._host_fault = False  # whether `_error` lies in this host, and no rank was started
        self._over = False
        self._moved = asyncio.Event()  # set when the agent has sent a command
        self._told_ends: dict[str, int] = {}
        self._news: asyncio.TimerHandle | None = None
        self._orphan: asyncio.TimerHandle | None = None

    async def run(self, guardian: Guardian, listening: Callable[[], None]) -> None:
        """Runs until the last rank has ended. OSError when the socket can't be made."""
        server = await _serve(self._folder, self._on_connection)
        self._wait_for_agent()
        listening()
        try:
            self._logs = _Logs(self._folder, self._order, self._on_growth)
            for number, slots in enumerate(self._order.lines):
                if not await self._may_run(number):
                    break
                self._line = number
                self._supervisor = Supervisor(self._logs, guardian)
                self._supervisor.changed = self._tell
                self._runs = True
                await self._supervisor.run(slots, self._order.replaces_failed)
                self._runs = False
                if not self._error and len(self._supervisor.pids) < len(slots):
                    self._error = "it was stopped before all of its ranks were started"
                if self._error or any(outcome.code != 0 for outcome in self._supervisor.outcomes):
                    break
                self._lines_done = number + 1
                self._tell()
            await self._last_output()
        except OSError as error:
            self._error = str(error.strerror or error)
            self._host_fault = error.errno in HOST_ERRORS and not (self._supervisor and self._supervisor.has_started)
        finally:
            self._over = True
            for log in self._logs.logs.values() if self._logs else ():
                log.close()
        self._write_over()
        self._tell_ends()
        self._tell()
        server.close()
        if self._writer is not None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.drain(), 5)
            self._writer.close()

    async def _may_run(self, number: int) -> bool:
        """Waits until this line may run; False when the job is to end instead."""
        while not self._ending and number > self._allowed:
            self._turn.clear()
            await self._turn.wait()
        if self._ending and not self._error:
            self._error = "it was ended before its next line"
        return not self._ending

    async def _last_output(self) -> None:
        """Waits until the reader has made room for the last output; not for long when the job is to end."""
        assert self._logs is not None
        loop = asyncio.get_running_loop()
        give_up_at: float | None = None
        while self._logs.wait:
            if self._ending and give_up_at is None:
                give_up_at = loop.time() + _OUTPUT_GRACE_S
            rest_s = None if give_up_at is None else give_up_at - loop.time()
            if rest_s is not None and rest_s <= 0:
                return
            self._moved.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait(), rest_s)

    def state(self) -> dict[str, Any]:
        """What the agent reports to the coordinator."""
        ranks = self._supervisor.states() if self._supervisor else []
        progress = {"line": self._line, "lines_done": self._lines_done}
        error = {"error": self._error, "host_fault": self._host_fault}
        return {"ranks": ranks, "over": self._over, **error, **progress}

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()  # the connection of an earlier agent; the shim obeys the latest one
        self._writer = writer
        self._told_ends = {}
        if self._orphan is not None:
            self._orphan.cancel()
        self._tell_ends()
        self._tell()
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                self._obey(json.loads(line))
        if self._writer is writer:
            self._writer = None
            self._wait_for_agent()

    def _wait_for_agent(self) -> None:
        grace_s = self._order.orphan_grace_s
        self._orphan = asyncio.get_running_loop().call_later(grace_s, self._end_orphans)

    def _end_orphans(self) -> None:
        self._error = f"no agent came back for it within {self._order.orphan_grace_s:g} s, so its ranks were ended"
        if self._logs is not None:
            self._logs.hold(None)
        if self._supervisor is not None:
            self._supervisor.stop(signal.SIGTERM)
        self._moved.set()
        self._end_lines()

    def _end_lines(self) -> None:
        self._ending = True
        self._turn.set()

    def _obey(self, command: dict[str, Any]) -> None:
        if self._supervisor is None or self._logs is None:
            return
        if "start" in command:
            self._start_later(slots_from(command["start"]))
        elif "drain" in command:
            if self._order.elastic:
                self._supervisor.drain(float(command["drain"]))
        elif "run_line" in command:
            self._allowed = max(self._allowed, int(command["run_line"]))
            self._turn.set()
        elif "taken" in command:
            self._logs.hold(command["taken"])
        elif "release" in command:
            self._logs.hold(None)
        else:
            self._error = self._error or str(command.get("error", ""))
            if self._runs:  # between two lines there is no process
                obey(command, self._supervisor)
            if ends_job(command):
                self._end_lines()
        self._moved.set()

    def _start_later(self, slots: list[Slot]) -> None:
        assert self._supervisor is not None
        assert self._logs is not None
        try:
            self._logs.add(slot.rank for slot in slots)
        except OSError as error:
            self._error = self._error or reason_of(error)
            self._supervisor.end_after_failure()
            self._end_lines()
            return
        self._supervisor.start(slots)

    def _tell(self) -> None:
        self._write(self.state())

    def _on_growth(self) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().call_later(_DELAY_S, self._tell_ends)

    def _tell_ends(self) -> None:
        self._news = None
        if self._logs is not None:
            ends = self._logs.ends()
            news = {rank: end for rank, end in ends.items() if self._told_ends.get(rank) != end}
            self._told_ends = ends
            self._write({"ends": news})

    def _write(self, message: dict[str, Any]) -> None:
        # What an agent does not read stays in memory. It is little: events of ranks, and one message in each _DELAY_S.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _write_over(self) -> None:
        content = {**self.state(), "ends": self._logs.ends() if self._logs else {}}
        temporary = self._folder / f"{OVER}.new"
        with contextlib.suppress(OSError):  # on a full disk the end is told to a connected agent only
            temporary.write_text(json.dumps(content))
            os.replace(temporary, self._folder / OVER)


@contextlib.contextmanager
def short_path(folder: Path) -> Any:
    """A name for `folder`, however deep it is, that fits into a socket's address of 108 bytes (unix(7))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


async def _serve(folder: Path, on_connection: Any) -> asyncio.Server:
    with short_path(folder) as name:
        return await asyncio.start_unix_server(on_connection, f"{name}/{SOCKET}", limit=LINE_LIMIT_BYTES)


def main(folder: Path) -> None:
    """The body of the process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # the agent decides when the shim ends
    order = Order.from_json(sys.stdin.readline())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)

    def listening() -> None:
        os.write(1, b"r")
        os.dup2(null, 1)

    with Guardian() as guardian:
        asyncio.run(Shim(folder, order).run(guardian, listening))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
