"""What each rank of `horovod.run` runs: `python -m horovod.runner.task FOLDER`.

FOLDER belongs to the caller and is closed to everybody else. It holds the function; the result or the exception of rank
N is left there as `result.N`, complete or not at all.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import cloudpickle

FUNCTION = "function"


@dataclass(frozen=True)
class Result:
    """What one rank left. `error` is "Type: message", None after success; `value` is pickled."""

    value: bytes
    error: str | None = None
    traceback: str = ""
    at_s: float = 0.0  # time.monotonic() of the error: one clock for the whole host


def result_path(folder: Path, rank: int) -> Path:
    """Where rank `rank` leaves its Result."""
    return folder / f"result.{rank}"


def write_function(folder: Path, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For the caller: the function, after the import path that reading it may need."""
    with open(os.open(folder / FUNCTION, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pickle.dump(sys.path, file)
        file.write(cloudpickle.dumps((function, args, kwargs)))


def read_result(path: Path) -> Result:
    """For the caller: what a rank left."""
    return Result(*pickle.loads(path.read_bytes()))  # noqa: S301  (our own folder)


def main(folder: Path, rank: int) -> int:
    """Runs the function; the exit code."""
    try:
        with open(folder / FUNCTION, "rb") as file:
            sys.path.extend(entry for entry in pickle.load(file) if entry not in sys.path)  # noqa: S301
            function, args, kwargs = pickle.load(file)  # noqa: S301
        result = Result(cloudpickle.dumps(function(*args, **kwargs)))
    except Exception as error:
        at_s = time.monotonic()
        # A peer that noticed may end first and have this rank stopped, which must not cut its account short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        result = Result(b"", f"{type(error).__name__}: {error}", traceback.format_exc(), at_s)
    unfinished = folder / f"unfinished.{rank}"
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump(astuple(result), file)  # the class of __main__ is not the one that is read back
    unfinished.rename(result_path(folder, rank))
    return 0 if result.error is None else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(os.environ["HOROVOD_RANK"])))
