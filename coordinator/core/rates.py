"""How often a member may speak and a peer may come, so that one can't take the coordinator's time from all others.

A bucket per member or agent holds messages and bytes, one per peer (an address) streams that it opens and requests of
calls that have no stream. Buckets are large and fill quickly: an honest member sends a message when an operation is new
to it, and all members of the largest world may come from one address at once. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.core.world.checks import MAX_SIZE

MAX_BUCKETS = 2 * MAX_SIZE  # buckets of each kind; full buckets, which limit nothing, are forgotten first


@dataclass(frozen=True)
class Rate:
    """`burst` at once, and `per_s` each second after that."""

    burst: float
    per_s: float


@dataclass(frozen=True)
class Rates:
    messages: Rate = Rate(50_000, 5_000)  # messages of one member
    bytes: Rate = Rate(256 << 20, 32 << 20)  # bytes of one member
    streams: Rate = Rate(4 * MAX_SIZE, 2_000)  # streams that one peer opens
    # Seconds of the event loop for one job's messages. 4,096 members that announce 500 tensors at once take half a
    # minute.
    seconds: Rate = Rate(60, 0.5)


@dataclass
class _Bucket:
    left: float
    at_s: float


@dataclass
class _Buckets:
    rate: Rate
    _of: dict[str, _Bucket] = field(default_factory=dict)

    def take(self, key: str, amount: float, now_s: float) -> bool:
        """False, and nothing is taken, when there is less than `amount`."""
        bucket = self._of.get(key)
        if bucket is None:
            if len(self._of) >= MAX_BUCKETS:
                self._forget(now_s)
            bucket = self._of[key] = _Bucket(self.rate.burst, now_s)
        left = self._filled(bucket, now_s)
        bucket.at_s = now_s
        bucket.left = left - amount if left >= amount else left
        return left >= amount

    def owe(self, key: str, amount: float, now_s: float) -> float:
        """Takes `amount` in any case. In how many seconds the bucket is not in debt any more; 0: it is not."""
        self.take(key, 0, now_s)
        bucket = self._of[key]
        bucket.left -= amount
        return max(0.0, -bucket.left / self.rate.per_s)

    def _filled(self, bucket: _Bucket, now_s: float) -> float:
        return min(self.rate.burst, bucket.left + max(0.0, now_s - bucket.at_s) * self.rate.per_s)

    def _forget(self, now_s: float) -> None:
        """Forgets full buckets; if there is none, the older half, whose owners then begin with full buckets."""
        kept = {key: bucket for key, bucket in self._of.items() if self._filled(bucket, now_s) < self.rate.burst}
        for key in sorted(kept, key=lambda key: kept[key].at_s)[: max(0, len(kept) - MAX_BUCKETS // 2)]:
            del kept[key]
        self._of = kept


class RateLimits:
    def __init__(self, rates: Rates = Rates()) -> None:
        self._messages = _Buckets(rates.messages)
        self._bytes = _Buckets(rates.bytes)
        self._streams = _Buckets(rates.streams)
        self._seconds = _Buckets(rates.seconds)

    def message(self, member: str, size_bytes: int, now_s: float) -> str:
        """A member sent a message: "", or the sentence with which its stream is to end."""
        if not self._messages.take(member, 1, now_s):
            return _too_fast(member, "messages", self._messages.rate)
        if not self._bytes.take(member, size_bytes, now_s):
            return _too_fast(member, "bytes", self._bytes.rate)
        return ""

    def stream(self, peer: str, now_s: float) -> str:
        """A peer opens a stream: "", or the sentence why it can't."""
        if not self._streams.take(peer, 1, now_s):
            return _too_fast(peer, "streams", self._streams.rate)
        return ""

    def used(self, job: str, seconds: float, now_s: float) -> None:
        """A message of the job took so much time of the event loop."""
        self._seconds.owe(job, seconds, now_s)

    def pause_s(self, job: str, now_s: float) -> float:
        """For how long its next message waits, so that other jobs have their part of the time; 0: not at all."""
        return self._seconds.owe(job, 0.0, now_s)


def _too_fast(who: str, what: str, rate: Rate) -> str:
    return coded(
        ClusterCode.TOO_MANY_MESSAGES,
        f"More {what} come from {who} than any training needs (above {rate.burst:.0f} at once, "
        f"{rate.per_s:.0f} each second are served). Ranks should use the same names for their operations in "
        "each step. If they do, please report this.",
    )
