"""Publishes the files of a data set: readers find all of them at its path, or an error, and no file of an earlier one.

Whoever writes the files puts them into a folder of its own below the path, whose name readers leave out (staging_name).
When all of them are written, publish() moves those that count. As object stores have no rename, it copies there.

Between its first and its last step there is a file at the path which begins and ends like a Parquet file, and is none:
so every reader, of Arrow, Spark or ours, refuses the data set if the writer dies then.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from horovod.data import services
from horovod.spark.common.store.files import call, write_file

_STAGING: Final = "_staging-"
UNFINISHED: Final = "unfinished-data-set.parquet"
_SAYS: Final = b"PAR1 This data set was not written to its end. Write it again. PAR1"
_AT_ONCE: Final = 16  # requests


def staging_name() -> str:
    """A new name for a folder that readers leave out."""
    return f"{_STAGING}{uuid.uuid4().hex}"


def publish(filesystem: Any, folder: str, staging: str, files: Mapping[str, int]) -> None:
    """Makes these files of the folder `staging`, below `folder`, the data set at `folder`. All else goes, except for
    what is in `staging`, which discard() removes.

    files: names, and how many bytes each has.

    Raises:
        OSError: a file is not in `staging`, and nothing has changed; or something else writes to the folder.
    """
    present = _sizes(filesystem, folder)
    for name, size in files.items():
        if present.get(f"{staging}/{name}") != size:
            raise OSError(f"{staging}/{name} was written and is not to be found here: not all hosts reach one storage")
    write_file(filesystem, f"{folder}/{UNFINISHED}", _SAYS)
    earlier = [name for name in present if name != UNFINISHED and not name.startswith(f"{staging}/")]
    _remove(filesystem, folder, earlier)
    _each(filesystem, lambda name: _move(filesystem, f"{folder}/{staging}/{name}", f"{folder}/{name}"), files)
    _check(filesystem, folder, {**files, UNFINISHED: len(_SAYS)})
    _remove(filesystem, folder, [UNFINISHED])


def discard(filesystem: Any, folder: str) -> None:
    """Removes a folder with all that is in it."""
    filesystem.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        call(filesystem, "rm", folder, recursive=True)


def _sizes(filesystem: Any, folder: str) -> dict[str, int]:
    """The bytes of all files below `folder`, by their names there."""
    filesystem.invalidate_cache()
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        found = call(filesystem, "find", folder, detail=True)
    start = f"{folder}/"
    names = [name for name in found if name.startswith(start) and not name.endswith("/")]  # those are no files
    return {name.removeprefix(start): found[name]["size"] for name in names}


def _check(filesystem: Any, folder: str, expected: Mapping[str, int]) -> None:
    """OSError unless these files, and no others, are at `folder`. Azure may answer before a copy is complete."""
    deadline = time.monotonic() + services.ANSWER_SECONDS
    while (found := _visible(filesystem, folder)) != expected:
        others, missing = found.keys() - expected, expected.keys() - found
        if others:
            raise OSError(f"something else writes there at the same time: {min(others)}")
        if time.monotonic() > deadline:
            incomplete = min(missing) if missing else min(name for name in expected if expected[name] != found[name])
            raise OSError(f"{incomplete} is not there, though the service has taken it")
        time.sleep(1)


def _visible(filesystem: Any, folder: str) -> dict[str, int]:
    """The sizes of the files that readers of the folder do not leave out."""
    found = _sizes(filesystem, folder).items()
    return {name: size for name, size in found if not any(part.startswith(("_", ".")) for part in name.split("/"))}


def _move(filesystem: Any, source: str, target: str) -> None:
    if getattr(filesystem, "async_impl", False):
        call(filesystem, "cp_file", source, target)
    else:
        filesystem.mv(source, target)


def _remove(filesystem: Any, folder: str, names: Iterable[str]) -> None:
    def remove(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            call(filesystem, "rm_file", f"{folder}/{name}")

    _each(filesystem, remove, names)


def _each(filesystem: Any, do: Callable[[str], None], names: Iterable[str]) -> None:
    """do(name) for each name, several at a time where the package of the service allows it."""
    pool = ThreadPoolExecutor(_AT_ONCE if getattr(filesystem, "async_impl", False) else 1)
    try:
        for _ in pool.map(do, names):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
