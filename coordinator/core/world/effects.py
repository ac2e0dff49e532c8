"""What a decision about membership makes the caller do. Effects are carried out in their order."""

from collections.abc import Mapping
from dataclasses import dataclass

from horovod.protos.v1 import membership_pb2 as pb

from .waiting import Formation


@dataclass(frozen=True)
class Send:
    """Send `event` to the member; nothing happens when it is away."""

    member_id: str
    event: pb.MembershipEvent


@dataclass(frozen=True)
class Close:
    """End the stream: this process is no member any more, and nothing more will be sent to it."""

    member_id: str


@dataclass(frozen=True)
class Form:
    """All members are here: take the next epoch and call `Membership.formed` with it."""

    formation: Formation


@dataclass(frozen=True)
class TellLater:
    """Call `Membership.tell_progress` for the job after so many seconds."""

    job: str
    delay_s: float


@dataclass(frozen=True)
class LookLater:
    """Call `Membership.tick` for the job after so many seconds, or a little later."""

    job: str
    delay_s: float


@dataclass(frozen=True)
class Record:
    """Write who of the job's world is gone (`Membership.gone`) to the store; what follows waits for it."""

    job: str


@dataclass(frozen=True)
class Formed:
    """A world has begun; its members are told in effects of their own."""

    world: pb.World
    claims: Mapping[str, int]  # member id -> its rank in the job's last world, for members that have proved it


@dataclass(frozen=True)
class Gone:
    """A member of a running world left or was lost; what others must be told is in effects of its own."""

    job: str
    told: pb.MemberGone
    evidence: str  # the kind of evidence for a loss (life.py)


@dataclass(frozen=True)
class WorkDone:
    """The work of an elastic job is done; or, where there are no `slots`, is to go on after all."""

    job: str
    slots: Mapping[int, int]  # the scheduler's slot -> incarnation of the process that is a member in it


@dataclass(frozen=True)
class WorldEnded:
    """The last member of a world is gone."""

    job: str
    epoch: int


Effect = Send | Close | Form | TellLater | LookLater | Record | Formed | Gone | WorkDone | WorldEnded
