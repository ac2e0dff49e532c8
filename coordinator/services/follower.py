"""A client that follows a job: it hears how the job changes, and gets the output of its ranks from their agents.

Nothing is kept here. Each agent may have WINDOW_BYTES on the way, until the reader says what it has taken; so a reader
that is slow holds back the agents, and in the end the ranks, but never fills this coordinator.
"""

from collections.abc import Iterator, Set

from horovod.coordinator.core.cluster.job import OVER
from horovod.protos.v1 import agents_pb2, jobs_pb2

from .sending import Outbox

WINDOW_BYTES = 1 << 20
# A new window is opened only while less is untaken of what an agent's earlier stream brought.
MOST_UNTAKEN_BYTES = WINDOW_BYTES // 2
MOST_AHEAD_BYTES = 2 * WINDOW_BYTES  # an agent ends its window with a whole record, and may skip records that are gone
OUTPUT_COST = 64  # what a message counts beside its data, as worker/agent/feed.py counts it
MAX_EVENTS = 1 << 16  # more than all windows of a job can hold in the smallest messages is never queued

JobOutbox = Outbox[jobs_pb2.JobEvent]


class Follower:
    def __init__(self, request: jobs_pb2.Open, events: JobOutbox) -> None:
        self.job = request.job
        self.events = events
        self.readers: dict[str, int] = {}  # agent -> number of the reader that reads from it
        self._request = request
        self._reads: dict[str, tuple[int, frozenset[int]]] = {}  # agent -> share and ranks that its reader reads
        self._ahead: dict[str, int] = {}  # agent -> bytes that it has sent and the reader has not taken
        self.ended = False  # whether everything has been sent
        self._told_over = False  # whether the last record that was sent is that of a job which is over
        self._done: set[tuple[str, int]] = set()  # agents that have sent everything of a share
        # Up to where the reader has the log of a rank in a share. A rank whose process goes to another host has a log
        # in each of the shares, and so has one of a host that has got another share.
        self._positions = {(one.rank, one.share): one.position for one in getattr(request, "from")}
        self._agent_of: dict[tuple[int, int], str] = {}  # rank and share -> the agent with the log

    def changed(self, record: jobs_pb2.JobRecord) -> None:
        if self.ended:
            return
        self._told_over = record.state in OVER
        self.events.put(jobs_pb2.JobEvent(record=record))

    def begin_anew(self) -> list[int]:
        """The job has gone back to the queue without any output, so its readers begin anew.

        Returns the readers that it had.
        """
        self._done.clear()
        readers = list(self.readers.values())
        self.readers.clear()
        return readers

    def moved(self, record: jobs_pb2.JobRecord) -> list[int]:
        """The job has lost hosts: returns the readers of shares that it does not have any more."""
        shares = {share.agent: share.generation for share in record.shares}
        gone = [agent for agent in self.readers if shares.get(agent) != self._reads[agent][0]]
        return [self.readers.pop(agent) for agent in gone]

    def output(self, agent: str, output: jobs_pb2.Output) -> bool:
        """False, and nothing is passed on, when the agent sends far more than the reader has room for."""
        ahead = self._ahead.get(agent, 0) + len(output.data) + OUTPUT_COST
        if ahead > MOST_AHEAD_BYTES:
            return False
        self._ahead[agent] = ahead
        output.share = self._reads.get(agent, (0,))[0]
        self._positions[output.rank, output.share] = output.position
        self.events.put(jobs_pb2.JobEvent(output=output))
        return True

    def agent_of(self, rank: int, share: int) -> str | None:
        """The agent from which the output of this rank in this share comes."""
        return self._agent_of.get((rank, share))

    def taken(self, agent: str, taken: jobs_pb2.Taken) -> None:
        """The reader has done with this output of the agent."""
        self._ahead[agent] = max(0, self._ahead.get(agent, 0) - sum(one.cost for one in taken.ranks))

    def read_all(self, agent: str) -> None:
        """The agent has sent all output of its ranks."""
        self.readers.pop(agent, None)
        self._done.add((agent, self._reads.get(agent, (0,))[0]))

    def wanted(self, record: jobs_pb2.JobRecord) -> Iterator[jobs_pb2.Share]:
        """The shares whose output is there to be read and is not being read, or not that of all ranks."""
        if not self._request.output:
            return
        for share in record.shares:
            has_room = self._ahead.get(share.agent, 0) <= MOST_UNTAKEN_BYTES
            ranks = self._ranks_to_read(share)
            is_read = share.agent in self.readers and self._reads[share.agent][1].issuperset(ranks)
            if share.started and has_room and not is_read and not self._has_all(share) and ranks:
                yield share

    def open_on(self, share: jobs_pb2.Share, reader: int) -> agents_pb2.ReadLog:
        """The request to the agent for its output, from where the last reader stopped."""
        self.readers[share.agent] = reader
        self._reads[share.agent] = (share.generation, frozenset(self._ranks_to_read(share)))
        read = agents_pb2.ReadLog(
            reader=reader,
            job=self.job,
            hold=self._request.hold,
            until_now=self._request.until_now,
            window_bytes=WINDOW_BYTES,
        )
        for rank in self._ranks_to_read(share):
            log = rank, share.generation
            self._agent_of[log] = share.agent
            getattr(read, "from").add(rank=rank, position=self._positions.get(log, 0))
        return read

    def end_if_complete(self, record: jobs_pb2.JobRecord, agents: Set[str]) -> None:
        """Nothing more will come when the job is over and everything was read that still can be.

        The follower must have the record that says so: `record` changes before it is in the store, and is sent after.
        """
        if not self._told_over and not self._request.until_now:
            return
        if self._request.output or self._request.until_now:
            for share in record.shares:
                if share.started and share.agent in agents and not self._has_all(share) and self._ranks_to_read(share):
                    return
        self.end()

    def end(self) -> None:
        """Nothing more will come. The reader ends the stream when it has read everything.

        If it were ended here, what is still on the way would be lost with the reader's next word on what it has taken:
        gRPC answers that with an error, and forgets the rest.
        """
        if not self.ended:
            self.ended = True
            self.events.put(jobs_pb2.JobEvent(ended=jobs_pb2.JobEnded()))

    def _has_all(self, share: jobs_pb2.Share) -> bool:
        return (share.agent, share.generation) in self._done

    def _ranks_to_read(self, share: jobs_pb2.Share) -> list[int]:
        """The ranks that the request asks for and whose output is on the host of `share`."""
        wanted = self._request.ranks
        return [rank for rank in (*share.slots, *share.left) if not wanted or rank in wanted]


def with_latest_record(items: list[jobs_pb2.JobEvent]) -> Iterator[jobs_pb2.JobEvent]:
    """All output in order, and only the latest of the records."""
    latest = next((item for item in reversed(items) if item.HasField("record")), None)
    return (item for item in items if item is latest or not item.HasField("record"))
