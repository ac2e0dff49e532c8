"""Which hosts of a job's world are seen to live: what serves the world knows it, and what schedules the job asks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attendance:
    """The hosts of a job's running world; each is in one of the sets at most."""

    connected: frozenset[str] = frozenset()  # hosts of which a rank has a stream to the coordinator
    away: frozenset[str] = frozenset()  # hosts whose ranks are in the world, none of them with a stream
    lost: frozenset[str] = frozenset()  # hosts whose ranks are not in the world any more, one or more of them lost
