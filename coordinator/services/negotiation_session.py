"""The negotiation of one world, and the streams over which its ranks take part."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import grpc

from horovod.base.errors import ClusterCode, WorldCode, coded
from horovod.base.telemetry.logs import about
from horovod.coordinator.core.agreement.budget import Answers
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.agreement.stall import OVER, StallWatch
from horovod.coordinator.metrics import CoordinatorMetrics
from horovod.protos.v1 import negotiation_pb2

from .sending import Outbox

DecisionsOutbox = Outbox[negotiation_pb2.Decisions]

LOOK_SHARE = 20  # the pause between two looks for stalls is this many times the duration of a look

_log = logging.getLogger(__name__)


@dataclass
class NegotiationSession:
    """The negotiation of a job's running world and its streams."""

    job: str
    epoch: int
    term: int  # the term in which this coordinator serves the job (serving.py)
    negotiation: Negotiation
    stalls: StallWatch
    ignored: str = ""  # what rank 0 is to hear about the settings when it opens its stream
    told_level: int = logging.WARNING
    streams: dict[int, DecisionsOutbox] = field(default_factory=dict)  # by rank
    seen: set[int] = field(default_factory=set)  # ranks that have opened a stream at least once
    look_at_s: float = 0.0  # when to look for stalls again
    shutdown: str = ""  # every rank is to end the epoch with this sentence
    reports: dict[int, negotiation_pb2.RankReport] = field(default_factory=dict)  # rank -> its latest report
    metrics: CoordinatorMetrics | None = None
    # Which of the given ranks are seen to be stopped, as a sentence.
    stopped_in_words: Callable[[Collection[int]], str] = lambda ranks: ""

    def send(self, answers: Answers) -> None:
        for ranks, decisions in answers:
            decisions.term = self.term
            if self.metrics is not None:
                self.metrics.decided(self.job, decisions)
            for rank in ranks:
                if rank in self.streams:
                    self.streams[rank].put(decisions)

    def warn(self, sentence: str) -> None:
        """Writes the sentence to this log, and to the stderr of rank 0."""
        level = self.told_level if 0 in self.streams else logging.WARNING
        _log.log(level, "Job %r: %s", self.job, sentence, extra=about(self.job, self.epoch))
        if 0 in self.streams:
            self.streams[0].put(negotiation_pb2.Decisions(epoch=self.epoch, term=self.term, warnings=[sentence]))

    def watch_stalls(self, now_s: float) -> None:
        if now_s < self.look_at_s or not (after_s := self.stalls.times.shortest_s):
            return
        began_s = time.monotonic()
        stalls = self.negotiation.stalls(now_s, after_s)
        verdict = self.stalls.look(stalls, now_s)
        # A stall of all operations in a large world takes long to look at.
        self.look_at_s = now_s + LOOK_SHARE * (time.monotonic() - began_s)
        if verdict.warning:
            if self.metrics is not None and verdict.warning != OVER:
                self.metrics.stalls.add(1, self.job)
            stopped = self.stopped_in_words({rank for stall in stalls for rank in stall.missing})
            self.warn(f"{verdict.warning}\n{stopped}" if stopped else verdict.warning)
        if verdict.shutdown:
            self.shutdown = verdict.shutdown
            _log.log(self.told_level, "Job %r: %s", self.job, verdict.shutdown, extra=about(self.job, self.epoch))
            for rank in self.streams:
                self.tell_shutdown(rank)

    def tell_shutdown(self, rank: int) -> None:
        self.streams[rank].put(negotiation_pb2.Decisions(epoch=self.epoch, term=self.term, shutdown=self.shutdown))

    def end(self, sentence: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> None:
        for stream in self.streams.values():
            stream.fail(code, sentence)
        self.streams.clear()


def newer_stream(rank: int) -> str:
    """The sentence with which an older stream of the rank ends."""
    return coded(ClusterCode.NEWER_STREAM, f"Rank {rank} opened a newer stream.")


def epoch_over(epoch: int, job: str) -> str:
    """The sentence for the ranks of a world that has ended."""
    return coded(WorldCode.EPOCH_OVER, f"World {epoch} of job {job!r} is over.")
