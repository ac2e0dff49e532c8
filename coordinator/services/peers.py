"""The other coordinators of one store: whether one that is said to serve a job lives and does."""

from __future__ import annotations

import asyncio
import ssl

import grpc

from horovod.protos.v1 import membership_pb2, membership_pb2_grpc

ANSWER_S = 0.7  # how long another coordinator has to answer before it counts as dead; to be wrong costs little (ADR 32)
BELIEVED_S = 0.5  # how long an answer counts: the members of a world ask all at once

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Peers:
    def __init__(self, token: str | None = None, tls: bool = False) -> None:
        """token: that all coordinators of the store have, if they have one. tls: they serve with TLS."""
        self._tls = tls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._believed: dict[tuple[str, str], float] = {}  # job and replica -> until when

    async def serves(self, holder: membership_pb2.Serving, job: str) -> bool:
        """False also when it does not answer, or when a later process answers at its address."""
        now = asyncio.get_running_loop().time()
        self._believed = {key: until for key, until in self._believed.items() if until > now}
        if (job, holder.replica) in self._believed:
            return True
        if self._tls:
            return await _shakes_hands(holder.address)
        async with grpc.aio.insecure_channel(holder.address, options=_OPTIONS) as channel:
            stub: membership_pb2_grpc.MembershipAsyncStub = membership_pb2_grpc.MembershipStub(channel)
            try:
                request = membership_pb2.ServesRequest(job=job)
                answer = await stub.Serves(request, timeout=ANSWER_S, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                return error.code() not in _SILENT  # it lives, but has another token: its members shall ask it
        found = answer.replica == holder.replica and answer.serves
        if found:
            self._believed[job, holder.replica] = now + BELIEVED_S
        return found


async def _shakes_hands(address: str) -> bool:
    """Whether a process behind the address serves TLS. Nothing is told to it, so it need not be known by a certificate.

    That it serves the job is not known; if it does not, it takes the job when a member comes.
    """
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        _, writer = await asyncio.wait_for(opening, ANSWER_S)
    except (OSError, ssl.SSLError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
