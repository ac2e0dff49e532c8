"""The agent's stream to its coordinator: opened again whenever it breaks, at whichever address answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1.agents_pb2_grpc import AgentsStub
from horovod.worker.runtime.channel import broke_in_write, explain, waiting_helps
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.token import Credential
from horovod.worker.words import printable

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CODE_PATIENCE_S = 60.0  # without any coordinator that gives a chunk of code
ANSWER_TIMEOUT_S = 10.0  # from the registration to its answer

# A channel that others use as well; it is left open.
Connection = Callable[[str], contextlib.AbstractContextManager[grpc.aio.Channel]]

log = logging.getLogger(__name__)


class Link:
    """`run` for as long as the agent serves. What is sent without a stream is dropped: a registration tells all."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str | None,
        register: Callable[[str], pb.Register],
        received: Callable[[pb.AgentCommand], None],
        lost: Callable[[], None],
        connection: Connection,
    ) -> None:
        """register: what to say first to the coordinator at an address. received: called with each command; lost: when
        the stream is over. connection: to the coordinator at an address; StartError where there can be none."""
        self.address = ""  # of the coordinator that this agent is registered with; the last one while there is none
        self.registered = asyncio.Event()
        self._addresses = list(addresses)
        self._credentials = {address: Credential(address, token) for address in addresses}
        self._token = token
        self._register = register
        self._received = received
        self._lost = lost
        self._connection = connection
        self._outgoing: asyncio.Queue[pb.AgentMessage] | None = None

    @property
    def coordinators(self) -> str:
        """For the ranks: every address, that of the coordinator which serves this agent first."""
        return ",".join(dict.fromkeys([self.address, *self._addresses] if self.address else self._addresses))

    def send(self, **message: Any) -> None:
        """An AgentMessage with this field. Dropped while there is no stream: the first message of one tells all."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(pb.AgentMessage(**message))

    async def run(self) -> str:
        """Returns why no coordinator will ever take this agent, as a sentence."""
        delay, told = FIRST_RETRY_S, ""
        number = 0
        while True:
            address = self._addresses[number % len(self._addresses)]
            was_registered, final, reason = await self._attempt(address)
            if was_registered:
                delay, told = FIRST_RETRY_S, ""
                log.warning("The connection to the coordinator at %s is lost: %s", address, reason)
            elif final and len(self._addresses) == 1:
                return reason
            elif reason != told:
                told = reason
                log.warning("%s Trying again.", reason)
            if not was_registered:
                number += 1
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
                    metadata = self._credentials[address].metadata()
                    with self._connection(address) as channel:
                        call = AgentsStub(channel).GetCode(request, metadata=metadata, timeout=ANSWER_TIMEOUT_S)
                        data: bytes = (await call).data
                        return data
                except StartError as error:
                    reason = str(error)
                except grpc.aio.AioRpcError as error:
                    reason = explain(error.code(), printable(error.details() or ""), address, bool(metadata))
                    if error.code() is grpc.StatusCode.NOT_FOUND:
                        raise OSError(0, "the coordinator does not have its code any more") from None
            if loop.time() > give_up_at:
                raise OSError(0, f"its code can't be fetched: {reason}")
            await asyncio.sleep(FIRST_RETRY_S * 4)

    async def _attempt(self, address: str) -> tuple[bool, bool, str]:
        """One stream, to its end: whether it was accepted, whether another try is useless, and how it ended."""
        with contextlib.ExitStack() as stack:
            try:
                metadata = self._credentials[address].metadata()
                channel = stack.enter_context(self._connection(address))
            except StartError as error:
                return False, True, str(error)
            accepted = False
            call: Any = AgentsStub(channel).Attach(metadata=metadata)
            writer: asyncio.Task[None] | None = None
            try:
                # What happens from here on is not in the first message, so it must wait to be sent after that.
                self._outgoing = asyncio.Queue()
                register = pb.AgentMessage(register=self._register(address))
                await asyncio.wait_for(call.write(register), ANSWER_TIMEOUT_S)
                first = await asyncio.wait_for(call.read(), ANSWER_TIMEOUT_S)
                if first is grpc.aio.EOF:
                    status, details = await call.code(), await call.details()
                    return False, False, explain(status, printable(details or ""), address, bool(metadata))
                if first.HasField("refused"):
                    return False, first.refused.final, printable(first.refused.sentence)
                accepted = True
                writer = asyncio.create_task(self._write(call, self._outgoing))
                self.address = address
                self.registered.set()
                self._received(first)
                while (command := await call.read()) is not grpc.aio.EOF:
                    self._received(command)
                return True, False, printable(await call.details() or "it ended the stream")
            except grpc.aio.AioRpcError as error:
                status, details = error.code(), printable(error.details() or "")
                if broke_in_write(error):
                    return accepted, False, f"The connection to the coordinator at {address} broke."
                if status is grpc.StatusCode.UNAVAILABLE:
                    return accepted, False, f"The coordinator at {address} can't be reached ({details})."
                return accepted, not waiting_helps(status), explain(status, details, address, bool(metadata))
            except asyncio.TimeoutError:
                return accepted, False, f"The coordinator at {address} did not answer in {ANSWER_TIMEOUT_S:.0f} s."
            except asyncio.InvalidStateError:
                return accepted, False, f"The connection to the coordinator at {address} broke."
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
