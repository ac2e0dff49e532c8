"""What a process keeps of its last world, so that it can join the next one as the member that it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod.base.proofs import rejoin_proof
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.kept_links import KeptLinks
from horovod.worker.runtime.world import World

if TYPE_CHECKING:
    from horovod.worker.runtime.session import Session


@dataclass(frozen=True)
class PastWorld:
    coordinator: str
    job: str
    epoch: int
    rank: int
    secret: bytes

    def __repr__(self) -> str:
        return f"PastWorld({self.coordinator!r}, {self.job!r}, epoch={self.epoch}, rank={self.rank})"

    def rejoin(self, member_id: str) -> membership_pb2.Rejoin:
        proof = rejoin_proof(self.secret, self.job, self.epoch, self.rank, member_id)
        return membership_pb2.Rejoin(epoch=self.epoch, rank=self.rank, proof=proof)


@dataclass
class LastWorld:
    """Of one process, or of one thread that stands for one. Written when a world stands, read before the next; the
    links and the session when a world ends."""

    world: PastWorld | None = None
    links: KeptLinks = field(default_factory=KeptLinks)  # empty except between two worlds
    # Between two worlds: its stream is open, so that the coordinator sees when this process ends.
    session: Session | None = None
    returns: bool = False  # whether this process has left the world to join the next one at once
    # Of elastic training: how many commits the state of this process holds, and the epoch in which that was last made
    # equal on all ranks.
    commits: int = 0
    state_epoch: int = 0

    def leave(self, session: Session, reason: str, *, returns: bool, failed: bool = False) -> None:
        """Says goodbye; one that returns keeps the stream for `let_go`."""
        if session.close(reason, returns=returns, failed=failed, stays=returns):
            self.let_go()
            self.session = session

    def let_go(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.let_go()

    def remember(self, coordinator: str, world: World) -> None:
        self.world = PastWorld(coordinator, world.job, world.epoch, world.rank, world.secret)

    def is_of(self, coordinator: str | None, job: str) -> bool:
        """Whether this process was in a world of this coordinator and job."""
        return self.world is not None and (self.world.coordinator, self.world.job) == (coordinator, job)

    def rejoin(self, coordinator: str, job: str, member_id: str) -> membership_pb2.Rejoin | None:
        """The proof for another join; None when the last world was none of this coordinator and job."""
        return self.world.rejoin(member_id) if self.world and self.is_of(coordinator, job) else None
