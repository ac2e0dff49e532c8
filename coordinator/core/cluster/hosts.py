"""When a host whose agent has no connection is lost, and when a host that fails to start jobs is tried again.

An agent that is away says nothing of its host: it may have been killed and be started again, and it may be unable to
reach the coordinator that serves agents while its ranks reach the one that serves their world. So ranks are asked for:

    what is known of a job's ranks on that host                                   the host is lost to the job
    one of them is connected to whichever coordinator serves its world            not: it lives
    they were lost for their world, or the job is ending, or never began there    after the grace
    all of them have ended, as the agent has said                                 after the grace
    nothing: they are in no world, or away from it too, or nobody serves it       after as long as ranks run on without
                                                                                  their agent (`--orphan-grace-seconds`)

A host that could not start a job, for reasons of its own (a full disk), is set aside: other hosts get the jobs. It is
tried again after a while, which doubles with each failure.

Pure: time is an argument.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.base.words import plural
from horovod.coordinator.core.elastic.hosts import Cooldown
from horovod.coordinator.core.ending import Attendance
from horovod.protos.v1 import jobs_pb2

from .job_record import known

FIRST_ASIDE_S = 30.0
LONGEST_ASIDE_S = 600.0


def grace_of(record: jobs_pb2.JobRecord, share: jobs_pb2.Share, attendance: Attendance | None, grace_s: float) -> float:
    """For how long nothing may be seen of the host, agent or ranks, until it is lost to the job.

    attendance: None where it is not known which hosts the world has.
    """
    own = set(zip(share.slots, share.incarnations or [1] * len(share.slots), strict=True))
    all_ended = bool(own) and own <= known(record)
    may_run_unseen = share.started and not all_ended and record.state != jobs_pb2.JOB_STATE_ENDING
    if not may_run_unseen or (attendance is not None and share.agent in attendance.lost):
        return grace_s
    return max(grace_s, share.orphan_grace_seconds)


@dataclass
class Fitness:
    """Whether a host is given jobs."""

    unfit: str = ""  # why this host can't start any job, as its agent says
    failed: str = ""  # why this host could not start its last job; empty when it is not set aside for that
    failures: int = 0  # failed starts here since the last one that succeeded
    until_s: float = field(default=0.0)

    def could_not_start(self, reason: str, now_s: float) -> None:
        self.failed = reason
        self.until_s = now_s + min(LONGEST_ASIDE_S, FIRST_ASIDE_S * 2.0**self.failures)
        self.failures += 1

    def started(self) -> None:
        self.failed, self.failures = "", 0

    def told(self, unfit: str) -> None:
        """The agent says whether its host can start jobs. A host that can again gets jobs at once."""
        if self.unfit and not unfit:
            self.failed = ""
        self.unfit = unfit

    def look(self, now_s: float) -> None:
        """Ends the time for which the host is set aside, if that has passed."""
        if self.failed and now_s >= self.until_s:
            self.failed = ""

    @property
    def aside(self) -> str:
        """Why the host is given no jobs now; empty when it is given jobs."""
        return self.unfit or self.failed


# Hosts that get no further process of a job whose size changes.
#
# A host is blamed for its own faults alone: its agent, or what keeps the processes there, was lost; or its processes
# fail, again and again, soon after they were started, while those of the job's other hosts do not. That a process fails
# after one on another host was lost is no such fault.
#
# A host stays aside for the rest of the job's life, or for the job's cooldown, which doubles with each time.

MOST_FAILED_STARTS = 3
START_S = 60.0  # a process that has run for longer has started


def is_aside(record: jobs_pb2.JobRecord, agent: str, wall_s: float) -> bool:
    """Whether the host gets no process of the job now."""
    found = _aside_of(record, agent)
    return found is not None and not 0 < found.until <= wall_s


def was_aside(record: jobs_pb2.JobRecord, agent: str) -> bool:
    """Whether it got none at some time."""
    return _aside_of(record, agent) is not None


def set_aside(record: jobs_pb2.JobRecord, agent: str, reason: str, wall_s: float) -> str:
    """From now on the host gets none. Returns the sentence. reason: completes "Host a gets no process ..., since "."""
    found = _aside_of(record, agent)
    if found is None:
        found = record.hosts_aside.add(agent=agent)
    policy, how_long = record.spec.policy, "further process of this job"
    if policy.cooldown_most_seconds:
        # The chance depends on job, host and time alone, so every coordinator that decides it gets the same.
        chance = random.Random(f"{record.id} {agent} {found.times}").random()
        cooldown = Cooldown(policy.cooldown_least_seconds, policy.cooldown_most_seconds)
        delay_s = cooldown.delay_s(found.times, chance)
        found.until = wall_s + delay_s
        how_long = f"process of this job for {delay_s:.0f} s"
    else:
        found.until = 0.0
    found.times += 1
    found.reason = reason
    return f"Host {agent} gets no {how_long}, since {reason}."


def readmit(record: jobs_pb2.JobRecord, agent: str) -> bool:
    """The host may get processes again, before its time. False where it is not aside for good."""
    found = _aside_of(record, agent)
    if found is None or found.until:
        return False
    found.until = 1.0  # a time that has passed
    return True


def failing_hosts(failed_starts: Mapping[str, int], hosts: set[str]) -> set[str]:
    """Those on which the job's processes fail at their start, though they do not elsewhere.

    failed_starts: how many processes have failed so since one has started well, by host. hosts: of the job.
    """
    some_well = any(not failed_starts.get(host) for host in hosts)
    return {host for host in hosts if some_well and failed_starts.get(host, 0) >= MOST_FAILED_STARTS}


def why_failing(count: int) -> str:
    return f"{plural(count, 'process')} failed there within {START_S:g} s of their start, and none elsewhere"


def _aside_of(record: jobs_pb2.JobRecord, agent: str) -> jobs_pb2.HostAside | None:
    return next((one for one in record.hosts_aside if one.agent == agent), None)
