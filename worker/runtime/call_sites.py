"""HOROVOD_CHECK_CALL_SITES: whether all ranks call an unnamed operation from the same line of their script.

Unnamed operations match by their order. One that only some ranks call pairs up with a later one of the others, and if
that has the same type and shape, nothing looks wrong but the values. With the setting, ranks tell each other before
each unnamed operation which line of the script calls it, and a difference is an error on all of them (ADR 96).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from horovod._core import DType, OpSpec, OpType
from horovod.base.errors import OperationCode, coded
from horovod.base.frames import frame_of
from horovod.base.frameworks import PACKAGES
from horovod.base.words import ranks_in_words, shortened

if TYPE_CHECKING:
    from horovod._core import Engine

_UNNAMED: Final = ".noname"  # the engine knows unnamed operations by this ending
OWN_NAME: Final = "allgather.call_sites.noname"  # name of the gather of lines
_RECORD_BYTES: Final = 256  # bytes for each rank: its number and its line
_MAX_PARTS: Final = 8  # different lines that a message names
# Modules that stand between a script and an operation. A frame in one of them is not the caller.
_LIBRARIES: Final = PACKAGES | {"horovod"}


class CheckedEngine:
    """An engine whose run() and submit() compare the call sites of unnamed operations first."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        # (process set, kind of operation) -> the line that started the last one.
        self.last_lines: dict[tuple[int, str], str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, spec: OpSpec, name: str, *arguments: Any, **options: Any) -> Any:
        self._check(spec, name)
        return self._engine.run(spec, name, *arguments, **options)

    def submit(self, spec: OpSpec, name: str, *arguments: Any, **options: Any) -> Any:
        self._check(spec, name)
        return self._engine.submit(spec, name, *arguments, **options)

    def _check(self, spec: OpSpec, name: str) -> None:
        """ValueError, on all ranks of the process set, if they call from different lines."""
        if not name.endswith(_UNNAMED):
            return
        kind = name.removesuffix(_UNNAMED)
        line = self.last_lines[spec.process_set, name] = call_site(sys._getframe(2))
        said = f"{self._rank}\n{kind} at {line}".encode()[:_RECORD_BYTES]
        record = bytearray(said.ljust(_RECORD_BYTES, b"\0"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(record))
        gather = OpSpec(int(OpType.ALLGATHER), process_set=spec.process_set)
        outputs: Any = self._engine.run(gather, OWN_NAME, ((address, 0, DType.UINT8, (1, _RECORD_BYTES)),), record)
        everything = bytes(memoryview(outputs[0]))
        ranks_at: dict[str, list[int]] = {}
        for start in range(0, len(everything), _RECORD_BYTES):
            text = everything[start : start + _RECORD_BYTES].rstrip(b"\0").decode(errors="replace")
            rank, _, site = text.partition("\n")
            ranks_at.setdefault(site, []).append(int(rank))
        if len(ranks_at) > 1:
            parts = [f"{ranks_in_words(ranks)} from {site}" for site, ranks in ranks_at.items()]
            raise ValueError(
                coded(
                    OperationCode.CALL_SITES_DIFFER,
                    "The ranks call operations without a name from different lines of their scripts, and these would "
                    f"be taken for one operation: {shortened(parts, _MAX_PARTS)}. Call each on all ranks, in the same "
                    "order, or give it a name.",
                )
            )


def call_site(frame: FrameType | None) -> str:
    """The line of the script that `frame` was called from: `train.py:12, in evaluate`."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return "a thread of a library"


def line_of_main_thread() -> str:
    """Where the main thread of the script stands now, for reports of a rank that does not get on; "" if not known."""
    frame = frame_of(threading.main_thread())
    return call_site(frame) if frame is not None else ""
