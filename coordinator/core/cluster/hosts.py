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

from dataclasses import dataclass, field

from horovod.coordinator.core.attendance import Attendance
from horovod.protos.v1 import jobs_pb2

from .outcomes import known

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
