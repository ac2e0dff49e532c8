"""What agents have reported reaches the coordinator that serves a job's world, when another one serves its agents."""

from __future__ import annotations

import asyncio

from coordinator_client import Crew
from event_words import tells

from horovod.coordinator.config import CoordinatorConfig
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.server import CoordinatorServer
from horovod.coordinator.services.elsewhere import Outcomes
from horovod.coordinator.store import MemoryStore
from horovod.coordinator.store.records import submitted_key
from horovod.protos.v1 import jobs_pb2

JOB = "a job/1"
ENDED = RankEnded(JOB, 2, "h2", 42, "its agent saw its process end: signal 9 (SIGKILL)")
LOST = RankEnded(JOB, 0, "h1", 0, "host h1 has had no connection")


def record(*outcomes: jobs_pb2.RankOutcome, job: str = JOB) -> bytes:
    shares = [jobs_pb2.Share(agent="h1", slots=[0, 1]), jobs_pb2.Share(agent="h2", slots=[2])]
    return jobs_pb2.JobRecord(id=job, shares=shares, outcomes=outcomes).SerializeToString()


KILLED = jobs_pb2.RankOutcome(rank=2, pid=42, code=-9)
WITH_ITS_HOST = jobs_pb2.RankOutcome(rank=0, lost="host h1 has had no connection")


def test_outcomes_are_heard_of_by_who_serves_the_job() -> None:
    async def story() -> None:
        store, heard = MemoryStore(), asyncio.Queue[RankEnded]()
        outcomes = Outcomes(store, lambda job: job == JOB, heard.put_nowait)
        await store.put(submitted_key(JOB), record(KILLED))
        watching = asyncio.create_task(outcomes.watch())
        try:
            assert await asyncio.wait_for(heard.get(), 30) == ENDED, "it was there before"
            await store.put(submitted_key("other"), record(KILLED, job="other"))
            await store.put(submitted_key(JOB), record(WITH_ITS_HOST, jobs_pb2.RankOutcome(rank=9)))
            assert await asyncio.wait_for(heard.get(), 30) == LOST
            await store.delete(submitted_key(JOB))
            await store.put(submitted_key(JOB), record(KILLED))
            assert await asyncio.wait_for(heard.get(), 30) == ENDED
            await outcomes.look(JOB)  # as when the job is taken over
            assert heard.get_nowait() == ENDED
            await outcomes.look("a job without agents")
            preparing = jobs_pb2.JobRecord.FromString(record(KILLED))
            preparing.spec.lines.add(command=["make"])  # its processes are in no world
            await store.put(submitted_key(JOB), preparing.SerializeToString())
            await outcomes.look(JOB)
            assert heard.empty()
        finally:
            watching.cancel()

    asyncio.run(story())


def test_the_members_of_its_world_hear_of_it() -> None:
    async def story() -> None:
        store = MemoryStore()
        server = CoordinatorServer(CoordinatorConfig(open_store=lambda: store))
        port = await server.start()

        def members() -> None:
            with Crew(f"127.0.0.1:{port}") as crew:
                made = [crew.member(f"m{n}", job=JOB, host=f"h{n + 1}", pid=40 + n, rank=n) for n in range(2)]
                for member in made:
                    member.wait_for_world()
                made[1].settle()  # else the end of its stream would be a loss by itself
                made[1].lose_connection()
                asyncio.run_coroutine_threadsafe(store.put(submitted_key(JOB), written), loop).result(30)
                sentence = made[0].event("gone").sentence
                assert tells(sentence, "Rank 1 (pid 41) on host h2", ENDED.cause)

        loop = asyncio.get_running_loop()
        shares = [jobs_pb2.Share(agent=f"h{rank + 1}", slots=[rank]) for rank in (0, 1)]
        ended = [jobs_pb2.RankOutcome(rank=1, pid=41, code=-9)]
        written = jobs_pb2.JobRecord(id=JOB, shares=shares, outcomes=ended).SerializeToString()
        await asyncio.to_thread(members)
        await server.stop()
        await store.close()

    asyncio.run(story())
