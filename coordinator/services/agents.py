"""The Agents service: one stream for each host."""

import time
from collections.abc import AsyncIterator

import grpc

from horovod.base.errors import ClusterCode, coded
from horovod.base.words import printable
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from .auth import Access
from .cluster import ClusterHub, CommandOutbox, check_serving
from .sending import Outbox, Sending
from .streams import MAX_SHOWN, Context, RefusedError, converse, first_message, own_errors

MAX_COMMANDS = 1 << 16


class AgentsService:
    def __init__(self, hub: ClusterHub, access: Access, sending: Sending) -> None:
        self._hub = hub
        self._access = access
        self._sending = sending

    async def GetCode(self, request: pb.GetCodeRequest) -> jobs_pb2.CodeChunk:  # noqa: N802
        data = await self._hub.code.get(request.sha256, request.index)
        if data is None:
            sentence = coded(ClusterCode.CODE_NOT_HERE, "The coordinator does not have this code.")
            raise RefusedError(grpc.StatusCode.NOT_FOUND, sentence)
        return jobs_pb2.CodeChunk(index=request.index, data=data)

    async def Connected(self, request: pb.ConnectedRequest) -> pb.ConnectedAnswer:  # noqa: N802
        return pb.ConnectedAnswer(agents=self._hub.connected_agents())

    async def Attach(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "what the agent registers")
        if not first.HasField("register") or not first.register.name:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The first message must register an agent by name.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await self._access.admit(context, None)
        await check_serving(self._hub, context, first.register.name)
        commands: CommandOutbox = Outbox(MAX_COMMANDS)
        register = first.register
        who = f"the agent of host {printable(register.name, MAX_SHOWN)}"
        refused: pb.NotRegistered | None = None
        async with own_errors(context, who):
            refused = self._hub.attach(register, commands)
        if refused is not None:
            await context.write(pb.AgentCommand(refused=refused))
            return

        def receive(message: pb.AgentMessage) -> None:
            # Output that a follower asked for is limited by that follower's window (follower.py).
            if not self._hub.reads(register.name, message):
                sentence = self._access.limits.message(who, message.ByteSize(), time.monotonic())
                if sentence:
                    raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
            self._hub.received(register.name, commands, message)

        try:
            await converse(request_iterator, context, commands, receive, iter, self._sending, who)
        finally:
            self._hub.detached(register, commands)
