"""The line of the user's script, for warnings that Horovod gives while a framework calls it."""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from types import FrameType
from typing import Final

from horovod.base.frames import frame_of
from horovod.base.frameworks import PACKAGES

NOT_THE_SCRIPT: Final = PACKAGES | {"contextlib", "horovod"}
_FRAMES: Final = 3
_NO_SCRIPTS: Final = NOT_THE_SCRIPT | {"copy", "pickle", "cloudpickle", "functools"}


def lines_of_the_script() -> str:
    """The lines of the script that run: `train.py:12`, and where that was called from."""
    lines: list[str] = []
    frame = inspect.currentframe()
    while frame is not None and len(lines) < _FRAMES:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NO_SCRIPTS:
            code = frame.f_code
            file = code.co_filename.replace("\\", "/").rpartition("/")[2]
            # TensorFlow writes what it compiles into files whose names differ from process to process.
            is_generated = file.startswith("__autograph_generated_file")
            lines.append(f"{code.co_name.removeprefix('tf__')}()" if is_generated else f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return sys.intern(", called from ".join(lines) or "an unknown line")


def level_of_the_script() -> int:
    """Of the line that called backward(), step() or fit(), for warnings.warn in the function that calls this one."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and not _is_of_the_script(frame):
        level, frame = level + 1, frame.f_back
    return level


def warn_the_script(message: str) -> None:
    """A warning that points to that line, also from a thread of a framework: then to the one of the main thread."""
    frame = inspect.currentframe()
    if threading.current_thread() is not threading.main_thread():
        frame = frame_of(threading.main_thread())
    while frame is not None and not _is_of_the_script(frame):
        frame = frame.f_back
    if frame is None:
        warnings.warn(message, stacklevel=2)
    else:
        told = frame.f_globals.setdefault("__warningregistry__", {})
        module = frame.f_globals.get("__name__")
        warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, told)


def _is_of_the_script(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] not in NOT_THE_SCRIPT
