"""Which hosts of a world are connected, asked by a coordinator of the store that does not serve it."""

from __future__ import annotations

import asyncio

from coordinator_client import Crew
from resources import eventually

from horovod.coordinator.config import CoordinatorConfig, Limits
from horovod.coordinator.core.ending import Attendance
from horovod.coordinator.server import CoordinatorServer
from horovod.coordinator.services.elsewhere import Attendances
from horovod.coordinator.services.hub import Hub
from horovod.coordinator.services.peers import Peers
from horovod.coordinator.store import MemoryStore

JOB = "a job/1"
DEADLINE_S = 60.0


def test_it_is_asked_of_who_serves_the_world() -> None:
    async def story() -> None:
        store, limits = MemoryStore(), Limits(reattach_grace_s=1.0)
        server = CoordinatorServer(CoordinatorConfig(limits=limits, open_store=lambda: store))
        port = await server.start()
        attendances = Attendances(store, Hub(store), Peers())
        assert await attendances.of(JOB) is None
        loop = asyncio.get_running_loop()

        def until(**hosts: set[str]) -> None:
            expected = Attendance(**{which: frozenset(names) for which, names in hosts.items()})

            def told() -> Attendance | None:
                return asyncio.run_coroutine_threadsafe(attendances.of(JOB), loop).result(DEADLINE_S)

            assert eventually(lambda: told() == expected), told()

        def members() -> None:
            with Crew(f"127.0.0.1:{port}") as crew:
                made = [crew.member("m0", job=JOB, host="h1", size=3, rank=0)]
                until(connected={"h1"})  # it waits for the others
                made += [crew.member(f"m{n}", job=JOB, host=f"h{n + 1}", size=3, pid=40 + n, rank=n) for n in (1, 2)]
                for member in made:
                    member.wait_for_world()
                    member.settle()
                until(connected={"h1", "h2", "h3"})
                made[1].lose_connection()
                until(connected={"h1", "h3"}, away={"h2"})
                until(connected={"h1", "h3"}, lost={"h2"})
                made[2].part()
                until(connected={"h1"}, lost={"h2"})  # who left has not been lost

        await asyncio.to_thread(members)
        await server.stop()
        assert await attendances.of(JOB) is None
        await store.close()

    asyncio.run(story())
