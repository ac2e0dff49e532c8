"""What each rank of `horovod.run` runs, and how the function gets there and the result back.

Both travel in files that have no name (memfd_create(2)): the caller makes them, the ranks inherit their descriptors,
and the kernel frees them with the last process that holds one. So nothing is left behind, however a process ends, and
no other user can open them. One file holds the function, and one for each rank its result: complete or not at all.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import cloudpickle

from horovod.worker.settings import ROWS

_LENGTH = struct.Struct("<Q")  # of what follows; 0 until all of it is there

# The program of a rank. Nothing is imported from the current directory before the function runs: a json.py there is
# the function's business. (Python has -P for that, but only since 3.11.)
PROGRAM = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
    "from horovod.runner.task import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True)
class Result:
    """What one rank left. `error` is "Type: message", None after success; `value` is pickled."""

    value: bytes
    error: str | None = None
    traceback: str = ""
    at_s: float = 0.0  # time.monotonic() of the error: one clock for the whole host


class Exchange:
    """The caller's end. Close it when the ranks have ended."""

    def __init__(self, count: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """OSError when so many files can't be open. The import path may be needed to read the function."""
        self._function = -1
        self._results: list[int] = []
        try:
            self._function = os.memfd_create("horovod-run")
            write(self._function, pickle.dumps(sys.path) + cloudpickle.dumps((function, args, kwargs)))
            for _ in range(count):
                self._results.append(os.memfd_create("horovod-run"))
        except BaseException:
            self.close()
            raise

    def descriptors(self, rank: int) -> tuple[int, int]:
        """What the rank is to inherit."""
        return self._function, self._results[rank]

    def command(self, python: str) -> list[str]:
        """The same for all ranks."""
        return [python, "-c", PROGRAM, str(self._function), ",".join(map(str, self._results))]

    def result(self, rank: int) -> Result | None:
        """What the rank left, if it came to that."""
        content = read(self._results[rank])
        return Result(*pickle.loads(content)) if content else None  # noqa: S301  (only our own ranks can write it)

    def close(self) -> None:
        for descriptor in (self._function, *self._results):
            if descriptor >= 0:
                os.close(descriptor)
        self._function, self._results = -1, []

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(descriptor: int, content: bytes) -> None:
    """The length comes last: a reader sees all of the content or nothing."""
    view, at = memoryview(content), _LENGTH.size
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    os.pwrite(descriptor, _LENGTH.pack(len(content)), 0)


def read(descriptor: int) -> bytes:
    """Empty when nothing is there. All processes share the position in the file, so it is neither used nor moved."""
    head = os.pread(descriptor, _LENGTH.size, 0)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    return b"".join(_pieces(descriptor, length))


def _pieces(descriptor: int, length: int) -> Iterator[bytes]:
    at = _LENGTH.size
    while length:
        piece = os.pread(descriptor, min(length, 1 << 30), at)
        if not piece:
            raise EOFError("The file of horovod.run is shorter than it says.")
        yield piece
        length, at = length - len(piece), at + len(piece)


def main(arguments: list[str]) -> int:
    """Runs the function; the exit code."""
    function_file, results = int(arguments[0]), arguments[1].split(",")
    result_file = int(results[int(os.environ[ROWS["rank"].env])])
    for descriptor in (function_file, result_file):
        os.set_inheritable(descriptor, False)  # what the function starts is not to hold them
    try:
        content = read(function_file)
        os.close(function_file)
        stream = io.BytesIO(content)
        own = pickle.load(stream)  # noqa: S301
        if not getattr(sys.flags, "safe_path", False):  # from here on the current directory comes first, as ever
            sys.path.insert(0, os.getcwd())
        sys.path.extend(entry for entry in own if entry not in sys.path)
        function, args, kwargs = pickle.load(stream)  # noqa: S301
        result = Result(cloudpickle.dumps(function(*args, **kwargs)))
    except Exception as error:
        at_s = time.monotonic()
        # A peer that noticed may end first and have this rank stopped, which must not cut its account short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        result = Result(b"", f"{type(error).__name__}: {error}", traceback.format_exc(), at_s)
    write(result_file, pickle.dumps(astuple(result)))  # a tuple: the class is another one to each side
    return 0 if result.error is None else 1
