"""The scheduler for a launcher that has the coordinator in its own process: the same messages, without gRPC.

Such a launcher is an agent, which starts the ranks on its own machine, and a client, which submits the job and follows
it. Its event loop is not the coordinator's: what it asks for is carried out in the coordinator's loop, and commands for
its agents are called in its own.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from horovod.base.errors import ClusterCode, coded
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from .services.agents import MAX_COMMANDS
from .services.cluster import ClusterHub, CommandOutbox
from .services.follower import MAX_EVENTS, Follower, JobOutbox

Obey = Callable[[str, pb.AgentCommand], None]  # (agent, command that it is to obey)


class InProcessScheduler:
    """Made, and used, in the launcher's event loop."""

    def __init__(self, hub: ClusterHub, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the coordinator's."""
        self._hub = hub
        self._theirs = loop
        self._ours = asyncio.get_running_loop()
        # Agent -> its commands; used in the coordinator's loop alone, as everything below.
        self._commands: dict[str, CommandOutbox] = {}
        self._passing: list[asyncio.Task[None]] = []
        self._submitted: asyncio.Future[str] = loop.create_future()  # the id of the job

    async def attach(self, registers: Sequence[pb.Register], obey: Obey) -> None:
        """These agents are there from now on. ValueError with a sentence for one that is refused."""

        async def attach() -> None:
            for register in registers:
                commands = self._commands[register.name] = CommandOutbox(MAX_COMMANDS)
                if refused := self._hub.attach(register, commands):
                    raise ValueError(refused.sentence)
                self._passing.append(asyncio.create_task(self._pass_on(register.name, commands, obey)))

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(attach(), self._theirs))

    def detach(self, register: pb.Register) -> None:
        """This agent is gone, after what it has told so far. Another one may take its name."""

        def detach() -> None:
            if (commands := self._commands.get(register.name)) is not None:
                self._hub.detached(register, commands)
                commands.close()

        self._theirs.call_soon_threadsafe(detach)

    def tell(self, agent: str, message: pb.AgentMessage) -> None:
        """What the agent has to say, like a report."""
        self._theirs.call_soon_threadsafe(lambda: self._hub.received(agent, self._commands[agent], message))

    async def run(
        self, spec: jobs_pb2.JobSpec, job_id: str, changed: Callable[[jobs_pb2.JobRecord], None]
    ) -> jobs_pb2.JobRecord:
        """Submits the job under this id, and returns its record when it is over. ValueError: the job is refused.

        changed: called with the record, in the launcher's loop, whenever it is another one.
        """

        async def run() -> jobs_pb2.JobRecord:
            record = await self._hub.submit(spec, job_id)
            if isinstance(record, str):
                raise ValueError(record)
            self._submitted.set_result(record.id)
            return await self._followed(record, changed)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._theirs))

    def stop(self, signum: int) -> None:
        """The job is to end, as soon as it is submitted: by this signal, and then by stronger ones."""

        async def stop() -> None:
            await self._hub.signal(await self._submitted, signum, stop=True)

        asyncio.run_coroutine_threadsafe(stop(), self._theirs)

    # -- in the coordinator's loop -------------------------------------------------------------------------------------

    async def _pass_on(self, agent: str, commands: CommandOutbox, obey: Obey) -> None:
        with contextlib.suppress(RuntimeError):  # the launcher's loop is closed: it is about to end
            while found := await commands.take():
                for command in found:
                    self._ours.call_soon_threadsafe(obey, agent, command)

    async def _followed(
        self, record: jobs_pb2.JobRecord, changed: Callable[[jobs_pb2.JobRecord], None]
    ) -> jobs_pb2.JobRecord:
        events = JobOutbox(MAX_EVENTS)
        follower = Follower(jobs_pb2.Open(job=record.id), events)
        self._hub.follow(follower)
        try:
            while found := await events.take():
                for event in found:
                    if event.HasField("record"):
                        record = event.record
                        self._ours.call_soon_threadsafe(changed, record)
                    elif event.HasField("ended"):
                        return record
        finally:
            self._hub.unfollow(follower)
        raise RuntimeError(coded(ClusterCode.COORDINATOR_ENDS, "The coordinator ended before the job."))
