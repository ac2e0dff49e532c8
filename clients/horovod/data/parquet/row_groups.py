"""The row groups of a Parquet data set, found by their footers and read one by one, on any file system of fsspec."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.dataset as pads
from fsspec.implementations.arrow import HadoopFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from horovod.base.errors import DataCode, TrainingCode, coded
from horovod.data.prefetch import Prefetch
from horovod.data.services import answer_limit_seconds, reason_in_words

# Footers are small, and on object stores each takes the time of a request.
_FOOTERS_AT_ONCE = 16


class RowGroup(NamedTuple):
    """Row group `number` of the file `path`; its first row is row `first_row` of the file."""

    path: str
    number: int
    first_row: int
    rows: int
    size_bytes: int  # bytes of all columns, before compression
    fragment: Any  # pyarrow.dataset.ParquetFileFragment

    def __str__(self) -> str:
        return f"row group {self.number} of {self.path}"


class RowGroups:
    """All row groups of the Parquet files at `path`, in the order of the files' paths.

    Args:
        path: a file, a folder (with Hive's name=value folders below it, if any), or a list of files; paths or URLs that
            fsspec knows. Names that begin with `_` or `.` are left out of folders.
        columns: those to read; None: all of them.
        filesystem: an fsspec file system that `path` is on; None: the one that its URL names.
        storage_options: what that file system is made with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        columns: Sequence[str] | None,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        paths = [os.fspath(path)] if isinstance(path, (str, os.PathLike)) else [str(one) for one in path]
        if not paths:
            raise unreadable("An empty list of paths", "there is nothing to read")
        self.name = paths[0] if len(paths) == 1 else f"{len(paths)} paths beginning with {', '.join(paths[:1])}"
        self._filesystem, self._paths = _on_file_system(paths, filesystem, storage_options)
        self._wanted = columns
        self._open()

    def _open(self) -> None:
        # Forgets listings of folders: files may have come since this process looked last.
        self._filesystem.invalidate_cache()
        with threads([self._found], lambda _: self.name) as found:
            self._dataset, fragments = next(found)
        if not fragments:
            raise unreadable(self.name, "there is no Parquet file in it")
        self.columns = list(self._dataset.schema.names if self._wanted is None else self._wanted)
        if not self.columns:
            raise ValueError(coded(DataCode.MISSING_COLUMN, f"There is no column to read from {self.name}."))
        self._check_columns(self._dataset.schema.names, self.name)
        self.schema = pa.schema([self._dataset.schema.field(name) for name in self.columns])
        self._read_footers(fragments)
        self.groups: list[RowGroup] = [group for fragment in fragments for group in self._of_file(fragment)]
        self._pid = os.getpid()

    def _found(self) -> Iterator[tuple[Any, list[Any]]]:
        """The data set and its files."""
        source = self._paths[0] if len(self._paths) == 1 else self._paths
        try:
            dataset = pads.dataset(
                source, filesystem=_for_threads(self._filesystem), format="parquet", partitioning="hive"
            )
            yield dataset, sorted(dataset.get_fragments(), key=lambda fragment: str(fragment.path))
        except Exception as error:
            raise unreadable(self.name, error) from error

    def _read_footers(self, fragments: Sequence[Any]) -> None:
        now = [str(fragment.path) for fragment in fragments[:_FOOTERS_AT_ONCE]]

        def reads(number: int) -> Iterator[None]:
            for fragment in fragments[number::_FOOTERS_AT_ONCE]:
                now[number] = str(fragment.path)
                try:
                    fragment.ensure_complete_metadata()
                except Exception as error:
                    raise unreadable(fragment.path, error) from error
                yield

        with threads([partial(reads, number) for number in range(len(now))], now.__getitem__) as footers:
            for _ in footers:
                pass

    def open_in_this_process(self) -> None:
        """Makes connections of its own in a forked child: file systems over a network can't share those of the parent,
        and most refuse to. Called before the threads start that read.

        Raises:
            OSError: the file system can't be used after a fork, or the files are others now.
        """
        if self._pid == os.getpid() or isinstance(self._filesystem, LocalFileSystem):
            return
        if isinstance(self._filesystem, HadoopFileSystem):
            said = "this process was forked from one that reads HDFS, which Java does not survive: start it by spawn"
            raise unreadable(self.name, said)
        self._filesystem = type(self._filesystem)(*self._filesystem.storage_args, **self._filesystem.storage_options)
        self._open_again(self._rows())

    def _rows(self) -> list[int]:
        return [group.rows for group in self.groups]

    def _open_again(self, rows: list[int]) -> None:
        self._open()
        if self._rows() != rows:
            raise unreadable(self.name, "its files have changed since this reader was made")

    def __getstate__(self) -> tuple[list[int], dict[str, Any]]:
        """Without the footers, which Arrow would pickle once for each row group."""
        kept = ("name", "_filesystem", "_paths", "_wanted")
        return self._rows(), {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: tuple[list[int], dict[str, Any]]) -> None:
        rows, kept = state
        self.__dict__.update(kept)
        self._open_again(rows)

    def _of_file(self, fragment: Any) -> Iterator[RowGroup]:
        partition = pads.get_partition_keys(fragment.partition_expression)
        self._check_columns([*fragment.physical_schema.names, *partition], fragment.path)
        first_row = 0
        for part in fragment.split_by_row_group():
            (group,) = part.row_groups
            yield RowGroup(fragment.path, group.id, first_row, group.num_rows, group.total_byte_size, part)
            first_row += group.num_rows

    def _check_columns(self, there: Sequence[str], where: str) -> None:
        missing = [name for name in self.columns if name not in there]
        if missing:
            names = ", ".join(repr(name) for name in missing)
            raise ValueError(
                coded(DataCode.MISSING_COLUMN, f"{where} has no column {names}; it has {', '.join(there)}.")
            )

    def read(self, index: int, start: int, stop: int) -> pa.Table:
        """The rows from `start` to `stop` of row group `index`. Thread-safe; the GIL is free while Arrow decodes."""
        group = self.groups[index]
        try:
            # One thread: several row groups are decoded at once, by the threads of the reader.
            table = group.fragment.to_table(schema=self._dataset.schema, columns=self.columns, use_threads=False)
        except Exception as error:
            raise unreadable(str(group), error) from error
        if table.num_rows != group.rows:
            raise unreadable(str(group), f"it has {table.num_rows} rows, and its file said {group.rows}")
        return table.slice(start, stop - start)


def _on_file_system(
    paths: list[str], filesystem: Any, storage_options: Mapping[str, Any] | None
) -> tuple[Any, list[str]]:
    """The file system and the paths on it; a URL names its file system."""
    if filesystem is not None:
        if storage_options:
            said = (
                "storage_options configure a file system that a URL names. Here a file system object is given, "
                "which has its own options."
            )
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, said))
        return filesystem, [filesystem._strip_protocol(path) for path in paths]
    try:
        filesystem, first = fsspec.core.url_to_fs(paths[0], **(storage_options or {}))
    except ImportError as error:
        raise ImportError(coded(DataCode.MISSING_DATA_PACKAGE, f"{paths[0]} can't be read: {error}")) from error
    except Exception as error:  # FileNotFoundError as well, which may mean a file with credentials
        raise unreadable(paths[0], f"{type(error).__name__}: {error}") from error
    return filesystem, [first, *(filesystem._strip_protocol(path) for path in paths[1:])]


class _FilesInMemory(FSSpecHandler):  # type: ignore[misc]
    """fsspec gives all who open a file in memory the same object with one position, so threads would move it for each
    other. Here each of them gets a copy of the content.
    """

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self.fs.cat_file(path))


def _for_threads(filesystem: Any) -> Any:
    """The file system as Arrow is to use it in several threads."""
    return PyFileSystem(_FilesInMemory(filesystem)) if isinstance(filesystem, MemoryFileSystem) else filesystem


# -- threads that read, and can be given up on -------------------------------------------------------------------------
# A service that is silent ends in an error, and no wait is without end. Packages of fsspec have deadlines of their own,
# some of half an hour and some of none, and Arrow has none.

# Arrow reads over a network by calling Python from native code. Such a call should end before the interpreter does.
_EXIT_SECONDS: Final = 60.0

# How many items a thread may have ready, beside the one that it makes.
_AHEAD: Final = 1


@contextmanager
def threads(
    makers: Sequence[Callable[[], Iterable[Any]]],
    awaited: Callable[[int], str],
    size_bytes: Callable[[int], int] = lambda _: 0,
) -> Iterator[Iterator[Any]]:
    """The items that these make, each in a thread of its own: one of the first, one of the second, and so on. When the
    block ends, so do the threads.

    awaited, size_bytes: what the maker of this number reads now, and how many bytes that has at most.

    Raises:
        OSError: an item took longer than it may. Other errors of a maker are raised as they are.
    """

    def thread(number: int) -> Prefetch:
        def limit() -> float:
            return answer_limit_seconds(size_bytes(number))

        return Prefetch(makers[number], _AHEAD, _EXIT_SECONDS, awaited=lambda: awaited(number), limit=limit)

    running = [thread(number) for number in range(len(makers))]
    try:
        yield _in_turn(running, awaited)
    finally:
        for one in running:
            one.stop()  # all of them, before one is waited for
        # Where one is late, the others wait for the same service, and nothing is gained by waiting for them.
        for one in running if not any(one.is_late for one in running) else ():
            one.close()


def _in_turn(running: Sequence[Prefetch], awaited: Callable[[int], str]) -> Iterator[Any]:
    """Ends with the thread that ends first: it is the one whose turn comes after the last item."""
    for one in running:
        iter(one)
    for number, one in itertools.cycle(enumerate(running)):
        try:
            item = next(one)
        except StopIteration:
            return
        except TimeoutError as error:
            if not one.is_late:
                raise
            why = f"{error}: see whether its service can be reached from this host, or write smaller row groups"
            raise unreadable(awaited(number), why) from error
        yield item


def unreadable(what: str, why: object) -> OSError:
    """`why` may be an exception of any kind: each file system raises those of its own library."""
    if isinstance(why, FileNotFoundError):
        why = "it is not there"
    reason = reason_in_words(why) or type(why).__name__
    return OSError(coded(DataCode.UNREADABLE_DATA, f"{what} can't be read: {reason}."))
