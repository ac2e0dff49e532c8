"""A deadline with its sentence, for scripts of earlier releases. Only they use it, so it lives here."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818  (the API's name)
    """The time is up."""


class Timeout:
    """Counts from now on. `message` has the field {activity}, and may have {timeout}, in seconds."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout_s = timeout
        self._end_s = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left; 0 when the time is up."""
        return max(0.0, self._end_s - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end_s

    def check_time_out_for(self, activity: str) -> None:
        """TimeoutException when the time is up."""
        if self.timed_out():
            raise TimeoutException(self._message.format(activity=activity, timeout=self._timeout_s))
