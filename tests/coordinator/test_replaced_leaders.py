"""Which of two coordinators serves agents when some of these, or of the clients, can't connect to the one that does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from resources import eventually
from stopped_jobs import let_pass

from horovod import __version__
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.config import CoordinatorConfig
from horovod.coordinator.server import CoordinatorServer
from horovod.coordinator.services.leading import LEADER, Leading
from horovod.coordinator.services.peers import Peers
from horovod.coordinator.store import MemoryStore
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.agents_pb2_grpc import AgentsStub
from horovod.protos.v1.jobs_pb2_grpc import JobsStub
from horovod.worker.runtime.coordinators import UNREACHABLE, leader_in

DEADLINE_S = 60.0


class SharedStore(MemoryStore):
    is_shared = True  # between the coordinators of a test


class Pair:
    """Two coordinators of one store, of which the first leads."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self._channels = [grpc.aio.insecure_channel(address) for address in addresses]

    async def leader_by(self, number: int, *unreachable: str) -> str:
        """Who serves, as this one answers a client that could not connect to `unreachable`."""
        metadata = ((UNREACHABLE, ",".join(unreachable)),) if unreachable else ()
        try:
            await JobsStub(self._channels[number]).List(jobs_pb2.ListRequest(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return leader_in(error.trailing_metadata()) or ""
        return self.addresses[number]

    async def becomes_leader_by(self, number: int, address: str) -> None:
        """This one, which looks at the store now and then, has seen it."""
        loop = asyncio.get_running_loop()

        def told() -> str:
            return asyncio.run_coroutine_threadsafe(self.leader_by(number), loop).result(DEADLINE_S)

        assert await asyncio.to_thread(eventually, lambda: told() == address)

    @contextlib.asynccontextmanager
    async def agent(self, number: int, name: str, *unreachable: str) -> AsyncIterator[Any]:
        """Its stream at this coordinator, which has answered."""
        metadata = ((UNREACHABLE, ",".join(unreachable)),) if unreachable else ()
        call: Any = AgentsStub(self._channels[number]).Attach(metadata=metadata)
        register = pb.Register(protocol_version=PROTOCOL_VERSION, version=__version__, name=name, instance=name)
        await call.write(pb.AgentMessage(register=register))
        assert (await call.read()).HasField("registered")
        yield call
        call.cancel()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def with_pair(body: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        store = SharedStore()
        servers = [CoordinatorServer(CoordinatorConfig(open_store=lambda: store)) for _ in range(2)]
        ports = [await server.start() for server in servers]
        pair = Pair([f"127.0.0.1:{port}" for port in ports])
        try:
            await asyncio.wait_for(body(pair), DEADLINE_S)
        finally:
            await pair.close()
            for server in servers:
                await server.stop()

    asyncio.run(main())


def test_who_does_not_lead_says_who_does() -> None:
    async def body(pair: Pair) -> None:
        assert [await pair.leader_by(number) for number in range(2)] == [pair.addresses[0]] * 2
        assert await pair.leader_by(1, "elsewhere:1") == pair.addresses[0]

    with_pair(body)


def test_a_leader_that_an_agent_can_not_connect_to_is_replaced() -> None:
    async def body(pair: Pair) -> None:
        first, second = pair.addresses
        async with pair.agent(0, "h1") as former, pair.agent(1, "h1", first):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await former.read()
            assert await former.code() is grpc.StatusCode.UNAVAILABLE
            await pair.becomes_leader_by(0, second)
            assert await pair.leader_by(1) == second

    with_pair(body)


def test_two_that_reach_a_part_each_do_not_take_it_from_each_other_at_once() -> None:
    async def body(pair: Pair) -> None:
        first, second = pair.addresses
        assert await pair.leader_by(1, first) == second
        await pair.becomes_leader_by(0, second)
        async with pair.agent(1, "h1"):
            assert await pair.leader_by(0, second) == second

    with_pair(body)


def test_who_has_no_agents_left_gives_way_sooner_than_who_has() -> None:
    """Agents that complain of a leader are not its own, although it has not noticed yet that they are gone."""

    async def main() -> None:
        store = SharedStore()
        server = CoordinatorServer(CoordinatorConfig(open_store=lambda: store))
        port = await server.start()
        leader = f"127.0.0.1:{port}"
        other = Leading(store, begin=_nothing, end=lambda sentence: None, lease_s=0.1, peers=Peers(), turn_s=1000.0)
        other.address = "other:1"
        pair = Pair([leader])
        try:
            await other.attempt()
            assert other.leader == leader
            await store.put(LEADER, (await _entry(store)).value)  # it has led since now
            await other.attempt()
            await asyncio.to_thread(let_pass, 0.2)  # a lease
            async with pair.agent(0, "h1"), pair.agent(0, "h2"):
                await other.complaint([leader], "h1")
                assert not other.leads
                await other.complaint([leader], "h2")
                assert other.leads
        finally:
            await pair.close()
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


async def _nothing() -> None:
    pass


async def _entry(store: MemoryStore) -> Any:
    return await store.get(LEADER)


def test_only_the_leaders_address_counts() -> None:
    async def main() -> None:
        store = SharedStore()
        leading = [Leading(store, begin=_nothing, end=lambda sentence: None) for _ in range(2)]
        for number, one in enumerate(leading):
            one.address = f"host-{number}:1"
            await one.attempt()
        await leading[0].complaint(["host-0:1"])
        await leading[1].complaint(["host-1:1", "host-2:1"])
        assert [one.leads for one in leading] == [True, False]
        await leading[1].complaint(["host-2:1", "host-0:1"])
        assert leading[1].leads

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
