"""The Agents service: one stream for each host."""

from collections.abc import AsyncIterator

import grpc

from horovod.coordinator.core.words import printable
from horovod.protos.v1 import agents_pb2 as pb

from .cluster import ClusterHub, CommandOutbox
from .outbox import Outbox
from .sending import Sending
from .streams import MAX_SHOWN, Context, converse, first_message, own_errors

MAX_COMMANDS = 1 << 16


class AgentsService:
    def __init__(self, hub: ClusterHub, sending: Sending) -> None:
        self._hub = hub
        self._sending = sending

    async def Attach(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "what the agent registers")
        if not first.HasField("register") or not first.register.name:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The first message must register an agent by name.")
        commands: CommandOutbox = Outbox(MAX_COMMANDS)
        register = first.register
        who = f"the agent of host {printable(register.name, MAX_SHOWN)}"
        refused: pb.NotRegistered | None = None
        async with own_errors(context, who):
            refused = self._hub.attach(register, commands)
        if refused is not None:
            await context.write(pb.AgentCommand(refused=refused))
            return
        try:
            await converse(
                request_iterator,
                context,
                commands,
                lambda message: self._hub.received(register.name, message),
                iter,
                self._sending,
                who,
            )
        finally:
            self._hub.detached(register, commands)
