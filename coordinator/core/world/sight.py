"""What a coordinator sees of the members of a job by itself, beside what they say: it looks at each tick."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from horovod.protos.v1 import membership_pb2 as pb

DEFAULT_HUNG_S = 3.0


@dataclass(frozen=True)
class Sight:
    """All by member id.

    lives: members that may be lost, whose processes are seen to live. runs: members whose processes are seen and are
    not stopped, and those that have just said something. stopped: members whose processes are stopped, with how often
    each was given a processor so far: one that was continued meanwhile has another number. stopped_at_s: when that was
    seen, of those for which it was not now. silent: members whose hosts acknowledge nothing of what was sent to them.
    """

    lives: Set[str] = frozenset()
    runs: Set[str] = frozenset()
    stopped: Mapping[str, int] = field(default_factory=dict)
    silent: Set[str] = frozenset()
    stopped_at_s: Mapping[str, float] = field(default_factory=dict)


def hung_limit_s(world: pb.World) -> float:
    """After how many seconds members of this world that are stopped or cut off are given up; 0: never. Jobs of fixed
    size can't go on without them, so they wait.
    """
    if not world.HasField("sizes"):
        return 0.0
    try:
        value = float(world.options.get("hung_seconds", DEFAULT_HUNG_S))
    except ValueError:
        return DEFAULT_HUNG_S
    return value if math.isfinite(value) and value >= 0 else DEFAULT_HUNG_S
