"""Tokens that admit to one job, made of the cluster's token and the job's name (docs/adr/0036-job-tokens.md).

    hvdjob1.<the job's name, base64url>.<HMAC-SHA256 with the cluster's token, base64url>

Nothing is stored: the cluster's token is enough to make one and to check one, so every replica of a coordinator knows
all of them. The name is in the token so that a call can be judged before its first message is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from horovod.base.errors import AccessCode, SettingCode, coded

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
