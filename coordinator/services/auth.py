"""Who may call what: `Access` knows what a token admits to, and asks for one before a method is reached.

A call shows the cluster's token, which admits to everything, or that of one job (base/proofs.py). Which job a call is
about stands in its messages only, so a method that takes part in a job calls `admit` with the job's name before it does
anything. What a job's token admits to at all is listed here (`OF_ONE_JOB`), so a method that forgets to ask is closed
to its holders, not open.

A client that does not know yet who answers shows no token, and asks for a proof of it instead (base/proofs.py). The
refusal of its call has the proof, and nothing else.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from horovod.base.errors import AccessCode, coded
from horovod.base.proofs import NONCE, PROOF, coordinator_proof, is_nonce, job_of
from horovod.base.words import printable
from horovod.coordinator.core.rates import RateLimits

from .health import PREFIX as HEALTH
from .strangers import Strangers
from .streams import MAX_SHOWN, Context

# Methods that call `Access.admit` with the name of the job.
OF_ONE_JOB = frozenset(
    {
        "/horovod.v1.Membership/Join",
        "/horovod.v1.Negotiation/Negotiate",
        "/horovod.v1.Exchange/Fetch",
        "/horovod.v1.Exchange/Deliver",
    }
)

_SENTENCE = (
    "The coordinator asks for a token, but {what}. Set HOROVOD_TOKEN to the token that it was started with, or to that "
    "of the job, or HOROVOD_TOKEN_FILE to its file. Started without --token-file, it serves the processes of its own "
    "user only, which find the token by themselves."
)
_SCHEME = "Bearer "

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Access:
    """What the holders of tokens may do. Without a token of the cluster's everybody may do everything."""

    def __init__(self, token: str | None, limits: RateLimits | None = None, certificate: bytes | None = None) -> None:
        """certificate: that of all connections, in DER, for a coordinator that proves the token; None: it does not."""
        self._token = token
        self._certificate = certificate
        self.limits = limits or RateLimits()
        self.strangers = Strangers()

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [] if self._token is None else [_Doorkeeper(self)]

    async def admit(self, context: Context, job: str | None, size_bytes: int = 0) -> None:
        """Ends the call when it shows another job's token, or its peer comes too often (core/rates.py).

        job: that the call is about; None: all of them. size_bytes: of the request that is all of the call.
        """
        self.strangers.admitted(context.peer())
        host, now_s = _host_of(context.peer()), time.monotonic()
        sentence = self.limits.stream(host, now_s) or (size_bytes and self.limits.message(host, size_bytes, now_s))
        if sentence:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        own = self.job_of(_authorization(context.invocation_metadata()))
        if own not in (None, job):
            about = "the cluster" if job is None else f"job {_shown(job)}"
            sentence = (
                f"The token is that of job {_shown(own)}, and the call is about {about}. Set HOROVOD_JOB to the job of "
                "the token, or HOROVOD_TOKEN to the token of this job."
            )
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, coded(AccessCode.OTHER_JOB, sentence))

    def refusal(self, authorization: bytes | None, method: str) -> str:
        """The sentence why a call with this header may not reach the method, or ""."""
        if self._token is None or method.startswith(HEALTH):
            return ""
        if authorization is None:
            return coded(AccessCode.WRONG_TOKEN, _SENTENCE.format(what="the call carried none"))
        if hmac.compare_digest(authorization, f"{_SCHEME}{self._token}".encode()):
            return ""
        if (job := self.job_of(authorization)) is None:
            return coded(AccessCode.WRONG_TOKEN, _SENTENCE.format(what="the call carried another one"))
        if method not in OF_ONE_JOB:
            sentence = (
                f"{method} is not for the holder of the token of one job ({_shown(job)}); it asks for the cluster's."
            )
            return coded(AccessCode.OTHER_JOB, sentence)
        return ""

    def proof(self, nonce: bytes | str | None) -> Metadata:
        """What the refusal of a call with this nonce has beside its sentence."""
        text = nonce.decode("latin-1") if isinstance(nonce, bytes) else nonce
        if self._token is None or self._certificate is None or text is None or not is_nonce(text):
            return ()
        return ((PROOF, coordinator_proof(self._token, self._certificate, text)),)

    def job_of(self, authorization: bytes | None) -> str | None:
        """The only job that a peer with this header may use; None: any job, if `refusal` admits the peer at all."""
        if self._token is None or authorization is None:
            return None
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        if scheme != _SCHEME.strip() or hmac.compare_digest(token.encode("latin-1"), self._token.encode()):
            return None
        return job_of(token, self._token)


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Ends every call that shows no token, or one that does not admit to the method, with UNAUTHENTICATED."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        details: Any = handler_call_details  # the stubs know less than gRPC about its fields
        metadata = dict(details.invocation_metadata or ())
        sentence = self._access.refusal(_authorization(metadata), details.method)
        if not sentence:
            return handler
        return _refusing(self._access.strangers, sentence, self._access.proof(metadata.get(NONCE)))


def _authorization(metadata: Any) -> bytes | None:
    given: str | bytes | None = dict(metadata or ()).get("authorization")
    return given.encode() if isinstance(given, str) else given


def _host_of(peer: str) -> str:
    """The peer's address without its port: "ipv4:10.0.0.1" of gRPC's "ipv4:10.0.0.1:41234"."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer


def _shown(job: str | None) -> str:
    return repr(printable(job or "")[:MAX_SHOWN])


def _refusing(strangers: Strangers, sentence: str, proof: Metadata) -> _Handler:
    """A handler that says why nothing happens.

    It is one of streams, whatever the method has: gRPC would read the whole request of another kind first, of which a
    stranger may send 8 MiB, and wait for the rest of it for as long as the stranger likes.
    """

    async def refuse(_requests: Any, context: Context) -> None:
        strangers.refused(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence, proof)

    return grpc.stream_stream_rpc_method_handler(refuse)
