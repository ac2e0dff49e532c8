"""What an agent and a coordinator hold open does not grow with the jobs that have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from agents import DEADLINE_S, Agents, CoordinatorProcess
from resources import eventually

from horovod.coordinator.core.cluster.job import OVER
from horovod.launch.cluster.client import Access, ClusterClient
from horovod.protos.v1 import jobs_pb2

ROUNDS = 2

JOINS_ITS_WORLD = """
from horovod.worker.runtime import context
context.init()
"""


def test_no_descriptor_is_left_of_a_job(tmp_path: Path, program: Callable[[str], list[str]]) -> None:
    coordinator = CoordinatorProcess(tmp_path, "--store", f"sqlite:{tmp_path}/store")
    with Agents(tmp_path, coordinator=coordinator) as agents:
        agent = agents.add("h1")
        assert coordinator.process is not None
        pids = {"agent": agent.pid, "coordinator": coordinator.process.pid}

        async def run(commands: Sequence[Sequence[str]]) -> None:
            async with ClusterClient(Access([coordinator.address], coordinator.token)) as cluster:
                specs = [jobs_pb2.JobSpec(command=command, processes=1) for command in commands]
                jobs = {(await cluster.submit(spec)).id for spec in specs}
                while jobs & {job.id for job in (await cluster.listing()).jobs if job.state not in OVER}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        def held() -> dict[str, int]:
            return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}

        commands = [program(JOINS_ITS_WORLD), ["false"], ["/no/such/program"]]
        asyncio.run(asyncio.wait_for(run(commands), DEADLINE_S))
        before = held()
        asyncio.run(asyncio.wait_for(run(commands * ROUNDS), DEADLINE_S))
        assert eventually(lambda: all(held()[name] <= before[name] for name in pids)), (before, held())
