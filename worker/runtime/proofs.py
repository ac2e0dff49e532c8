"""Proofs by which this process shows a coordinator that it is, or was, a member: it knows the secret of the world.

How they are computed is written in protos/v1/membership.proto; the other side is coordinator/core/proofs.py.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from horovod.protos.v1 import membership_pb2


@dataclass(frozen=True)
class PastWorld:
    """What a process keeps of its last world, to join the next one of the same job as the member that it was."""

    coordinator: str
    job: str
    epoch: int
    rank: int
    secret: bytes

    def __repr__(self) -> str:
        return f"PastWorld({self.coordinator!r}, {self.job!r}, epoch={self.epoch}, rank={self.rank})"

    def rejoin(self, member_id: str) -> membership_pb2.Rejoin:
        proof = _digest(self.secret, b"horovod rejoin", self.job, self.epoch, self.rank, member_id.encode())
        return membership_pb2.Rejoin(epoch=self.epoch, rank=self.rank, proof=proof)


@dataclass
class Memory:
    """Of one process, or of one thread that stands for one. Written when a world stands, read before the next."""

    last: PastWorld | None = None

    def rejoin(self, coordinator: str, job: str, member_id: str) -> membership_pb2.Rejoin | None:
        """The proof for another join; None when the last world was none of this coordinator and job."""
        if self.last is None or (self.last.coordinator, self.last.job) != (coordinator, job):
            return None
        return self.last.rejoin(member_id)


def attach_proof(secret: bytes, attach: membership_pb2.Attach, nonce: bytes) -> membership_pb2.Proof:
    parts = (attach.member_id.encode(), nonce)
    return membership_pb2.Proof(proof=_digest(secret, b"horovod attach", attach.job, attach.epoch, attach.rank, *parts))


def _digest(secret: bytes, words: bytes, job: str, epoch: int, rank: int, *parts: bytes) -> bytes:
    everything = (words, job.encode(), b"%d" % epoch, b"%d" % rank, *parts)
    return hmac.digest(secret, b"".join(len(one).to_bytes(4, "big") + one for one in everything), "sha256")
