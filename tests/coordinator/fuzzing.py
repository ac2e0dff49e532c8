"""What the fuzzers of a coordinator's services share: how often, how a stream may end, and what may not be logged."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import tiers
from coordinator_client import Stream
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, settings

FUZZ = settings(
    deadline=None,
    max_examples=tiers.pick(20, 200),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


# What an agent that was let in may say of its own host, for the log.
_OF_HOSTS = re.compile(r"Host \S+ (is set aside|can start jobs again)")


class Listener(logging.Handler):
    """Keeps what must not be logged: warnings and errors, and exceptions that a servicer had to catch."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        damaged = isinstance(error, DecodeError) and record.levelno == logging.DEBUG
        is_word = error is None and _OF_HOSTS.match(record.getMessage()) is not None
        if (error is not None or record.levelno >= logging.WARNING) and not damaged and not is_word:
            self.found.append(logging.Formatter().format(record))

    def check(self) -> None:
        """Nothing was logged since the last check that must not be."""
        found, self.found = self.found, []
        assert not found, "\n".join(found)


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    logger = logging.getLogger()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        yield listener
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def finish(stream: Stream[Any, Any]) -> None:
    """The stream ends in order, or with a status in words that no exception of the server's code made."""
    stream.half_close()
    code, sentence = stream.failure()
    assert code is not grpc.StatusCode.UNKNOWN, sentence
    assert code is not grpc.StatusCode.DEADLINE_EXCEEDED, "the coordinator does not end the stream"
    assert code is grpc.StatusCode.OK or sentence
