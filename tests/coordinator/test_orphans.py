"""What is kept of a job goes when it can't come back, whatever has become of the coordinator that served it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator_builders import request

from horovod.coordinator.config import Limits
from horovod.coordinator.core.world import liveness
from horovod.coordinator.services.elsewhere import Orphans
from horovod.coordinator.services.hub import EventOutbox, Hub
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.services.serving import REPLICAS
from horovod.coordinator.store import Store, open_store
from horovod.coordinator.store.jobs import JOBS, epoch_key

DEADLINE_S = 60.0


async def forms_a_world(hub: Hub, job: str) -> None:
    hub.serving.address = "127.0.0.1:1"
    assert await hub.serve(job) == ""
    events: EventOutbox = Outbox(100)
    assert hub.join(request("m0", job=job, size=1), events) == ""
    while not any(event.HasField("world") for event in await events.take()):
        pass


async def until_only_its_counter_is_left(store: Store, job: str) -> None:
    while [entry.key for entry in (await store.range(JOBS))[0]] != [epoch_key(job)]:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)


def test_a_job_that_is_over_leaves_its_counter_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        store = open_store(f"sqlite:{tmp_path}/store")
        hub = Hub(store)
        await forms_a_world(hub, "a/job")
        hub.leave("m0", "")
        await asyncio.wait_for(until_only_its_counter_is_left(store, "a/job"), DEADLINE_S)
        await hub.stop()
        await store.close()

    asyncio.run(main())


def test_a_job_that_ended_together_with_its_coordinator_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "DORMANT_S", 0.0)

    async def killed() -> None:
        store = open_store(f"sqlite:{tmp_path}/store")
        hub = Hub(store, lease_s=0.05)
        await forms_a_world(hub, "digits")
        await store.close()  # before the hub could write that it stops

    async def next_one() -> None:
        store = open_store(f"sqlite:{tmp_path}/store")
        hub = Hub(store, limits=Limits(reattach_grace_s=0.05))
        hub.serving.address = "127.0.0.1:1"
        while (await store.range(REPLICAS))[0]:  # noqa: ASYNC110 - the lease of the dead one
            await asyncio.sleep(0.01)
        patient = Orphans(store, hub.serving.serves, hub.adopt)
        assert await patient._find(0.0) == []
        assert await patient._find(24 * 3600.0 - 1) == []
        assert await patient._find(24 * 3600.0) == ["digits"]
        await store.put(epoch_key("digits"), b"7")  # somebody has changed it
        assert await patient._find(24 * 3600.0) == []
        watching = [
            asyncio.create_task(Orphans(store, hub.serving.serves, hub.adopt, 0.0, 0.01).watch()),
            asyncio.create_task(hub.watch_clock()),
        ]
        await asyncio.wait_for(until_only_its_counter_is_left(store, "digits"), DEADLINE_S)
        for task in watching:
            task.cancel()
        await hub.stop()
        await store.close()

    asyncio.run(killed())
    asyncio.run(next_one())


def test_a_job_that_is_served_is_no_orphan(tmp_path: Path) -> None:
    async def main() -> None:
        store = open_store(f"sqlite:{tmp_path}/store")
        hub, other = Hub(store), Hub(store)
        await forms_a_world(hub, "digits")
        for one in (hub, other):
            found = Orphans(store, one.serving.serves, one.adopt, 0.0)
            assert await found._find(0.0) == []
            assert await found._find(1e9) == []
        await hub.stop()
        await other.stop()
        await store.close()

    asyncio.run(main())
