"""The cluster that the servicers of agents and jobs share: the core's decisions, streams, and the store.

What follows from a decision is done in order, job by job (lanes.py): a record is in the store before anybody acts on
it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import grpc

from horovod.base.errors import ClusterCode, coded, without_code
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.base.tasks import end_tasks
from horovod.base.words import printable, release_in_words
from horovod.coordinator.config import Limits
from horovod.coordinator.core.cluster.cluster import Cluster
from horovod.coordinator.core.cluster.effects import Coming, Command, Effect, Notice
from horovod.coordinator.core.cluster.job import ClusterJob, describe, refusal_of
from horovod.coordinator.core.cluster.job_record import listed
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.coordinator.core.world.story import is_over
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.records import read_records, read_stories, read_story
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2, story_pb2

from .code import CodeShelf
from .follower import Follower
from .lanes import Act, Lanes
from .leading import Leading
from .peers import Peers
from .sending import Outbox
from .streams import MAX_SHOWN, Context, NotServingError, RefusedError
from .ticks import Ticks

UNREACHABLE = "horovod-unreachable"  # in a call's metadata: coordinators that its client could not connect to just now
LEADER = "horovod-leader"  # in the trailing metadata of a call that is refused: who serves agents and jobs
STORIES_S = 2.0  # a listing waits so long for the stories of jobs

CommandOutbox = Outbox[pb.AgentCommand]

_log = logging.getLogger(__name__)


async def _unknown_attendance(job: str) -> Attendance | None:
    return None


class ClusterHub:
    def __init__(
        self,
        store: Store,
        version: str,
        *,
        limits: Limits = Limits(),  # noqa: B008 - a frozen value
        token: Callable[[str], str] = lambda job: "",
        rank_ended: Callable[[RankEnded], None] = lambda ended: None,
        ranks_seen: Callable[[str, pb.JobReport], None] = lambda host, report: None,
        coming: Callable[[str, int], None] = lambda job, count: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        attendance: Callable[[str], Awaitable[Attendance | None]] = _unknown_attendance,
        latest_epoch: Callable[[str], int | None] | None = None,
        peers: Peers | None = None,
    ) -> None:
        """token: with which the ranks of a job join. rank_ended: told of ranks whose process is known to have ended.
        ranks_seen: told of what the agent of a host says of its ranks. coming: told of a running job that gets so many
        further processes. attendance: which hosts of a job's world are
        connected to who serves it. latest_epoch: as `Hub` has it. peers: other coordinators of the
        store.
        """
        self._store = store
        self._limits = limits
        self._token = token
        self._rank_ended = rank_ended
        self._ranks_seen = ranks_seen
        self._coming = coming
        self._ticks = Ticks(clock, limits.tick_s)
        self._clock = self._ticks.now_s  # the time that counts for every limit
        self._wall_clock = wall_clock
        self._latest_epoch = latest_epoch
        self.cluster = self._new_cluster(version)
        self._agents: dict[str, CommandOutbox] = {}  # name -> commands for it, of agents that are connected
        self._followers: dict[str, set[Follower]] = {}  # job -> those who follow it
        # Number of the reader -> its follower, and the agent that it reads from.
        self._readers: dict[int, tuple[Follower, str]] = {}
        self._last_reader = 0
        self._probe_secret = secrets.token_bytes(32)
        self._watches: list[asyncio.Task[None]] = []
        self._serving: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}  # job -> the last line about it in the log
        self._attendance = attendance
        self._leading = Leading(store, self._begin, self._end, peers=peers)
        self._lanes = Lanes(
            store,
            guard=lambda: self._leading.guard if self.serves else None,
            act=self._act,
            withdraw=lambda job: self._do(self.cluster.withdraw(job, self._clock(), self._wall_clock())),
            unkept=lambda job, why: self._do(self.cluster.unkept(job, why, self._clock(), self._wall_clock())),
            lose=self._leading.lose,
        )
        self.code = CodeShelf(store, lambda: self._leading.guard, self._needed_code)

    def _new_cluster(self, version: str) -> Cluster:
        # Where others use the store, too, one of them may serve the ranks of a job.
        hears_of_worlds = self._latest_epoch is not None and not self._store.is_shared
        return Cluster(version, PROTOCOL_VERSION, self._limits.reattach_grace_s, hears_of_worlds=hears_of_worlds)

    def _hear_of_worlds(self) -> None:
        if self._latest_epoch is None:
            return
        for job in self.cluster.replacing():
            if (epoch := self._latest_epoch(job)) is not None:
                self.cluster.joined(job, epoch)

    async def start(self, address: str = "") -> None:
        """Begins to serve as soon as no other coordinator of the store does. address: where others reach this one."""
        self._leading.address = address
        await self._leading.attempt()
        self._watches = [asyncio.create_task(one) for one in (self._ticks.watch(self._look), self._watch_hosts())]
        self._serving = asyncio.create_task(self._leading.run())

    async def stop(self) -> None:
        if self._serving is not None:
            await end_tasks([self._serving])  # first of all, or this coordinator might lead again
        await self._leading.resign()
        self._end(coded(ClusterCode.COORDINATOR_ENDS, "The coordinator is stopping."))
        await end_tasks(self._watches)

    @property
    def serves(self) -> bool:
        """Whether this coordinator serves agents and clients, and no other one of the store does."""
        return self._leading.leads

    @property
    def not_serving(self) -> str:
        """The sentence for agents and clients that come while another coordinator, or none, serves them."""
        return self._leading.why_not

    @property
    def leader(self) -> str:
        """The address of the coordinator that serves instead, if it is known."""
        return self._leading.leader

    async def complaint(self, unreachable: Collection[str], agent: str) -> None:
        """As `Leading.complaint`."""
        await self._leading.complaint(unreachable, agent)

    def connected_agents(self) -> list[str]:
        """The names of connected agents; none where another coordinator serves."""
        return list(self._agents) if self.serves else []

    def agent_s(self, job_id: str, rank: int) -> float:
        """How long to wait for an agent's word how the process of this rank ended; 0: none will tell it here."""
        return self.cluster.agent_s(job_id, rank) if self.serves else 0.0

    def host_goes(self, job_id: str, slot: int, incarnation: int) -> bool:
        """As `Cluster.host_goes`."""
        return self.serves and self.cluster.host_goes(job_id, slot, incarnation)

    def work_done(self, job_id: str, slots: Mapping[int, int]) -> None:
        """The world of a job, which this coordinator serves too, says so (effects.WorkDone)."""
        if self.serves:
            self._do(self.cluster.work_done(job_id, slots))

    async def _begin(self) -> None:
        """Goes on with the jobs that the store knows of."""
        records = [record for record, _ in await read_records(self._store)]
        self.cluster = self._new_cluster(self.cluster.version)
        self.cluster.load(records, self._clock())
        await self.code.load()

    def _needed_code(self) -> set[str]:
        return {job.record.spec.code.sha256 for job in self.cluster.jobs.values() if not job.is_over}

    def _end(self, sentence: str) -> None:
        """Ends all streams: agents and clients go to the coordinator that serves now, which does what was not done."""
        for commands in self._agents.values():
            commands.fail(grpc.StatusCode.UNAVAILABLE, sentence)
        for followers in self._followers.values():
            for follower in followers:
                follower.events.fail(grpc.StatusCode.UNAVAILABLE, sentence)
        self._agents.clear()
        self._lanes.clear(NotServingError(sentence))

    # -- agents --------------------------------------------------------------------------------------------------------

    def attach(self, register: pb.Register, commands: CommandOutbox) -> pb.NotRegistered | None:
        """The agent of a host is there, and `commands` gets what it is to do; or why not."""
        if refused := self.cluster.refuses(register):
            _log.info("Refused: %s", refused.sentence)
            return refused
        if older := self._agents.get(register.name):
            sentence = coded(ClusterCode.NEWER_STREAM, "This agent opened a newer stream.")
            older.fail(grpc.StatusCode.ABORTED, sentence)
            self._forget_readers(register.name)
        self._agents[register.name] = commands
        commands.put(
            pb.AgentCommand(registered=pb.Registered(probe_secret=self._probe_secret, version=self.cluster.version))
        )
        _log.info("Host %s is registered with %d slots.", register.name, register.slots)
        if register.version != self.cluster.version:
            agent = release_in_words(register.version)
            _log.info("The agent of host %s has %s, this coordinator %s.", register.name, agent, self.cluster.version)
        self._hear_of_worlds()
        self._do(self.cluster.attach(register, self._clock(), self._wall_clock()))
        self._sync_all()
        return None

    def reads(self, name: str, message: pb.AgentMessage) -> bool:
        """Whether a reader asked this agent for the output in the message."""
        return message.HasField("output") and self._reader(name, message.output.reader) is not None

    def received(self, name: str, commands: CommandOutbox, message: pb.AgentMessage) -> None:
        """A message of an agent, whose stream has `commands`. Of an older stream, which is about to end, it is void."""
        if self._agents.get(name) is not commands:
            return
        if message.HasField("report"):
            self._ranks_seen(name, message.report)
            self._hear_of_worlds()
            self._do(self.cluster.report(name, message.report, self._clock(), self._wall_clock()))
        elif message.HasField("output"):
            follower = self._reader(name, message.output.reader)
            if follower and not follower.output(name, message.output.output):
                sentence = f"More output than was asked for comes from host {printable(name)}: a bug of its agent."
                raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, coded(ClusterCode.TOO_MANY_MESSAGES, sentence))
        elif message.HasField("log_end"):
            if follower := self._reader(name, message.log_end.reader):
                del self._readers[message.log_end.reader]
                follower.read_all(name)
                self._sync(follower)
        elif message.HasField("reached"):
            answer = message.reached
            now_s, wall_s = self._clock(), self._wall_clock()
            self._do(self.cluster.reached(name, answer.probe, answer.targets, now_s, wall_s))
        elif message.HasField("fitness"):
            self._do(self.cluster.fitness(name, message.fitness.unfit, self._clock(), self._wall_clock()))
        elif message.HasField("slots"):
            self._do(self.cluster.slots(name, message.slots.slots, self._clock(), self._wall_clock()))
        elif message.HasField("drain"):
            self._do(self.cluster.drain(name))

    def detached(self, register: pb.Register, commands: CommandOutbox) -> None:
        """One of the agent's streams is over."""
        if self._agents.get(register.name) is commands:
            del self._agents[register.name]
            _log.info("The agent of host %s has no connection any more.", register.name)
            self._forget_readers(register.name)
            self._do(self.cluster.detached(register.name, register.instance, self._clock()))
            self._sync_all()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    async def submit(self, spec: jobs_pb2.JobSpec, job_id: str = "") -> jobs_pb2.JobRecord | str:
        """The record when it is in the store; or why the job is not taken. Raises NotServingError, and StoreError where
        the store refuses it. job_id: that no other job has; empty: one is made.
        """
        if sentence := refusal_of(spec):
            return sentence
        if not (job := self.cluster.submitted(spec.submission)):
            if spec.code.sha256 and not self.code.archives.has(spec.code.sha256):
                sentence = "The code of this job is not here, or not any more: upload it first."
                return coded(ClusterCode.CODE_NOT_HERE, sentence)
            job_id = job_id or self._new_id(spec)
            self._do(self.cluster.submit(job_id, spec, self._clock(), self._wall_clock()))
            job = self.cluster.jobs[job_id]
        await self._lanes.done(job.record.id)
        return self._shown(job)

    def placement(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord | str:
        """Where the job would run now (core/cluster/scheduler.py); or why it would not be taken."""
        return refusal_of(spec) or public(self.cluster.placement(spec))

    async def signal(self, job_id: str, signum: int, stop: bool) -> jobs_pb2.JobRecord | None:
        """None for a job that is not known here. Raises NotServingError, and StoreError where a store that takes no
        writes has to come first.
        """
        if not (job := self.cluster.jobs.get(job_id)):
            return None
        self._do(self.cluster.signal(job_id, signum, stop, self._clock(), self._wall_clock()))
        await self._lanes.done(job_id)
        return self._shown(job)

    def listing(self, most: int) -> jobs_pb2.Listing:
        """All jobs that are not over, `most` of the others, and agents."""
        jobs = sorted(self.cluster.jobs.values(), key=lambda job: -job.record.number)
        over = [job for job in jobs if job.is_over][:most]
        found = jobs_pb2.Listing(jobs=[listed(self._shown(job)) for job in jobs if not job.is_over or job in over])
        for agent in self.cluster.agents.values():
            away_s = None if agent.away_since_s is None else self._clock() - agent.away_since_s
            state = "drains" if agent.is_draining else "ready" if away_s is None else f"away for {away_s:.0f} s"
            if state == "ready" and agent.fitness.aside:
                state = f"set aside: {agent.fitness.aside}"
            found.agents.add(
                name=agent.name,
                slots=agent.register.slots,
                free_slots=self.cluster.free_slots(agent.name),
                gpus=len(agent.register.gpus),
                state=state,
                version=agent.register.version,
                labels=agent.register.labels,
            )
        return found

    async def worlds(self, most: int) -> list[story_pb2.JobStory]:
        """The stories of jobs that were started by hand: all that run, without entries, and `most` that are over, with
        their last entry. None if the store is silent.
        """
        try:
            found = await asyncio.wait_for(read_stories(self._store), STORIES_S)
        except (StoreError, asyncio.TimeoutError):
            return []
        by_hand = [one for one in found if one.job not in self.cluster.jobs]
        over = sorted((one for one in by_hand if is_over(one)), key=lambda one: -one.entries[-1].at)[:most]
        running = [one for one in by_hand if not is_over(one)]
        for one in running:
            del one.entries[:]
        for one in over:
            del one.entries[:-1]
        return sorted((*running, *over), key=lambda one: one.job)

    async def listing_of(self, job_id: str) -> jobs_pb2.Listing | None:
        """One job, submitted or not, with its story; None if it is not known here. Raises StoreError."""
        job, story = self.cluster.jobs.get(job_id), await read_story(self._store, job_id)
        if job is None and story is None:
            return None
        return jobs_pb2.Listing(jobs=[listed(self._shown(job))] if job else (), worlds=[story] if story else ())

    def follow(self, follower: Follower) -> None:
        """`follower` hears of its job, which is there, from now on."""
        self._followers.setdefault(follower.job, set()).add(follower)
        follower.changed(self._shown(self.cluster.jobs[follower.job]))
        self._sync(follower)

    def taken(self, follower: Follower, taken: jobs_pb2.Taken) -> None:
        """The follower's reader has done with this output."""
        job = self.cluster.jobs.get(follower.job)
        if job is None:
            return
        by_agent: dict[str, jobs_pb2.Taken] = {}
        for one in taken.ranks:
            if (name := follower.agent_of(one.rank, one.share)) is not None:
                by_agent.setdefault(name, jobs_pb2.Taken()).ranks.append(one)
        for agent, part in by_agent.items():
            follower.taken(agent, part)
            if (reader := follower.readers.get(agent)) and agent in self._agents:
                self._agents[agent].put(pb.AgentCommand(taken=pb.LogTaken(reader=reader, taken=part)))
        self._sync(follower)  # opens the reads for which there was no room

    def unfollow(self, follower: Follower) -> None:
        """The follower's stream is over."""
        followers = self._followers.get(follower.job, set())
        followers.discard(follower)
        if not followers:
            self._followers.pop(follower.job, None)
        for agent, reader in follower.readers.items():
            self._readers.pop(reader, None)
            if agent in self._agents:
                # Unless the follower has ended, its client may come back and read on.
                close = pb.CloseLog(reader=reader, release=follower.ended)
                self._agents[agent].put(pb.AgentCommand(close=close))

    def _reader(self, agent: str, reader: int) -> Follower | None:
        """The follower that reads by this number from this agent; None if there is none."""
        follower, name = self._readers.get(reader, (None, ""))
        return follower if name == agent else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        if not self.serves:
            return  # the agent's stream has just ended; it tells the next coordinator everything again
        for effect in effects:
            self._lanes.put(effect)

    def _act(self, effect: Act) -> None:
        if isinstance(effect, Command):
            if commands := self._agents.get(effect.agent):
                command = effect.command
                if command.HasField("start"):
                    command.start.token = self._token(command.start.job)
                commands.put(command)
        elif isinstance(effect, RankEnded):
            self._rank_ended(effect)
        elif isinstance(effect, Coming):
            self._coming(effect.job, effect.count)
        elif isinstance(effect, Notice):
            _log.warning("%s", effect.sentence)
        else:
            self._changed(effect.job)

    def _shown(self, job: ClusterJob) -> jobs_pb2.JobRecord:
        """The record of the job as people see it."""
        shown = public(job.record)
        if (trouble := self._lanes.trouble(job.record.id)) and not job.is_over:
            before = without_code(shown.sentence)
            shown.sentence = f"{before} The store does not take what has happened to it yet: {trouble}".strip()
        return shown

    def _changed(self, job_id: str) -> None:
        if job_id not in self.cluster.jobs:
            return
        text = describe(self.cluster.jobs[job_id].record)
        if self._told.get(job_id) != text:
            self._told[job_id] = text
            _log.info("%s", text)
        job = self.cluster.jobs[job_id]
        if job.is_over:
            self._told.pop(job_id, None)
        for follower in list(self._followers.get(job_id, ())):
            for reader in follower.begin_anew() if not job.record.shares else follower.moved(job.record):
                self._close_reader(reader)
            follower.changed(self._shown(job))
            self._sync(follower)

    def _sync_all(self) -> None:
        for followers in list(self._followers.values()):
            for follower in list(followers):
                self._sync(follower)

    def _sync(self, follower: Follower) -> None:
        """Opens the readers that the follower can have now, and ends its stream when nothing more will come."""
        job = self.cluster.jobs.get(follower.job)
        if job is None:
            follower.end()
            return
        for share in follower.wanted(job.record):
            if share.agent in self._agents:
                # This reader does not read everything that there is by now.
                if (reader := follower.readers.get(share.agent)) is not None:
                    self._close_reader(reader)
                self._last_reader += 1
                self._readers[self._last_reader] = (follower, share.agent)
                read = follower.open_on(share, self._last_reader)
                self._agents[share.agent].put(pb.AgentCommand(read=read))
        follower.end_if_complete(job.record, self.cluster.agents.keys())

    def _close_reader(self, reader: int) -> None:
        """Another one may go on where it was."""
        _, agent = self._readers.pop(reader, (None, ""))
        if agent in self._agents:
            self._agents[agent].put(pb.AgentCommand(close=pb.CloseLog(reader=reader)))

    def _forget_readers(self, agent: str) -> None:
        """Readers end with the agent's stream; new ones go on where they were."""
        for reader, (follower, name) in list(self._readers.items()):
            if name == agent:
                del self._readers[reader]
                follower.readers.pop(agent, None)

    def _look(self, jumped: bool) -> None:
        """Finds agents that are overdue."""
        if jumped:
            self.cluster.restart_limits(self._clock())
        if not self.serves:
            return
        try:
            before = set(self.cluster.agents)
            self._hear_of_worlds()
            self._do(self.cluster.tick(self._clock(), self._wall_clock()))
            if before - self.cluster.agents.keys():
                self._sync_all()
        except Exception:
            _log.exception("A bug in the coordinator: its watch over the cluster failed.")

    async def _watch_hosts(self) -> None:
        """Asks, for ever, whether hosts whose agents are away still have connected ranks, and so live."""
        while True:
            await asyncio.sleep(self._limits.tick_s)
            jobs, cluster = self.cluster.doubtful() if self.serves else [], self.cluster
            try:
                found = await asyncio.gather(*(self._attendance(job) for job in jobs))
                for job, attendance in zip(jobs, found, strict=True):
                    cluster.attended(job, attendance, self._clock())
            except Exception:
                _log.exception("A bug in the coordinator: it can't tell which hosts live.")

    def _new_id(self, spec: jobs_pb2.JobSpec) -> str:
        while True:
            job_id = f"{stem_of(spec)}-{secrets.token_hex(3)}"
            if job_id not in self.cluster.jobs:
                return job_id


def stem_of(spec: jobs_pb2.JobSpec) -> str:
    """What the id of a job begins with: its name, or the first argument that looks like a program."""
    text = spec.name
    if not text and spec.lines:
        return "job"
    if not text:
        is_python = spec.command[0].rpartition("/")[2].startswith("python")
        word = next((word for word in spec.command[1:] if not word.startswith("-")), "") if is_python else ""
        text = (word or spec.command[0]).rpartition("/")[2].removesuffix(".py")
    text = text[:MAX_SHOWN]  # a name may be as long as a request
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._") else "-" for letter in text)
    return kept.strip("-.")[:40] or "job"


def public(record: jobs_pb2.JobRecord) -> jobs_pb2.JobRecord:
    """A copy without the environment, which may hold secrets."""
    copy = jobs_pb2.JobRecord()
    copy.CopyFrom(record)
    copy.spec.environment.clear()
    return copy


async def check_serving(hub: ClusterHub, context: Context, agent: str = "") -> None:
    """Ends the call where another coordinator serves, which the client then tries, unless it could not connect there.

    agent: the name of the one that calls.
    """
    given = str(dict(context.invocation_metadata() or ()).get(UNREACHABLE, ""))
    if given and not hub.serves:
        await hub.complaint(given.split(","), agent)
    if not hub.serves:
        await send_on(hub, context)


async def send_on(hub: ClusterHub, context: Context) -> None:
    """Ends the call with UNAVAILABLE and the address of the coordinator that serves, as far as it is known."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, hub.not_serving, ((LEADER, hub.leader),))
