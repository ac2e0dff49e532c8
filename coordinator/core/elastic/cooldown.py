"""For how long a host that a job has lost gets no process of that job."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cooldown:
    """Seconds, at least and at most."""

    least_s: float
    most_s: float

    def delay_s(self, times: int, chance: float) -> float:
        """Doubles with each time before this one that the host was lost. chance: from 0 to 1, so that hosts which were
        lost together do not come back together.
        """
        doubled = self.least_s * 2.0 ** min(times, 64)
        return min(self.most_s, max(self.least_s, doubled + chance * self.least_s))
