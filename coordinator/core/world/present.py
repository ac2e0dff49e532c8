"""A member of a running world, and what is known of its life."""

from dataclasses import dataclass, field

from horovod.base.words import process_in_words
from horovod.protos.v1 import membership_pb2 as pb

from .life import Life


@dataclass
class Present:
    """A member of the running world that has neither left nor been lost."""

    rank: int
    request: pb.JoinRequest
    life: Life = field(default_factory=Life)

    @property
    def member_id(self) -> str:
        return self.request.member_id

    @property
    def started_as(self) -> int:
        """The rank that its launcher gave it."""
        return self.request.requested_rank if self.request.HasField("requested_rank") else self.rank

    def __str__(self) -> str:
        return process_in_words(self.rank, self.request.pid, self.request.host.name)
