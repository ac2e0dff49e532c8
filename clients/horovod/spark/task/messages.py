"""The messages of a task and its driver, over one stream of the driver's coordinator.

    task                                       driver
    Came: which task it is, and where      ->
                                           <-  Start: run your process with these variables
    output, output, ...                    ->
                                           <-  Ordered: an order for its process, in the form that agents obey
    Ended: how the process ended           ->
    (the last output, the end of the stream)
                                           <-  Release: nothing is left to do, or Refused: this task comes in vain

Both ends are one version of this program, so the messages are simple: JSON, or bytes of output behind one letter.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

METHOD: Final = "/horovod.spark.Tasks/Attend"
STDOUT, STDERR = b"1", b"2"


@dataclass(frozen=True)
class Came:
    """One attempt of a task. host: its name. together: equal for tasks that are local to each other."""

    partition: int
    attempt: int
    host: str
    together: str
    gpus: list[str]


@dataclass(frozen=True)
class Start:
    """environ: added to the task's variables. unset: removed from them. python: the interpreter; "": the task's.

    fails_task: the task fails with its process, so that Spark runs it again.
    """

    environ: dict[str, str] = field(repr=False)
    unset: list[str]
    python: str
    fails_task: bool


@dataclass(frozen=True)
class Ended:
    """The process has ended. stopped: after the task had sent it a signal."""

    pid: int
    code: int | None
    stopped: bool
    sentence: str = ""  # why no process was started


@dataclass(frozen=True)
class Ordered:
    """The process is to obey an order of worker/agent/orders.py."""

    order: dict[str, Any]


@dataclass(frozen=True)
class Release:
    """The task may end."""


@dataclass(frozen=True)
class Refused:
    """The task is not needed, and fails with this sentence."""

    sentence: str


Message: TypeAlias = Came | Start | Ended | Ordered | Release | Refused
_KINDS = {kind.__name__: kind for kind in (Came, Start, Ended, Ordered, Release, Refused)}


def written(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def read(content: bytes) -> Message:
    """The message in these bytes. ValueError if there is none."""
    kind, fields = json.loads(content)
    try:
        found: Any = _KINDS[kind](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of a task: {content[:200]!r}") from error
    message: Message = found
    return message


def is_output(content: bytes) -> bool:
    return content[:1] in (STDOUT, STDERR)
