"""Proofs by which a process shows a coordinator that it is, or was, a member: it knows the secret of the world.

How they are computed is written in protos/v1/membership.proto.
"""

from __future__ import annotations

import hmac

from horovod.protos.v1 import membership_pb2 as pb


def attach_proof(secret: bytes, attach: pb.Attach, nonce: bytes) -> bytes:
    return _digest(secret, b"horovod attach", attach.job, attach.epoch, attach.rank, attach.member_id.encode(), nonce)


def rejoin_proof(secret: bytes, job: str, epoch: int, rank: int, member_id: str) -> bytes:
    return _digest(secret, b"horovod rejoin", job, epoch, rank, member_id.encode())


def is_equal(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def _digest(secret: bytes, words: bytes, job: str, epoch: int, rank: int, *parts: bytes) -> bytes:
    everything = (words, job.encode(), b"%d" % epoch, b"%d" % rank, *parts)
    return hmac.digest(secret, b"".join(len(one).to_bytes(4, "big") + one for one in everything), "sha256")
