"""What a decision about jobs makes the caller do. Effects of one job are carried out in their order."""

from dataclasses import dataclass

from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import agents_pb2 as pb


@dataclass(frozen=True)
class Save:
    """Write the record to the store before the effects that follow."""

    job: str
    record: bytes
    is_new: bool = False  # the job's first record; the caller calls `Cluster.withdraw` if the store refuses it


@dataclass(frozen=True)
class Erase:
    """Delete what the store has of the job."""

    job: str


@dataclass(frozen=True)
class Command:
    """Send it to the agent; nothing happens when it is away."""

    agent: str
    command: pb.AgentCommand


@dataclass(frozen=True)
class Changed:
    """Tell those who follow the job that it has changed."""

    job: str


@dataclass(frozen=True)
class Notice:
    """Write this sentence to the log."""

    sentence: str


@dataclass(frozen=True)
class Coming:
    """Tell the members of the job's world that so many further processes are being started."""

    job: str
    count: int


Effect = Save | Erase | Command | Changed | Notice | RankEnded | Coming


def job_of(effect: Effect) -> str:
    """The job that the effect belongs to, or ""."""
    if isinstance(effect, Notice):
        return ""
    if not isinstance(effect, Command):
        return effect.job
    kind = effect.command.WhichOneof("command")
    return str(getattr(getattr(effect.command, kind), "job", "")) if kind else ""


def begins(effect: Effect) -> bool:
    """Whether the effect makes an agent begin something, so that the record must be saved before."""
    return isinstance(effect, Command) and effect.command.WhichOneof("command") in ("start", "run_line")


def may_precede_record(effect: Effect) -> bool:
    """Whether the effect may be carried out while the store takes no writes, unless one that `begins` is before it.

    If so, the next coordinator would decide the same from what agents tell it. `forget` deletes what they tell.
    """
    if isinstance(effect, Command):
        return effect.command.WhichOneof("command") in ("end", "finish", "signal")
    return isinstance(effect, Changed | RankEnded)
