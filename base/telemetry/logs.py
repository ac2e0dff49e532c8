"""Log records as one JSON object a line, for programs that collect them.

    {"time": "2026-11-24T13:42:13.125Z", "level": "warning", "logger": "horovod.coordinator.services.hub",
     "message": "...", "job": "digits", "epoch": 3, "rank": 1, "pid": 4242}

job, epoch and rank are there where they are known: a record carries them (`extra=about("digits", 3, 1)`), or the
process knows them (`fields` of the formatter). An error has its traceback in "error".
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from horovod.base.words import for_people

_FIELDS = ("job", "epoch", "rank")


def about(job: str, epoch: int | None = None, rank: int | None = None) -> dict[str, Any]:
    """For `extra=` of a logging call."""
    values = {"job": job, "epoch": epoch, "rank": rank}
    return {f"horovod_{name}": value for name, value in values.items() if value is not None}


def line_of(level: str, logger: str, message: str, at_s: float | None = None, **fields: Any) -> str:
    """One line, without its end. Fields that are None are left out."""
    at_s = time.time() if at_s is None else at_s
    whole_s = int(at_s)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole_s))
    line = {
        "time": f"{stamp}.{int((at_s - whole_s) * 1000):03}Z",
        "level": level,
        "logger": logger,
        "message": message,
        **{name: value for name, value in fields.items() if value is not None},
    }
    return json.dumps(line, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """Of lines for people, in which nothing stands that a terminal acts on. (JSON has escapes of its own.)"""

    def format(self, record: logging.LogRecord) -> str:
        return for_people(super().format(record))


class JsonFormatter(logging.Formatter):
    """fields: what the process knows of itself, asked for each record; what a record carries beats it."""

    def __init__(self, fields: Callable[[], Mapping[str, Any]] = dict, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self._fields = fields
        self._names = names or {}

    def format(self, record: logging.LogRecord) -> str:
        carried = {name: getattr(record, f"horovod_{name}", None) for name in _FIELDS}
        fields = {**self._fields(), **{name: value for name, value in carried.items() if value is not None}}
        level = self._names.get(record.levelno, record.levelname).lower()
        error = self.formatException(record.exc_info) if record.exc_info else None
        return line_of(level, record.name, record.getMessage(), record.created, **fields, pid=os.getpid(), error=error)
