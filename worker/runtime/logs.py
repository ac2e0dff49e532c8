"""What Horovod says on stderr while a program runs: the logger "horovod" and, where it has none, a handler for it.

hvd.init() calls `begin`; importing changes nothing. A program that configures logging itself, before or after
hvd.init(), keeps its own ways: our handler then says nothing, so that no line appears twice. A line is

    2026-11-23 23:06:45.123 horovod rank 0 WARNING: the message

without the time where HOROVOD_LOG_HIDE_TIME asks for that, and with the process id where no rank is known: before the
world stands, and in a forked child, which has no rank. HOROVOD_LOG_FORMAT=json makes a JSON object of each line
(base/telemetry/logs.py), with job, epoch and rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from horovod.base.settings import Settings
from horovod.base.telemetry.logs import JsonFormatter
from horovod.base.words import for_people

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_NAMES = {level: name.upper() for name, level in LEVELS.items()}
_TIME = "%Y-%m-%d %H:%M:%S"

_logger = logging.getLogger("horovod")
# One hvd.init() at a time reads and writes these two; context.py holds its lock meanwhile.
_handler: Handler | None = None
_level_set: int | None = None  # the level that `begin` gave the logger; any other is the program's own


def begin(settings: Settings) -> None:
    """Makes the messages that `settings` ask for visible; called at every hvd.init()."""
    global _handler, _level_set
    if _logger.level in (logging.NOTSET, _level_set):
        _level_set = LEVELS[settings.log_level]
        _logger.setLevel(_level_set)
    if _handler is None:
        _handler = Handler()
        _logger.addHandler(_handler)
    _handler.hide_time = settings.log_hide_time
    _handler.json = settings.log_format == "json"
    know_rank(settings.rank)
    _handler.world = settings.job, None


def know_world(job: str, epoch: int | None) -> None:
    """From now on structured lines of this process name them."""
    if _handler is not None:
        _handler.world = job, epoch


def know_rank(rank: int | None) -> None:
    """From now on the lines of this process name its rank; None: its process id."""
    if _handler is not None:
        _handler.who = os.getpid(), rank


class Handler(logging.Handler):
    """Writes to what sys.stderr is at that time, as logging itself does where no handler is configured."""

    def __init__(self) -> None:
        super().__init__()
        self.hide_time = False
        self.json = False
        self.world: tuple[str | None, int | None] = None, None  # job and epoch; set and read by threads as `who` is
        # Process and rank in one value: assigned by the thread of hvd.init(), read by any that logs, and after a fork
        # by the child, whose own process id tells that the rank is not its own.
        self.who: tuple[int, int | None] = os.getpid(), None
        self._times = logging.Formatter(datefmt=_TIME)
        self._json = JsonFormatter(self._fields, _NAMES)

    def _fields(self) -> dict[str, str | int | None]:
        pid, rank = self.who
        (job, epoch), own = self.world, pid == os.getpid()
        return {"job": job, "epoch": epoch if own else None, "rank": rank if own else None}

    def format(self, record: logging.LogRecord) -> str:
        if self.json:
            return self._json.format(record)
        pid, rank = self.who
        who = f"rank {rank}" if rank is not None and pid == os.getpid() else f"pid {os.getpid()}"
        level = _NAMES.get(record.levelno, record.levelname)
        time = "" if self.hide_time else f"{self._times.formatTime(record, _TIME)}.{int(record.msecs):03} "
        text = f"{time}horovod {who} {level}: {record.getMessage()}"
        return for_people(f"{text}\n{self._times.formatException(record.exc_info)}" if record.exc_info else text)

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        # A program may have no standard streams; and one with a handler of its own gets the record there.
        if stream is None or _program_has_a_handler():
            return
        try:
            # One call, so that lines of processes that share a terminal do not mix.
            text = self.format(record) + "\n"
            # A closed stream, as at the end of the interpreter, is no reason for a traceback.
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()
        except Exception:
            self.handleError(record)


def _program_has_a_handler() -> bool:
    others = [handler for handler in _logger.handlers if handler is not _handler]
    return bool(others) or (_logger.propagate and bool(logging.getLogger().handlers))
