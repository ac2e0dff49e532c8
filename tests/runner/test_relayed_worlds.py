"""A large world crosses the network once for each host: members behind relays, and a proxy that counts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
from tcp_proxy import Proxy
from test_coordinator_large_worlds import realistic

from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1.membership_pb2_grpc import MembershipStub
from horovod.worker.agent.relay import Relay
from horovod.worker.runtime.probe import headers

HOSTS, MEMBERS = 2, 256
DEADLINE_S = 60.0
TOKEN = (("authorization", "Bearer of-this-test"),)


class Member:
    """It joins through a relay, like every member of its host."""

    def __init__(self, channel: grpc.aio.Channel, address: str, index: int) -> None:
        self._call: Any = MembershipStub(channel).Join(metadata=(*headers(address, 20.0, 5.0), *TOKEN))
        self._request = realistic(index, MEMBERS)

    async def join(self) -> pb.MembershipEvent:
        await self._call.write(pb.MemberMessage(join=self._request))
        while not (event := await self._call.read()).HasField("world"):
            assert not event.HasField("refused"), event
        await self._call.write(pb.MemberMessage(received=pb.WorldReceived(epoch=event.world.epoch)))
        return event


def test_once_for_each_host(tmp_path_factory: Any) -> None:
    folders: list[Path] = [tmp_path_factory.mktemp("r") for _ in range(HOSTS)]

    async def play(proxy: Proxy) -> None:
        relays = []
        async with contextlib.AsyncExitStack() as stack:
            for folder in folders:
                folder.chmod(0o700)
                relays.append(Relay(folder, None))
                await relays[-1].start()
                stack.push_async_callback(relays[-1].close)
            channels = [grpc.aio.insecure_channel(f"unix:{one.path}") for one in relays]
            for channel in channels:
                await stack.enter_async_context(channel)
            members = [Member(channels[index * HOSTS // MEMBERS], proxy.address, index) for index in range(MEMBERS)]
            events = await asyncio.wait_for(asyncio.gather(*(member.join() for member in members)), DEADLINE_S)
            assert all(event == events[0] for event in events)
            assert len(events[0].world.members) == MEMBERS
            world = events[0].ByteSize()
            # What is left for a member: its progress, metadata, frames of HTTP/2.
            assert HOSTS * world < proxy.answered_bytes < HOSTS * world + MEMBERS * 1000 < MEMBERS * world / 10

    with EmbeddedCoordinator(token="of-this-test") as coordinator, Proxy(coordinator.address) as proxy:
        asyncio.run(play(proxy))
