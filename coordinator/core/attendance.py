"""Which hosts of a job's world are seen to live: what serves the world knows it, and what schedules the job asks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attendance:
    """The hosts of a job's running world; each is in one of the sets at most."""

    connected: frozenset[str] = frozenset()  # one of its ranks has a stream to the coordinator
    away: frozenset[str] = frozenset()  # its ranks are in the world, but none has a stream
    lost: frozenset[str] = frozenset()  # its ranks are not in the world any more, and one or more were lost
