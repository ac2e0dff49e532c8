"""A job as the agent of its host sees it: the keeper behind a socket, and the folder with what it writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.keeper import LINE_LIMIT_BYTES, OVER, SOCKET, Order, short_path

START_TIMEOUT_S = 60.0  # for a keeper on a busy machine
READER_GRACE_S = 60.0  # how long ranks wait for a reader that is not there, once they have filled their logs
_RECORDED = "recorded"
_RANKS = "ranks.json"
_GUARDIAN_S = 10.0  # after its keeper was killed, until its guardian has ended the ranks


class KeptJob:
    """`start` or `adopt` one; `over` tells when its ranks have ended."""

    def __init__(
        self, job: str, folder: Path, changed: Callable[[KeptJob], None], reader_grace_s: float = READER_GRACE_S
    ) -> None:
        self.job = job
        self.folder = folder
        self.ranks: list[int] = []
        self.ends: dict[int, int] = {}  # of the logs, by rank
        self.over = asyncio.Event()
        self.recorded = asyncio.Event()  # the coordinator needs to hear no more of it
        self.held = False
        self.growth = asyncio.Event()  # replaced with each growth of a log, and set when the job is over
        self._changed = changed
        self._reader_grace_s = reader_grace_s
        self._state: dict[str, Any] = {"ranks": [], "over": False, "error": "", "line": 0, "lines_done": 0}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._release: asyncio.TimerHandle | None = None

    @classmethod
    async def start(
        cls,
        job: str,
        jobs: Path,
        order: Order,
        changed: Callable[[KeptJob], None],
        reader_grace_s: float = READER_GRACE_S,
    ) -> KeptJob:
        """Starts a keeper. OSError with a sentence when that can't be done."""
        kept = cls(job, jobs / quote(job, safe=""), changed, reader_grace_s)
        kept.folder.mkdir(mode=0o700, parents=True)
        kept.ranks = order.ranks
        (kept.folder / _RANKS).write_text(json.dumps(kept.ranks))
        command = [sys.executable, "-m", "horovod.worker.agent.keeper", str(kept.folder)]
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
        with contextlib.suppress(ConnectionError):  # then it has something to say on stderr
            process.stdin.write(order.to_json().encode() + b"\n")
            await process.stdin.drain()
        try:
            ready = await asyncio.wait_for(process.stdout.read(1), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            process.kill()
            raise OSError(0, f"the process that keeps its ranks did not start within {START_TIMEOUT_S:g} s") from None
        if not ready:
            said = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(0, f"the process that keeps its ranks can't be started: {said}")
        kept.held = order.held
        try:
            await kept._connect()
        except OSError:
            if not kept._read_over():  # a job of a moment may be over before this agent has called
                raise
        return kept

    @classmethod
    async def adopt(
        cls, folder: Path, changed: Callable[[KeptJob], None], reader_grace_s: float = READER_GRACE_S
    ) -> KeptJob:
        """The job that an earlier agent of this host left in `folder`."""
        kept = cls(unquote(folder.name), folder, changed, reader_grace_s)
        with contextlib.suppress(OSError, ValueError):
            kept.ranks = json.loads((folder / _RANKS).read_text())
        if (folder / _RECORDED).exists():
            kept.recorded.set()
        kept.held = True  # perhaps; it is released when no reader comes
        if not kept._read_over():
            try:
                await kept._connect()
            except OSError:
                await kept._end_without_keeper()
        return kept

    @property
    def running(self) -> int:
        """Ranks that have not ended."""
        if self.over.is_set():
            return 0
        return len(self.ranks) - sum(bool(rank["ended"]) for rank in self._state["ranks"])

    def report(self) -> agents_pb2.JobReport:
        """For the coordinator."""
        state = self._state
        report = agents_pb2.JobReport(
            job=self.job,
            over=self.over.is_set(),
            error=state["error"],
            line=state["line"],
            lines_done=state["lines_done"],
        )
        for one in self._state["ranks"]:
            rank = report.ranks.add(rank=one["rank"], pid=one["pid"], ended=one["ended"])
            if one["ended"]:
                rank.stopped = one["stopped"]
                if one["code"] is not None:
                    rank.code = one["code"]
        return report

    def tell(self, **command: Any) -> None:
        """Passes a command on to the keeper (keeper.py); one that is gone needs none."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(command).encode() + b"\n")

    def taken(self, positions: dict[int, int]) -> None:
        """The reader that holds the logs has done with this."""
        self.tell(taken={str(rank): position for rank, position in positions.items()})

    def held_by_reader(self, positions: dict[int, int]) -> None:
        """A reader is there that holds the logs, by rank from these positions on; also after they had been let go."""
        self._stay_held()
        self.held = True
        self.taken(positions)

    def left_by_reader(self, for_good: bool) -> None:
        """No reader holds the logs now; when none comes for a while, the ranks no longer wait for one."""
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
        """Deletes the logs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Leaves the keeper to the next agent."""
        self._stay_held()
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _stay_held(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None

    def _let_go(self) -> None:
        self.held = False
        self.tell(release=True)

    async def _connect(self) -> None:
        with short_path(self.folder) as name:
            reader, self._writer = await asyncio.open_unix_connection(f"{name}/{SOCKET}", limit=LINE_LIMIT_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        self.left_by_reader(for_good=False)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                self._heard(json.loads(line))
                if self.over.is_set():
                    return
        if not self._read_over():
            await self._end_without_keeper()

    def _heard(self, message: dict[str, Any]) -> None:
        if "ends" in message:
            self._grown({int(rank): end for rank, end in message["ends"].items()})
        if "ranks" in message:
            self._state |= {name: value for name, value in message.items() if name in self._state}
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

    async def _end_without_keeper(self) -> None:
        """The keeper was killed. Its guardian ends the ranks; the coordinator hears of it when they are gone."""
        pids = [rank["pid"] for rank in self._state["ranks"] if not rank["ended"]]
        for _ in range(round(_GUARDIAN_S / 0.1)):
            if not any(_lives(pid) for pid in pids):
                break
            await asyncio.sleep(0.1)  # they are not our children: no event tells
        self._state["error"] = "the process that keeps its ranks was killed, which ended them"
        self._set_over()
        self._changed(self)

    def _grown(self, ends: dict[int, int]) -> None:
        self.ends.update(ends)
        growth, self.growth = self.growth, asyncio.Event()
        growth.set()

    def _set_over(self) -> None:
        self.over.set()
        self.growth.set()


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
