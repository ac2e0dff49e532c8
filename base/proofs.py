"""Proofs by which a process shows that it knows a secret, without showing the secret.

A member proves to a coordinator that it is, or was, one: it knows the secret of the world. How these proofs are
computed is written in protos/v1/membership.proto. A coordinator proves to a member that it knows the token:
coordinator_proof.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from horovod.protos.v1 import membership_pb2 as pb

# The nonce of a client that wants a coordinator to prove the token, in the metadata of a call that shows none; the
# proof in the trailing metadata of its refusal.
NONCE: Final = "horovod-nonce"
PROOF: Final = "horovod-proof"
NONCE_LENGTH: Final = 64  # hexadecimal digits


def attach_proof(secret: bytes, attach: pb.Attach, nonce: bytes) -> bytes:
    return _digest(secret, b"horovod attach", attach.job, attach.epoch, attach.rank, attach.member_id.encode(), nonce)


def rejoin_proof(secret: bytes, job: str, epoch: int, rank: int, member_id: str) -> bytes:
    return _digest(secret, b"horovod rejoin", job, epoch, rank, member_id.encode())


def coordinator_proof(token: str, certificate: bytes, nonce: str) -> str:
    """That the coordinator at the other end of a TLS connection with this certificate (DER) knows the token.

    The certificate is in it, so a program in the middle can't pass it on as its own: it has no key for the certificate.
    """
    parts = (b"horovod coordinator", hashlib.sha256(certificate).digest(), nonce.encode())
    return hmac.digest(token.encode(), b"".join(len(one).to_bytes(4, "big") + one for one in parts), "sha256").hex()


def is_nonce(text: str) -> bool:
    """Whether it is one as clients make them."""
    return len(text) == NONCE_LENGTH and all(character in "0123456789abcdef" for character in text)


def is_equal(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def _digest(secret: bytes, words: bytes, job: str, epoch: int, rank: int, *parts: bytes) -> bytes:
    everything = (words, job.encode(), b"%d" % epoch, b"%d" % rank, *parts)
    return hmac.digest(secret, b"".join(len(one).to_bytes(4, "big") + one for one in everything), "sha256")
