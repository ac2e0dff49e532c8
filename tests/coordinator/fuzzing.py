"""What fuzzers of a coordinator's services share: how often, how a stream may end, what may not be logged, and how a
message is made large, field by field, so that a new field is attacked too."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import tiers
from coordinator_client import Stream
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, settings

FUZZ = settings(
    deadline=None,
    max_examples=tiers.pick(20, 200),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


DISTINCT_BYTES = 32  # of an entry that differs from others

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


def fields(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields that can be large: texts, bytes and repeated ones, of the message and of its parts."""
    for field in descriptor.fields:
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield (*path, field.name)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from fields(field.message_type, (*path, field.name))


def fill(message: Any, path: tuple[str, ...], size_bytes: int, distinct: bool) -> None:
    """Makes the field about so large. distinct: its entries differ, if they can."""
    name, *rest = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if rest:
        inner = getattr(message, name)
        fill(inner.add() if field.is_repeated else inner, tuple(rest), size_bytes, distinct)
        if not field.is_repeated:
            inner.SetInParent()
    elif not field.is_repeated:
        setattr(message, name, b"x" * size_bytes if field.type == FieldDescriptor.TYPE_BYTES else "x" * size_bytes)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, name).update({f"{number:x}": "" for number in range(size_bytes // 8)})
    elif field.message_type is not None:
        for number in range(size_bytes // (DISTINCT_BYTES if distinct else 2)):
            one = getattr(message, name).add()
            if distinct and "name" in one.DESCRIPTOR.fields_by_name:
                one.name = f"{number:x}"
            if (
                distinct
                and "process_set" in one.DESCRIPTOR.fields_by_name
                and "name" not in one.DESCRIPTOR.fields_by_name
            ):
                one.process_set = number
    elif field.type == FieldDescriptor.TYPE_STRING:
        getattr(message, name).extend("" for _ in range(size_bytes // 2))
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        getattr(message, name).extend(1.0 for _ in range(size_bytes // 8))
    else:
        getattr(message, name).extend(
            number if distinct else 1 for number in range(size_bytes // (3 if distinct else 1))
        )
