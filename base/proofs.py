"""Values computed from secrets: proofs that a process knows a secret, which do not show it, and tokens of jobs.

A member proves to a coordinator that it is, or was, one: it knows the secret of the world. How these proofs are
computed is written in protos/v1/membership.proto. A coordinator proves to a member that it knows the token:
coordinator_proof.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

from horovod.base.errors import AccessCode, SettingCode, coded
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


# -- tokens of jobs ----------------------------------------------------------------------------------------------------
# They admit to one job, and are made of the cluster's token and the job's name (docs/adr/0036-job-tokens.md).
#
#     hvdjob1.<the job's name, base64url>.<HMAC-SHA256 with the cluster's token, base64url>
#
# Nothing is stored: the cluster's token is enough to make one and to check one, so every replica of a coordinator knows
# all of them. The name is in the token so that a call can be judged before its first message is read.
PREFIX = "hvdjob1"
# A process that has a job's token can try cluster tokens against it, so a short one would be found.
MIN_CLUSTER_TOKEN_LENGTH = 16


def job_token(cluster_token: str, job: str) -> str:
    """Raises ValueError with a sentence when the cluster's token could be found by trying."""
    if len(cluster_token) < MIN_CLUSTER_TOKEN_LENGTH:
        raise ValueError(
            coded(
                AccessCode.WEAK_TOKEN,
                f"The cluster's token has {len(cluster_token)} characters, so the holder of a job's token could find "
                f"it by trying. Use a random one of {MIN_CLUSTER_TOKEN_LENGTH} or more, for example of `openssl rand "
                "-hex 32`.",
            )
        )
    if not job:
        raise ValueError(coded(SettingCode.MISSING_SETTING, "A job's token needs the name of the job (HOROVOD_JOB)."))
    return f"{PREFIX}.{_text(job.encode())}.{_text(_proof(cluster_token, job))}"


def job_of(token: str, cluster_token: str) -> str | None:
    """The job that `token` admits to; None when it is not of this cluster, or no job's token at all."""
    prefix, _, rest = token.partition(".")
    name, _, proof = rest.partition(".")
    if prefix != PREFIX or len(cluster_token) < MIN_CLUSTER_TOKEN_LENGTH:
        return None
    try:
        job = _bytes(name).decode()
        given = _bytes(proof)
    except (binascii.Error, ValueError):
        return None
    return job if job and hmac.compare_digest(given, _proof(cluster_token, job)) else None


def _proof(cluster_token: str, job: str) -> bytes:
    return hmac.new(cluster_token.encode(), b"horovod job token\0" + job.encode(), hashlib.sha256).digest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
