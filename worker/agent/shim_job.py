"""The agent's side of a job's shim: commands and reports over its socket, and the folder with what it writes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from horovod.base.errors import LaunchCode, coded
from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.shim import LINE_LIMIT_BYTES, OVER, SOCKET, Order, short_path
from horovod.worker.agent.supervisor import Slot

START_TIMEOUT_S = 60.0  # how long a shim may take to start on a busy machine
READER_GRACE_S = 60.0  # how long ranks with full logs wait for a reader that has left
_RECORDED = "recorded"
_RANKS = "ranks.json"
_SHARE = "@"  # in the name of the folder between job and share; the job's name has none, since it is quoted
_GUARDIAN_S = 10.0  # how long the guardian of a killed shim may take to end the ranks


class ShimJob:
    """A job on this host, run by its shim. Made by `start` or `adopt`; `over` is set when its ranks have ended."""

    def __init__(
        self, folder: Path, changed: Callable[[ShimJob], None], reader_grace_s: float = READER_GRACE_S
    ) -> None:
        name, _, share = folder.name.partition(_SHARE)
        self.job = unquote(name)
        self.share = int(share or 0)  # the generation of the job's share on this host
        self.folder = folder
        self.ranks: list[int] = []
        self.ends: dict[int, int] = {}  # rank -> the position at the end of its log
        self.over = asyncio.Event()
        self.recorded = asyncio.Event()  # set when the coordinator has recorded how the job ended
        self.held = False
        self.heard = asyncio.Event()  # the shim has told of its ranks, or is gone
        self.growth = (
            asyncio.Event()
        )  # set when a log has grown, then replaced by a new one; also set when the job is over
        self._changed = changed
        self._reader_grace_s = reader_grace_s
        self._state: dict[str, Any] = {
            "ranks": [], "over": False, "error": "", "host_fault": False, "line": 0, "lines_done": 0
        }  # fmt: skip
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._release: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        job: str,
        jobs: Path,
        order: Order,
        changed: Callable[[ShimJob], None],
        reader_grace_s: float = READER_GRACE_S,
        share: int = 0,
    ) -> ShimJob:
        """Starts a shim for a new job, or another share of one. OSError with a sentence when that can't be done."""
        folder = jobs / (quote(job, safe="") + (f"{_SHARE}{share}" if share else ""))
        shim_job = cls(folder, changed, reader_grace_s)
        shim_job.folder.mkdir(mode=0o700, parents=True)
        try:
            await shim_job._start_shim(order)
        except OSError:
            shim_job.remove()  # the job may be given to this host again
            raise
        shim_job.held = order.held
        try:
            await shim_job._connect()
        except OSError:
            if not shim_job._read_over():  # a short job may be over before the agent has connected to its shim
                raise
        return shim_job

    @classmethod
    async def adopt(
        cls, folder: Path, changed: Callable[[ShimJob], None], reader_grace_s: float = READER_GRACE_S
    ) -> ShimJob:
        """The job that an earlier agent of this host left in `folder`."""
        shim_job = cls(folder, changed, reader_grace_s)
        with contextlib.suppress(OSError, ValueError):
            shim_job.ranks = json.loads((folder / _RANKS).read_text())
        if (folder / _RECORDED).exists():
            shim_job.recorded.set()
        shim_job.held = True  # a reader may still hold the logs; when none comes, they are released
        if shim_job._read_over():
            shim_job.left_by_reader(for_good=False)
            return shim_job
        try:
            await shim_job._connect()
        except OSError:
            await shim_job._end_without_shim()
        return shim_job

    @property
    def running(self) -> int:
        """How many ranks have not ended."""
        if self.over.is_set():
            return 0
        latest = {state["rank"]: state for state in self._state["ranks"]}  # a later process of a rank comes later
        return len(self.ranks) - sum(bool(state["ended"]) for state in latest.values())

    @property
    def host_fault(self) -> bool:
        """Whether the job could not be started for a reason that lies in this host."""
        return bool(self._state["host_fault"])

    def report(self) -> agents_pb2.JobReport:
        """The report for the coordinator."""
        state = self._state
        report = agents_pb2.JobReport(
            job=self.job,
            over=self.over.is_set(),
            error=state["error"],
            host_fault=self.host_fault,
            line=state["line"],
            lines_done=state["lines_done"],
            share=self.share,
        )
        for state in self._state["ranks"]:
            report.ranks.add(**state)
        return report

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether this process, or a later one of its rank, was started. To be asked once `heard` is set."""
        return any(one["rank"] == rank and one["incarnation"] >= incarnation for one in self._state["ranks"])

    def start_later(self, slots: Sequence[Slot]) -> None:
        """Starts these processes in place of earlier ones of their ranks; nothing happens for those it has already."""
        if new := [dataclasses.asdict(slot) for slot in slots if not self.has(slot.rank, slot.incarnation)]:
            self.ranks = sorted({*self.ranks, *(slot["rank"] for slot in new)})
            with contextlib.suppress(OSError):  # the next agent counts fewer of them
                (self.folder / _RANKS).write_text(json.dumps(self.ranks))
            self.tell(start=new)

    def tell(self, **command: Any) -> None:
        """Sends the shim a command (shim.py). Nothing happens when the shim is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(command).encode() + b"\n")

    def taken(self, positions: dict[int, int]) -> None:
        """The reader that holds the logs has processed them up to these positions, by rank."""
        self.tell(taken={str(rank): position for rank, position in positions.items()})

    def held_by_reader(self, positions: dict[int, int]) -> None:
        """A reader has come that holds the logs from these positions on, by rank; also logs that were released."""
        self._stay_held()
        self.held = True
        self.taken(positions)

    def left_by_reader(self, for_good: bool) -> None:
        """The reader has left. When no other one comes for a while, the ranks no longer wait for a reader."""
        self._stay_held()
        if self.held:
            grace_s = 0.0 if for_good else self._reader_grace_s
            self._release = asyncio.get_running_loop().call_later(grace_s, self._let_go)

    def record(self) -> None:
        """The coordinator has recorded how the job ended."""
        self.recorded.set()
        with contextlib.suppress(OSError):
            (self.folder / _RECORDED).touch()

    def remove(self) -> None:
        """Deletes the job's folder with its logs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Disconnects from the shim. It runs on, and the next agent will find it."""
        self._stay_held()
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _start_shim(self, order: Order) -> None:
        self.ranks = order.ranks
        (self.folder / _RANKS).write_text(json.dumps(self.ranks))
        command = [sys.executable, "-m", "horovod.worker.agent.shim", str(self.folder)]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd="/",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=LINE_LIMIT_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(ConnectionError):  # the shim has ended, and its stderr says why
            process.stdin.write(order.to_json().encode() + b"\n")
            await process.stdin.drain()
        try:
            ready = await asyncio.wait_for(process.stdout.read(1), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            process.kill()
            why = f"the process that keeps its ranks did not start within {START_TIMEOUT_S:g} s"
            raise OSError(0, coded(LaunchCode.PROCESS_NOT_STARTED, why)) from None
        if not ready:
            said = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            why = f"the process that keeps its ranks can't be started: {said}"
            raise OSError(0, coded(LaunchCode.PROCESS_NOT_STARTED, why))

    def _stay_held(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None

    def _let_go(self) -> None:
        self.held = False
        self.tell(release=True)

    async def _connect(self) -> None:
        with short_path(self.folder) as name:
            reader, writer = await asyncio.open_unix_connection(f"{name}/{SOCKET}", limit=LINE_LIMIT_BYTES)
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))
        self.left_by_reader(for_good=False)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            while line := await reader.readline():
                self._heard(json.loads(line))
                if self.over.is_set():
                    return
        if not self._read_over():
            await self._end_without_shim()

    def _heard(self, message: dict[str, Any]) -> None:
        if "ends" in message:
            self._grown({int(rank): end for rank, end in message["ends"].items()})
        if "ranks" in message:
            self._state |= {name: value for name, value in message.items() if name in self._state}
            self.heard.set()
            if message["over"]:
                self._set_over()
            self._changed(self)

    def _read_over(self) -> bool:
        try:
            content = json.loads((self.folder / OVER).read_text())
        except (OSError, ValueError):
            return False
        self._heard(content)
        return True

    async def _end_without_shim(self) -> None:
        """The shim was killed and its guardian ends the ranks. Reports the job as over when they are gone."""
        pids = [rank["pid"] for rank in self._state["ranks"] if not rank["ended"]]
        for _ in range(round(_GUARDIAN_S / 0.1)):
            if not any(_lives(pid) for pid in pids):
                break
            await asyncio.sleep(0.1)  # the kernel has no event for the end of processes that are not our children
        self._state["error"] = "the process that keeps its ranks was killed, which ended them"
        self._set_over()
        self._changed(self)

    def _grown(self, ends: dict[int, int]) -> None:
        self.ends.update(ends)
        growth, self.growth = self.growth, asyncio.Event()
        growth.set()

    def _set_over(self) -> None:
        self.over.set()
        self.heard.set()
        self.growth.set()


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
