"""`run` under Spark Connect, whose client has no SparkContext, and may be where no executor can reach it.

So the first task of a barrier stage has the driver's part: it opens the coordinator, tells the other tasks of it, and
attends its own partition beside. Results, and what ranks have printed, come back as rows when all is over.
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from horovod.base.errors import code_of
from horovod.base.settings import resolve
from horovod.launch.job_environment import checked_variables, of_driver
from horovod.spark.failures import of_spark
from horovod.spark.job import Request, run_request
from horovod.spark.task.attend import Order, attend

# For tasks to reach the first one. They have begun together; one that can't reach it says so after a minute, and until
# then the coordinator is there.
_ALL_COME_S = 120.0
_SCHEMA = "kind string, content binary"
_PIECE_BYTES = 1 << 20  # of a row: Spark copies rows, and sends a client batches of limited size
_STDOUT, _STDERR, _RESULTS, _ERROR = "stdout", "stderr", "results", "error"


def run_connected(request: Request, session: Any) -> list[Any]:
    """run_request under Spark Connect, in the caller's process; ValueError for settings. session: a SparkSession."""
    own = of_driver(os.environ)
    resolve(own | checked_variables({name: value for name, value in request.env.items() if value is not None}))
    start_timeout_s = max(request.start_timeout_s, _ALL_COME_S)
    shipped = replace(request, stdout=None, stderr=None, settings=own, start_timeout_s=start_timeout_s)
    function = functools.partial(_task, pickle.dumps(shipped))
    count = request.size
    tag = f"horovod-{secrets.token_hex(8)}"
    session.addTag(tag)
    try:
        rows = session.range(0, count, 1, count).mapInArrow(function, _SCHEMA, barrier=True).collect()
    except KeyboardInterrupt:
        session.interruptTag(tag)
        raise
    except Exception as error:
        raise RuntimeError(of_spark(str(error))) from error
    finally:
        session.removeTag(tag)
    pieces: dict[str, list[bytes]] = {}
    for row in rows:
        pieces.setdefault(row.kind, []).append(bytes(row.content))
    found = {kind: b"".join(its) for kind, its in pieces.items()}
    for stream, kind in ((request.stdout or sys.stdout, _STDOUT), (request.stderr or sys.stderr, _STDERR)):
        if text := found.get(kind, b"").decode(errors="backslashreplace"):
            stream.write(text)
    if _ERROR in found:
        raise RuntimeError(found[_ERROR].decode())
    results: list[Any] = pickle.loads(found[_RESULTS])  # noqa: S301
    return results


def _task(request: bytes, batches: Iterator[Any]) -> Iterator[Any]:
    """One task. The first one yields the rows."""
    import pyarrow
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    found = _first_task(request, context) if context.partitionId() == 0 else _other_task(context)
    for kind, content in found.items():
        for at in range(0, len(content), _PIECE_BYTES):
            columns = [pyarrow.array([kind], pyarrow.string())]
            columns.append(pyarrow.array([content[at : at + _PIECE_BYTES]], pyarrow.binary()))
            yield pyarrow.RecordBatch.from_arrays(columns, names=["kind", "content"])


class _Inside:
    """The tasks of the stage in which this process is the first one: they run already, and wait to be told."""

    environ: Mapping[str, str] = {}

    def __init__(self, context: Any) -> None:
        self._context = context
        addresses = [info.address for info in context.getTaskInfos()]
        # Tasks of one executor are on one host, whatever its address is.
        self.reached_at = None if len(set(addresses)) == 1 else addresses[0].rpartition(":")[0].strip("[]")
        self._has_told = False

    def slots(self) -> None:
        """The tasks are there."""

    def run(self, order: Order, count: int, together: bool) -> bool:
        self.tell(base64.b64encode(pickle.dumps(order)).decode())
        attend(order, 0)
        return False  # of the other tasks the driver's part knows by their streams alone

    def tell(self, text: str) -> None:
        """Once; "": there is nothing to do."""
        if not self._has_told:
            self._has_told = True
            self._context.allGather(text)

    def cancel(self, reason: str) -> None:
        """The tasks end because their driver's part tells them to."""


class _Lines:
    def __init__(self) -> None:
        self.text: list[str] = []

    def write(self, text: str) -> None:
        self.text.append(text)

    def content(self) -> bytes:
        return "".join(self.text).encode()


def _first_task(content: bytes, context: Any) -> dict[str, bytes]:
    out, err = _Lines(), _Lines()
    inside = _Inside(context)
    request: Request = replace(pickle.loads(content), stdout=out, stderr=err)  # noqa: S301
    try:
        found = {_RESULTS: cloudpickle.dumps(run_request(request, inside))}
    except Exception as error:
        text = str(error)
        found = {_ERROR: (text if code_of(text) else f"{type(error).__name__}: {text}").encode()}
    finally:
        inside.tell("")
    return {**found, _STDOUT: out.content(), _STDERR: err.content()}


def _other_task(context: Any) -> dict[str, bytes]:
    if told := context.allGather("")[0]:
        attend(pickle.loads(base64.b64decode(told)), context.partitionId())  # noqa: S301
    return {}
