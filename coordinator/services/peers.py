"""The other coordinators of one store: whether one that is said to serve a job lives and does.

Over TLS another coordinator is believed only when it shows a certificate for the address that the store names, signed
by the authority of coordinators, and it is told the token only then. A process that answers there with another
certificate counts as dead. That may be wrong, when an operator has mixed up certificates; it costs little (ADR 32), and
the log says it.

All of them are looked at all the time. So when a member turns up because its coordinator is silent, that one has been
found silent here already, while the member was waiting for it, and need not be asked and waited for once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc

from horovod.base.tasks import end_tasks
from horovod.coordinator.core.ending import Attendance
from horovod.protos.v1 import agents_pb2, agents_pb2_grpc, membership_pb2, membership_pb2_grpc

if TYPE_CHECKING:
    from horovod.coordinator.tls import ServerTls

ANSWER_S = 0.7  # seconds for another coordinator to answer before it counts as dead; an error costs little (ADR 32)
BELIEVED_S = 0.5  # seconds for which an answer counts: the members of a world ask all at once
LOOK_S = 0.5  # seconds between two looks at one coordinator
SILENT_S = 0.9 * ANSWER_S  # a coordinator that has not answered for so long is silent
LATE_S = 0.3  # an answer that is later than its limit by this much shows a pause of this process, not of the other one

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

_log = logging.getLogger(__name__)


class Peers:
    def __init__(self, token: str | None = None, tls: ServerTls | None = None) -> None:
        """token: that all coordinators of the store have, if they have one. tls: as they serve, if they do so with TLS;
        `check_between` has approved of it. Raises OSError when its files can't be used.
        """
        self._tls = tls
        self._stamp = tls.stamp() if tls else None
        self._credentials = tls.peer_credentials() if tls else None
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._believed: dict[tuple[str, str], float] = {}  # (job, replica) -> until when the answer counts
        self._told = ""
        self._watches: dict[str, asyncio.Task[None]] = {}  # address -> the task that watches it
        # Address -> whether that coordinator was silent at the last look, which may be under way.
        self._looks: dict[str, asyncio.Future[bool]] = {}
        self._closed = False

    async def serves(self, holder: membership_pb2.Serving, job: str) -> bool:
        """False also when it does not answer, when it is not known, or when a later process answers at its address."""
        now = asyncio.get_running_loop().time()
        self._believed = {key: until for key, until in self._believed.items() if until > now}
        if (job, holder.replica) in self._believed:
            return True
        if (look := self._looks.get(holder.address)) is not None and await asyncio.shield(look):
            return False
        async with self._channel(holder.address) as channel:
            answer = await self._ask(channel, holder.address, job)
        if not isinstance(answer, membership_pb2.ServesAnswer):
            return answer
        found = answer.replica == holder.replica and answer.serves
        if found:
            self._believed[job, holder.replica] = now + BELIEVED_S
        return found

    # -- looking at all ------------------------------------------------------------------------------------------------

    def watch(self, addresses: Iterable[str]) -> None:
        """Watches these coordinators from now on."""
        if self._closed:
            return
        wanted = set(addresses)
        for address in self._watches.keys() - wanted:
            self._watches.pop(address).cancel()
        for address in wanted - self._watches.keys():
            self._watches[address] = asyncio.get_running_loop().create_task(self._watch(address))

    async def close(self) -> None:
        self._closed = True
        watches = set(self._watches.values())
        self._watches.clear()
        await end_tasks(watches)

    async def _watch(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        channel: grpc.aio.Channel | None = None
        try:
            while True:
                began_s = loop.time()
                look = self._looks[address] = loop.create_future()
                lives, took_s = True, 0.0
                try:
                    channel = channel or self._channel(address)
                    lives = await self._ask(channel, address, "") is not False
                    took_s = loop.time() - began_s
                finally:
                    # A coordinator that refuses at once is asked again when it matters: that takes no time.
                    look.set_result(not lives and SILENT_S < took_s < ANSWER_S + LATE_S)
                if not lives and channel is not None:  # the old connection may be dead, and a new one not
                    await channel.close()
                    channel = None
                await asyncio.sleep(LOOK_S - took_s)
        finally:
            self._looks.pop(address, None)
            if channel is not None:
                await channel.close()

    # -- asking one ----------------------------------------------------------------------------------------------------

    async def _ask(self, channel: grpc.aio.Channel, address: str, job: str) -> membership_pb2.ServesAnswer | bool:
        """The coordinator's answer; if there is none, whether it lives."""
        stub: membership_pb2_grpc.MembershipAsyncStub = membership_pb2_grpc.MembershipStub(channel)
        try:
            request = membership_pb2.ServesRequest(job=job)
            answer: membership_pb2.ServesAnswer = await stub.Serves(request, timeout=ANSWER_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if job and error.code() == grpc.StatusCode.UNAVAILABLE and self._tls is not None:
                await self._tell_why(self._tls, address)
            # That coordinator lives and refuses our token; members are to ask it themselves.
            return error.code() not in _SILENT
        return answer

    async def attendance(self, address: str, job: str) -> Attendance | None:
        """The hosts of the job's world, by the coordinator there; None when it does not serve the job or not answer."""
        async with self._channel(address) as channel:
            stub: membership_pb2_grpc.MembershipAsyncStub = membership_pb2_grpc.MembershipStub(channel)
            request = membership_pb2.AttendanceRequest(job=job)
            try:
                answer = await stub.Attendance(request, timeout=ANSWER_S, metadata=self._metadata)
            except grpc.aio.AioRpcError:
                return None
        if not answer.serves:
            return None
        return Attendance(frozenset(answer.connected), frozenset(answer.away), frozenset(answer.lost))

    async def connected_agents(self, address: str) -> frozenset[str]:
        """The names of agents connected to the coordinator there; none when it does not answer."""
        async with self._channel(address) as channel:
            stub: agents_pb2_grpc.AgentsAsyncStub = agents_pb2_grpc.AgentsStub(channel)
            try:
                request = agents_pb2.ConnectedRequest()
                answer = await stub.Connected(request, timeout=ANSWER_S, metadata=self._metadata)
            except grpc.aio.AioRpcError:
                return frozenset()
        return frozenset(answer.agents)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is None or self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        with contextlib.suppress(OSError):  # tls.py, which follows the files for members, tells of it
            if (stamp := self._tls.stamp()) != self._stamp:
                self._credentials = self._tls.peer_credentials()
                self._stamp = stamp
        return grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)

    async def _tell_why(self, tls: ServerTls, address: str) -> None:
        """gRPC says that it could not connect. Whether a process is there that is not believed, a second look tells."""
        host, _, port = address.rpartition(":")
        try:
            opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=tls.peer_context())
            _, writer = await asyncio.wait_for(opening, ANSWER_S)
        except ssl.SSLCertVerificationError as error:
            sentence = (
                f"The process at {address}, the address of another coordinator of this store, shows a "
                f"certificate that can't be verified ({error.verify_message}), so its jobs are taken over. If "
                "it is a coordinator, its certificate must be for that address and signed by the authority of "
                "--tls-peer-ca."
            )
        except (OSError, asyncio.TimeoutError):
            return
        else:
            writer.close()
            return
        if sentence != self._told:
            self._told = sentence
            _log.warning("%s", sentence)
