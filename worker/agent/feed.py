"""Output of a job's ranks on its way from their logs to one reader, no faster than the reader takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from horovod.protos.v1 import agents_pb2, jobs_pb2
from horovod.worker.agent.log import LogReader
from horovod.worker.agent.shim import rank_folder
from horovod.worker.agent.shim_job import ShimJob

OUTPUT_COST = 64  # what a message takes of the window beside its data; readers count the same number
_MOST_BYTES = 256 << 10  # how much is read from one log at a time


class Feed:
    """Sends the logs of a job to one reader, until `run` returns. `taken` is called with what the reader confirms."""

    def __init__(self, request: agents_pb2.ReadLog, shim_job: ShimJob, send: Callable[..., None]) -> None:
        """send: is called with the fields of an AgentMessage."""
        self.shim_job = shim_job
        self.holds = request.hold
        self._request = request
        self._send = send
        self._positions = {one.rank: one.position for one in getattr(request, "from")}
        self._readers = {rank: LogReader(rank_folder(shim_job.folder, rank)) for rank in self._positions}
        self._credit = request.window_bytes
        self._more_credit = asyncio.Event()

    async def run(self) -> None:
        while True:
            growth = (
                self.shim_job.growth
            )  # asked for before the logs are read, so that growth during the read is noticed
            is_over = self.shim_job.over.is_set()
            progressed = [await self._read(rank) for rank in self._positions]
            if any(progressed):
                continue
            if is_over or self._request.until_now:
                break
            await growth.wait()
        self._send(log_end=agents_pb2.LogEnd(reader=self._request.reader))

    def taken(self, taken: jobs_pb2.Taken) -> None:
        cost = sum(one.cost for one in taken.ranks)
        self._credit = min(self._credit + cost, self._request.window_bytes)
        self._more_credit.set()
        if self.holds:
            self.shim_job.taken({one.rank: one.position for one in taken.ranks})

    async def _read(self, rank: int) -> bool:
        """Sends some output of this rank; False when there is none."""
        position, end = self._positions[rank], self.shim_job.ends.get(rank, 0)
        if position >= end:
            return False
        try:
            records, skipped = self._readers[rank].read(position, end, _MOST_BYTES)
        except OSError:  # the agent has deleted the folder, because it needed the disk space
            records, skipped = [], end - position
        self._positions[rank] = position + skipped
        for stream, data, after, written_at in records:
            while self._credit <= 0:
                self._more_credit.clear()
                await self._more_credit.wait()
            self._credit -= len(data) + OUTPUT_COST
            output = jobs_pb2.Output(
                rank=rank,
                stream=jobs_pb2.OutputStream.ValueType(stream),
                data=data,
                position=after,
                skipped_bytes=skipped,
                written_at=written_at,
            )
            skipped = 0
            self._positions[rank] = after
            self._send(output=agents_pb2.LogOutput(reader=self._request.reader, output=output))
        if skipped:
            output = jobs_pb2.Output(rank=rank, position=self._positions[rank], skipped_bytes=skipped)
            self._send(output=agents_pb2.LogOutput(reader=self._request.reader, output=output))
        return True
