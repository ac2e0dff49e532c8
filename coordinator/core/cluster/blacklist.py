"""Hosts that get no further process of a job whose size changes.

A host is blamed for its own faults alone: its agent, or what keeps the processes there, was lost; or its processes
fail, again and again, soon after they were started, while those of the job's other hosts do not. That a process fails
after one on another host was lost is no such fault.

A host stays aside for the rest of the job's life, or for the job's cooldown, which doubles with each time.
"""

import random
from collections.abc import Mapping

from horovod.base.words import plural
from horovod.coordinator.core.elastic.cooldown import Cooldown
from horovod.protos.v1 import jobs_pb2

MOST_FAILED_STARTS = 3
START_S = 60.0  # a process that has run for longer has started


def is_aside(record: jobs_pb2.JobRecord, agent: str, wall_s: float) -> bool:
    """Whether the host gets no process of the job now."""
    found = _of(record, agent)
    return found is not None and not 0 < found.until <= wall_s


def was_aside(record: jobs_pb2.JobRecord, agent: str) -> bool:
    """Whether it got none at some time."""
    return _of(record, agent) is not None


def set_aside(record: jobs_pb2.JobRecord, agent: str, reason: str, wall_s: float) -> str:
    """From now on the host gets none. Returns the sentence. reason: completes "Host a gets no process ..., since "."""
    found = _of(record, agent)
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
    found = _of(record, agent)
    if found is None or found.until:
        return False
    found.until = 1.0  # a time that has passed
    return True


def failing(failed_starts: Mapping[str, int], hosts: set[str]) -> set[str]:
    """Those on which the job's processes fail at their start, though they do not elsewhere.

    failed_starts: how many processes have failed so since one has started well, by host. hosts: of the job.
    """
    some_well = any(not failed_starts.get(host) for host in hosts)
    return {host for host in hosts if some_well and failed_starts.get(host, 0) >= MOST_FAILED_STARTS}


def why_failing(count: int) -> str:
    return f"{plural(count, 'process')} failed there within {START_S:g} s of their start, and none elsewhere"


def _of(record: jobs_pb2.JobRecord, agent: str) -> jobs_pb2.HostAside | None:
    return next((one for one in record.hosts_aside if one.agent == agent), None)
