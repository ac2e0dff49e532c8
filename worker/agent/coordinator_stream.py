"""The agent's stream to its coordinator: opened again whenever it breaks, at whichever address answers.

runtime/coordinators.py finds the coordinator that serves agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from horovod.base.errors import ClusterCode, coded, without_code
from horovod.base.words import printable
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1.agents_pb2_grpc import AgentsStub
from horovod.worker.runtime.channel import broke_in_write, explain, waiting_helps
from horovod.worker.runtime.coordinators import Search, leader_in
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.token import Credential

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
MOST_TOLD = 100  # reasons why there is no stream that the log gets between two registrations
CODE_PATIENCE_S = 60.0  # how long to look for a coordinator that sends a chunk of code
ANSWER_TIMEOUT_S = 10.0  # from the registration to its answer

# A channel that the relay uses as well, so the stream does not close it.
Connection = Callable[[str], contextlib.AbstractContextManager[grpc.aio.Channel]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _End:
    """How an attempt to have a stream ended."""

    reason: str
    was_registered: bool = False
    is_final: bool = False  # another attempt at this coordinator is useless
    has_answered: bool = True  # a coordinator was there
    leader: str = ""  # the coordinator that serves instead, if the refusal named one


class CoordinatorStream:
    """Carries the agent's messages to its coordinator and commands back. `run` it for as long as the agent serves.

    A message that is sent while there is no stream is dropped: the next registration says everything.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str | None,
        register: Callable[[str], pb.Register],
        received: Callable[[pb.AgentCommand], None],
        lost: Callable[[], None],
        connection: Connection,
        has_tls: bool = False,
    ) -> None:
        """register: makes the first message to the coordinator at an address. received: called with each command. lost:
        called when the stream is over. connection: opens a connection to an address, or raises StartError. has_tls: it
        is one of TLS.
        """
        self.address = ""  # of the coordinator that this agent is registered with; the last one while there is none
        self.registered = asyncio.Event()
        self._search = Search(addresses)
        self._credentials: dict[str, Credential] = {}  # by address
        self._token = token
        self._register = register
        self._received = received
        self._lost = lost
        self._connection = connection
        self._has_tls = has_tls
        self._outgoing: asyncio.Queue[pb.AgentMessage] | None = None

    @property
    def coordinators(self) -> str:
        """The addresses for the ranks: first that of the coordinator which serves this agent, then all others."""
        return ",".join(dict.fromkeys(one for one in (self.address, *self._search.addresses) if one))

    def send(self, **message: Any) -> None:
        """An AgentMessage with this field. Dropped while there is no stream: the first message of one tells all."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(pb.AgentMessage(**message))

    async def run(self) -> str:
        """Returns why no coordinator will ever take this agent, as a sentence."""
        delay = FIRST_RETRY_S
        told: set[str] = (
            set()
        )  # reasons that the log has since the last registration; with several addresses they alternate
        search = self._search
        while True:
            address = search.address
            end = await self._attempt(address)
            if end.is_final and self._credential(address).is_outdated():
                end = dataclasses.replace(end, is_final=False)  # it began to listen between the look and the call
            if end.was_registered:
                delay = FIRST_RETRY_S
                told.clear()
                log.warning("The connection to the coordinator at %s is lost: %s", address, end.reason)
                await asyncio.sleep(
                    delay
                )  # then the same address is tried once more, as a connection may break by itself
                continue
            if end.is_final and len(search.addresses) == 1:
                return end.reason
            if not end.leader and end.reason not in told and len(told) < MOST_TOLD:
                told.add(end.reason)
                log.warning("%s Trying again.", without_code(end.reason))
            if search.turn(end.has_answered, end.leader):
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)

    async def get_code(self, name: str, index: int) -> bytes:
        """A chunk of an archive of code, from whichever coordinator serves. OSError with a sentence."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CODE_PATIENCE_S
        request = pb.GetCodeRequest(sha256=name, index=index)
        while True:
            for address in self.coordinators.split(","):
                try:
                    metadata = self._credential(address).metadata()
                    with self._connection(address) as channel:
                        call = AgentsStub(channel).GetCode(request, metadata=metadata, timeout=ANSWER_TIMEOUT_S)
                        data: bytes = (await call).data
                        return data
                except StartError as error:
                    reason = str(error)
                except grpc.aio.AioRpcError as error:
                    reason = explain(error.code(), printable(error.details() or ""), address, bool(metadata))
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        why = "the coordinator does not have its code any more"
                        raise OSError(0, coded(ClusterCode.CODE_NOT_HERE, why)) from None
            if loop.time() > give_up_at:
                raise OSError(0, coded(ClusterCode.CLUSTER_SILENT, f"its code can't be fetched: {reason}"))
            await asyncio.sleep(FIRST_RETRY_S * 4)

    def _credential(self, address: str) -> Credential:
        if address not in self._credentials:
            self._credentials[address] = Credential(address, self._token, self._has_tls)
        return self._credentials[address]

    async def _attempt(self, address: str) -> _End:
        """One stream, to its end."""
        with contextlib.ExitStack() as stack:
            try:
                shown = self._credential(address).metadata()
                channel = stack.enter_context(self._connection(address))
            except StartError as error:
                return _End(str(error), is_final=True)
            accepted = False
            call: Any = AgentsStub(channel).Attach(metadata=(*shown, *self._search.metadata()))
            writer: asyncio.Task[None] | None = None
            try:
                # The first message does not hold what happens from here on, so that is queued to be sent after it.
                self._outgoing = asyncio.Queue()
                register = pb.AgentMessage(register=self._register(address))
                await asyncio.wait_for(call.write(register), ANSWER_TIMEOUT_S)
                first = await asyncio.wait_for(call.read(), ANSWER_TIMEOUT_S)
                if first is grpc.aio.EOF:
                    return await _refusal(call, address, bool(shown))
                if first.HasField("refused"):
                    return _End(printable(first.refused.sentence), is_final=first.refused.final)
                accepted = True
                self._search.served()
                writer = asyncio.create_task(self._write(call, self._outgoing))
                self.address = address
                self.registered.set()
                self._received(first)
                while (command := await call.read()) is not grpc.aio.EOF:
                    self._received(command)
                return _End(printable(await call.details() or "it ended the stream"), was_registered=True)
            except grpc.aio.AioRpcError as error:
                if accepted:
                    return _End(printable(error.details() or "it broke"), was_registered=True)
                return await _refusal(call, address, bool(shown))
            except asyncio.TimeoutError:
                sentence = f"The coordinator at {address} did not answer in {ANSWER_TIMEOUT_S:.0f} s."
                return _End(sentence, has_answered=False)
            except asyncio.InvalidStateError:
                if accepted:
                    return _End("it broke", was_registered=True)
                return await _refusal(call, address, bool(shown))
            finally:
                call.cancel()
                self._outgoing = None
                if accepted:
                    self.registered.clear()
                    self._lost()
                if writer is not None:
                    writer.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await writer

    @staticmethod
    async def _write(call: Any, outgoing: asyncio.Queue[pb.AgentMessage]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells how it ended
            while True:
                await call.write(await outgoing.get())


async def _refusal(call: Any, address: str, has_token: bool) -> _End:
    """How a call ended that the coordinator never accepted."""
    status, details = await call.code(), printable(await call.details() or "")
    leader = leader_in(await call.trailing_metadata())
    if leader is not None:
        return _End(f"The coordinator at {address} serves no agents: {details}", leader=printable(leader))
    if status is grpc.StatusCode.UNAVAILABLE or broke_in_write(status, details):
        return _End(f"The coordinator at {address} can't be reached ({without_code(details)}).", has_answered=False)
    return _End(explain(status, details, address, has_token), is_final=not waiting_helps(status))
