"""Where ranks' lines go: to sys.stdout and sys.stderr as the caller has them.

These are descriptors 1 and 2 for most programs, and then lines go there. A notebook, a test framework,
contextlib.redirect_stdout and others put objects of their own in their place, which may have no descriptor, or one
that leads elsewhere (a notebook's leads to the terminal of its server). They get text through their method `write`.
Some know by the thread which cell or which request a line belongs to, so a caller that waits makes the calls itself.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from horovod.worker.agent.output import Writer

# Stands for a descriptor when an object is called instead.
STDOUT_OBJECT: Final = -1
STDERR_OBJECT: Final = -2
_POLL_S: Final = 0.1


class PythonStreams:
    """sys.stdout and sys.stderr at the time when this is made. `writer` and `descriptors` are for a Console."""

    def __init__(self, *, served: bool = False, stdout: Any = None, stderr: Any = None) -> None:
        """served: objects are called in `serve`; otherwise in the thread of the writer. stdout, stderr: objects with a
        method `write`, in place of sys.stdout and sys.stderr.
        """
        stdout, stderr = sys.stdout if stdout is None else stdout, sys.stderr if stderr is None else stderr
        self._requests: queue.Queue[_Request] | None = queue.Queue() if served else None
        self._objects: dict[int, Any] = {STDOUT_OBJECT: stdout, STDERR_OBJECT: stderr}
        self.descriptors = (
            _descriptor(stdout, sys.__stdout__, STDOUT_OBJECT),
            _descriptor(stderr, sys.__stderr__, STDERR_OBJECT),
        )
        self.writer = Writer(write=self._write)

    def serve(self, thread: threading.Thread) -> None:
        """Calls the objects until `thread` has ended; what interrupts it can be followed by another call."""
        assert self._requests is not None
        while thread.is_alive():
            try:
                request = self._requests.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            request.answer()

    def _write(self, descriptor: int, data: memoryview) -> int:
        """As os.write. OSError too for an object that refuses."""
        if descriptor >= 0:
            return os.write(descriptor, data)
        request = _Request(self._objects[descriptor], bytes(data))
        if self._requests is None:
            request.answer()
        else:
            self._requests.put(request)
            request.done.wait()
        if request.error is not None:
            error = request.error
            raise error if isinstance(error, OSError) else OSError(errno.EIO, f"{type(error).__name__}: {error}")
        return len(data)


class _Request:
    """Lines to be written to one of the objects."""

    def __init__(self, stream: Any, data: bytes) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._stream = stream
        self._data = data

    def answer(self) -> None:
        try:
            if self._stream is not None:  # None if print() has no stream either
                text = self._data.decode(errors="backslashreplace")
                encoding = getattr(self._stream, "encoding", None)
                if isinstance(encoding, str):
                    text = text.encode(encoding, "backslashreplace").decode(encoding)
                self._stream.write(text)
                if hasattr(self._stream, "flush"):
                    self._stream.flush()
        except Exception as error:
            self.error = error
        finally:  # even if Ctrl-C comes in between
            self.done.set()


def _descriptor(stream: Any, first: Any, otherwise: int) -> int:
    """The descriptor of a stream that is the interpreter's own (`first`), or `otherwise` for any other stream."""
    if stream is None or stream is not first:
        return otherwise
    try:
        stream.flush()
        number: int = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return otherwise
    return number


def terminal_size(environ: Mapping[str, str]) -> dict[str, str]:
    """COLUMNS and LINES for the ranks, so that a progress bar fits a terminal that it cannot see."""
    if sys.stderr is None or not sys.stderr.isatty() or "COLUMNS" in environ:
        return {}
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(max(columns - len("[000]<stderr>:"), 20)), "LINES": str(lines)}
