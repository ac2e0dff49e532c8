"""Tasks end when they are told to, also one whose cancellation was lost."""

from __future__ import annotations

import asyncio

from horovod.base.tasks import end_tasks


def test_a_lost_cancellation_is_said_again() -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def loses_one() -> None:
            try:
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()  # as after a wait_for() that was done in the same turn

        async def fails() -> None:
            raise ValueError

        tasks = [asyncio.create_task(loses_one()), asyncio.create_task(fails())]
        await started.wait()
        await end_tasks(tasks, again_s=0.001)
        assert all(task.done() for task in tasks)
        await end_tasks([])

    asyncio.run(asyncio.wait_for(main(), 60))
