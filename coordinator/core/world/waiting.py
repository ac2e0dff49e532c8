"""The members that wait for a job's next world, in the order in which they joined."""

from dataclasses import dataclass, field

from horovod.protos.v1 import membership_pb2 as pb

MOST_TOLD_PER_S = 1000  # progress messages of one job; what they cost must not grow faster than their number
TELL_EVERY_S = 0.2  # seconds between two progress messages to the same members, at least


@dataclass
class Waiting:
    requests: dict[str, pb.JoinRequest] = field(default_factory=dict)  # by member id, in join order
    by_rank: dict[int, pb.JoinRequest] = field(default_factory=dict)  # requested rank -> the request
    claims: dict[int, str] = field(default_factory=dict)  # rank of the last world -> who has proved to have been it
    claim_of: dict[str, int] = field(default_factory=dict)  # member id -> the rank that it has proved to have been
    bytes: int = 0  # bytes of all requests, without the options, which are the same in all of them
    kept_bytes: int = 0  # bytes of all requests, options included
    told: dict[str, str] = field(default_factory=dict)  # member id -> the progress sentence that it was sent last
    told_at_s: float | None = None
    tell_later: bool = False  # an effect TellLater was returned and is not due yet
    expected: int = 0  # for how many members the first world of an elastic job waits; 0: nobody has said so

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, member_id: object) -> bool:
        return member_id in self.requests

    @property
    def first(self) -> pb.JoinRequest | None:
        return next(iter(self.requests.values()), None)

    def add(self, request: pb.JoinRequest, claim: int | None) -> None:
        self.requests[request.member_id] = request
        self.bytes += bytes_of(request)
        self.kept_bytes += request.ByteSize()
        self.expected = max(self.expected, request.size)
        if request.HasField("requested_rank"):
            self.by_rank[request.requested_rank] = request
        if claim is not None:
            self.claims[claim] = request.member_id
            self.claim_of[request.member_id] = claim

    def remove(self, member_id: str) -> int | None:
        """Removes the member. Returns the rank of the last world that it had claimed, or None."""
        request = self.requests.pop(member_id)
        self.bytes -= bytes_of(request)
        self.kept_bytes -= request.ByteSize()
        self.told.pop(member_id, None)
        if request.HasField("requested_rank"):
            self.by_rank.pop(request.requested_rank, None)
        claim = self.claim_of.pop(member_id, None)
        if claim is not None:
            del self.claims[claim]
        return claim

    def tell_after_s(self, now_s: float) -> float:
        """How long progress must not be told yet, so that it is told at a bounded rate; 0: now."""
        if self.told_at_s is None:
            return 0.0
        return max(0.0, self.told_at_s + max(TELL_EVERY_S, len(self) / MOST_TOLD_PER_S) - now_s)


def bytes_of(request: pb.JoinRequest) -> int:
    options = sum(len(name) + len(value) for name, value in request.options.items())
    return max(0, request.ByteSize() - options)
