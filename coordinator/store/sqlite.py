"""A store in a file, for one coordinator on one host: it outlives its coordinator, so a restart ends no job.

A thread of its own owns the connection and does one thing after the other, so that the event loop waits for no disk.
The time to live of a lease is kept in memory, where it begins anew with the coordinator: while that is down, nobody
could have kept a lease alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from horovod.base.errors import ClusterCode, ErrorCode, coded
from horovod.base.protocol import STORE_FORMAT, __version__

from .base import MISSING, Change, Entry, FencedError, Guard, StoreError, UncertainError, WritesRefusedError, check_size
from .history import History, Leases

# The file of a store in SQLite, for the thread that owns the connection: transactions, and errors as sentences.
#
# Each write is on the disk before it is answered (WAL, synchronous=FULL), so what was answered is there after `kill
# -9` and after a loss of power. The file is locked for as long as its coordinator lives (locking_mode=EXCLUSIVE): a
# second one, or a person with SQLite's shell, can't change it meanwhile. What is deleted is overwritten
# (secure_delete, and a write-ahead log that is cut at each checkpoint), since there may have been secrets in it.

_APPLICATION_ID = 0x68766473  # "hvds"
_PAGE_BYTES = 4096
_SPACE_BYTES = 64 << 10  # bytes that are written to find out whether there is space again
NOT_WRITABLE = "it or its directory can't be written to: see to their permissions, and whether the disk is read-only"
_SCHEMA = (
    "CREATE TABLE counter (revision INTEGER NOT NULL)",
    "INSERT INTO counter VALUES (0)",
    "CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL NOT NULL)",
    "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER)",
    "CREATE INDEX entries_by_lease ON entries (lease) WHERE lease IS NOT NULL",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {STORE_FORMAT}",
)


class SqliteFile:
    """Used by one thread only, that which made it."""

    def __init__(self, path: Path, most_bytes: int, least_revision: int = 0) -> None:
        """most_bytes: to which the file may grow. least_revision: of a file that exists.

        Raises OSError with a sentence.
        """
        self._path = path
        self._most_bytes = most_bytes
        self._least_revision = least_revision
        self._is_full = False  # the last write that would have made the file longer was refused
        _prepare(path)
        try:
            self._db = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        except sqlite3.Error as error:
            raise _unusable(path, str(error)) from error
        try:
            self._open()
        except sqlite3.Error as error:
            self._db.close()
            raise _why_not_opened(path, error) from error
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # every write that was answered is on the disk already
            self._db.close()

    # -- reading -----------------------------------------------------------------------------------------------------

    def revision(self) -> int:
        with self._reading():
            return int(self._db.execute("SELECT revision FROM counter").fetchone()[0])

    def leases(self) -> dict[int, float]:
        """lease -> its time to live in seconds."""
        with self._reading():
            return dict(self._db.execute("SELECT id, ttl_s FROM leases").fetchall())

    def get(self, key: str) -> Entry | None:
        with self._reading():
            found = self._db.execute("SELECT value, revision FROM entries WHERE key = ?", (key,)).fetchone()
        return Entry(key, *found) if found else None

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        entries = []
        with self._reading():
            rows = self._db.execute("SELECT key, value, revision FROM entries WHERE key >= ? ORDER BY key", (prefix,))
            for row in rows:
                if not row[0].startswith(prefix):
                    break
                entries.append(Entry(*row))
            rows.close()
        return entries, self.revision()

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, lease: int | None, latest: int | None, guard: Guard | None) -> Entry | None:
        """latest: the revision that the entry must have; None: any."""
        with self._writing():
            self._check_guard(guard)
            if latest is not None and self._revision_of(key) != latest:
                if self._is_full:
                    self._try_space()
                    self._is_full = False
                return None
            revision = self._next_revision()
            self._db.execute("REPLACE INTO entries VALUES (?, ?, ?, ?)", (key, value, revision, lease))
        self._is_full = False
        return Entry(key, value, revision)

    def delete(self, key: str, latest: int | None, guard: Guard | None) -> Change | None:
        with self._writing():
            self._check_guard(guard)
            current = self._revision_of(key)
            if current == MISSING or (latest is not None and current != latest):
                return None
            return self._delete(key)

    def grant(self, ttl_s: float) -> int:
        with self._writing():
            return int(self._db.execute("INSERT INTO leases (ttl_s) VALUES (?)", (ttl_s,)).lastrowid or 0)

    def end_lease(self, lease: int) -> Sequence[Change]:
        with self._writing():
            rows = self._db.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
            changes = [self._delete(key) for (key,) in rows]
            self._db.execute("DELETE FROM leases WHERE id = ?", (lease,))
        return changes

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        run = self._db.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA trusted_schema = OFF")
        application, version = run("PRAGMA application_id").fetchone()[0], run("PRAGMA user_version").fetchone()[0]
        if is_new := application == 0 and not run("SELECT 1 FROM sqlite_master").fetchone():
            run(f"PRAGMA page_size = {_PAGE_BYTES}")
        elif application != _APPLICATION_ID:
            why = "it is a database of another program; give the store a file of its own"
            raise _unusable(self._path, why, code=ClusterCode.STORE_FOREIGN)
        elif version != STORE_FORMAT:
            why = (
                f"another release of Horovod has written it (format {version}, but Horovod {__version__} has format "
                f"{STORE_FORMAT}). Go back to that release until its jobs have ended, then give the store a new file"
            )
            raise _unusable(self._path, why, code=ClusterCode.STORE_FORMAT)
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA secure_delete = ON")
        run("PRAGMA journal_size_limit = 0")
        run(f"PRAGMA max_page_count = {max(1, self._most_bytes // _PAGE_BYTES)}")
        if not is_new and (found := run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        run("BEGIN IMMEDIATE")
        # This also finds out whether the file may be written.
        if is_new:
            for statement in _SCHEMA:
                run(statement)
        else:
            run("UPDATE counter SET revision = max(revision, ?)", (self._least_revision,))
        run("COMMIT")

    def _revision_of(self, key: str) -> int:
        found = self._db.execute("SELECT revision FROM entries WHERE key = ?", (key,)).fetchone()
        return int(found[0]) if found else MISSING

    def _check_guard(self, guard: Guard | None) -> None:
        if guard is not None and self._revision_of(guard.key) != guard.revision:
            raise FencedError(f"{guard.key} is not as it was at revision {guard.revision} any more.")

    def _try_space(self) -> None:
        """Fails as a write would that needs space. A write that does not happen tells nothing, and is asked whether
        there is space again (pages.py).
        """
        self._db.execute("REPLACE INTO entries VALUES ('', zeroblob(?), 0, NULL)", (_SPACE_BYTES,))
        self._db.execute("DELETE FROM entries WHERE key = ''")

    def _next_revision(self) -> int:
        self._db.execute("UPDATE counter SET revision = revision + 1")
        return int(self._db.execute("SELECT revision FROM counter").fetchone()[0])

    def _delete(self, key: str) -> Change:
        self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
        return Change(key, None, self._next_revision())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"The store {self._path} can't be read: {error}.") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction: all of it happens or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
        except sqlite3.Error as error:
            self._roll_back()
            raise self._refused(error) from error
        except BaseException:
            self._roll_back()
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            if "I/O" in str(error):  # the data were written, but may not be on the disk
                raise UncertainError(
                    f"Whether a write to the store {self._path} was done is not known: {error}."
                ) from error
            raise self._refused(error) from error

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # SQLite ends it by itself for some errors
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _refused(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "full" in text:
            self._is_full = True
            return WritesRefusedError(
                f"The store {self._path} takes no writes: there is no space left for it on its disk, or it has the "
                f"{self._most_bytes:,} bytes that it may have. Give it space, and the coordinator goes on by itself."
            )
        if "readonly" in text or "I/O" in text:
            return WritesRefusedError(
                f"The store {self._path} takes no writes: {text}. See to its disk and to the permissions of the file "
                "and its directory."
            )
        return StoreError(f"The store {self._path} can't be written to: {text}.")


def _prepare(path: Path) -> None:
    """Makes the file, for this user's eyes only, where it is not there yet. Raises OSError with a sentence."""
    folder = path.parent
    try:
        status = os.stat(folder)
    except OSError as error:
        raise _unusable(path, f"its directory {folder} can't be used: {error.strerror}", error.errno) from None
    if not stat.S_ISDIR(status.st_mode):
        raise _unusable(path, f"{folder} is not a directory", errno.ENOTDIR)
    if status.st_uid not in (0, os.geteuid()):
        raise _unusable(path, f"its directory {folder} belongs to another user (uid {status.st_uid})", errno.EPERM)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise _unusable(path, f"other users may change its directory: `chmod go-w {folder}`", errno.EPERM)
    with contextlib.suppress(FileExistsError):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(path, flags, 0o600))
        except FileExistsError:
            raise
        except OSError as error:
            raise _unusable(path, f"it can't be made: {error.strerror}", error.errno) from None
    # It is not opened here: to close it would end this process's lock on it, if another store of it has one (POSIX).
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "it is no regular file", errno.EINVAL)
    if status.st_uid != os.geteuid():
        raise _unusable(path, f"it belongs to another user (uid {status.st_uid})", errno.EPERM)
    if not os.access(path, os.R_OK | os.W_OK) or not os.access(folder, os.W_OK | os.X_OK):  # it has a log beside it
        raise _unusable(path, NOT_WRITABLE, errno.EACCES)
    for one in (path, path.with_name(path.name + "-wal")):
        with contextlib.suppress(FileNotFoundError, OSError):
            if os.lstat(one).st_mode & 0o077:
                os.chmod(one, 0o600)


def _why_not_opened(path: Path, error: sqlite3.Error) -> OSError:
    text = str(error)
    if "locked" in text:
        return _unusable(
            path,
            "another process uses it. A store of this kind is for one coordinator; several need etcd (--store "
            "etcd://...)",
            errno.EBUSY,
            ClusterCode.STORE_IN_USE,
        )
    if "readonly" in text or "unable to open" in text:
        return _unusable(path, f"{NOT_WRITABLE} ({text})", errno.EROFS)
    if "full" in text:
        return _unusable(path, "there is no space left for it", errno.ENOSPC)
    if "I/O" in text:
        return _unusable(path, f"its disk fails ({text})", errno.EIO)
    return _unusable(
        path,
        f"it is damaged, or is no such store ({text}). Restore it from a backup, or move it and {path.name}-wal away "
        "to begin with an empty one; jobs that run are not known then, and their agents end them",
        code=ClusterCode.STORE_DAMAGED,
    )


def _unusable(
    path: Path, why: str, number: int | None = errno.EINVAL, code: ErrorCode = ClusterCode.STORE_UNUSABLE
) -> OSError:
    sentence = f"The store {path} can't be used: {why}."
    return OSError(number or errno.EINVAL, coded(code, sentence))


MOST_BYTES = 2 << 30  # the default limit of etcd; archives of code take a quarter of it
# Ranks believe no coordinator whose term, a revision, is below one that they have heard of. A copy of the file that is
# put back lacks the revisions that were given since. So a file that exists begins above all that so many writes in each
# second since 1970 could have made (docs/adr/0127-restored-stores.md). A term may have 40 bits
# (coordinator/core/agreement/decisions.py), which are 500 years.
WRITES_PER_S = 64
END_AGAIN_S = 1.0  # seconds between attempts to delete the entries of a lease that has ended

Answer = TypeVar("Answer")


class SqliteStore:
    """Belongs to one event loop, that of its first call."""

    is_shared = False

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES, now: Callable[[], float] = time.time) -> None:
        """Opens the file, or makes it. now: seconds since 1970. Raises OSError with a sentence."""
        self._thread = ThreadPoolExecutor(1, "horovod-store")
        least = int(now() * WRITES_PER_S)
        try:
            self._file, revision, self._restored = self._thread.submit(_opened, path, most_bytes, least).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._history = History(revision=revision)
        self._leases = Leases(self._lease_ended)
        self._ending: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        return await self._run(lambda file: (file.get(key), ()))

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        return await self._run(lambda file: (file.range(prefix), ()))

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        entry = await self._put(key, value, lease, None, guard)
        assert entry is not None  # a write without a condition always succeeds
        return entry

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        return await self._put(key, value, lease, revision, guard)

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        def work(file: SqliteFile) -> tuple[bool, Sequence[Change]]:
            change = file.delete(key, revision, guard)
            return change is not None, (change,) if change else ()

        return await self._run(work)

    async def grant(self, ttl_s: float) -> int:
        lease = await self._run(lambda file: (file.grant(ttl_s), ()))
        self._leases.begin(lease, ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> None:
        self._begin()
        self._leases.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        self._begin()
        if self._leases.end(lease):
            try:
                await self._end_lease(lease)
            except StoreError:
                self._lease_ended(lease)
                raise

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        self._begin()
        async for change in self._history.watch(prefix, revision):
            yield change

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._leases.close()
        for task in self._ending:
            task.cancel()
        self._history.close()
        closing = self._thread.submit(self._file.close)
        await asyncio.to_thread(self._thread.shutdown)
        closing.result()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise StoreError("The store is closed.")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for lease, ttl_s in self._restored.items():
                self._leases.begin(lease, ttl_s)

    async def _run(self, work: Callable[[SqliteFile], tuple[Answer, Sequence[Change]]]) -> Answer:
        """Does `work` in the thread. Watches get its changes, even if the caller no longer waits."""
        self._begin()
        loop = self._loop
        assert loop is not None

        def do() -> Answer:
            answer, changes = work(self._file)
            if changes:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._tell, changes)
            return answer

        return await loop.run_in_executor(self._thread, do)

    def _tell(self, changes: Sequence[Change]) -> None:
        if not self._closed:
            for change in changes:
                self._history.add(change)

    async def _put(
        self, key: str, value: bytes, lease: int | None, latest: int | None, guard: Guard | None
    ) -> Entry | None:
        check_size(key, value)
        self._begin()
        if lease is not None:
            self._leases.check(lease)  # the end of a lease comes after this in the thread

        def work(file: SqliteFile) -> tuple[Entry | None, Sequence[Change]]:
            entry = file.put(key, value, lease, latest, guard)
            return entry, (Change(key, value, entry.revision),) if entry else ()

        return await self._run(work)

    def _lease_ended(self, lease: int) -> None:
        task = asyncio.get_running_loop().create_task(self._end_lease(lease, for_ever=True))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_lease(self, lease: int, *, for_ever: bool = False) -> None:
        def work(file: SqliteFile) -> tuple[None, Sequence[Change]]:
            return None, file.end_lease(lease)

        while not self._closed:
            try:
                await self._run(work)
            except StoreError:
                if not for_ever:
                    raise
            else:
                return
            await asyncio.sleep(END_AGAIN_S)


def _opened(path: Path, most_bytes: int, least_revision: int) -> tuple[SqliteFile, int, dict[int, float]]:
    file = SqliteFile(path, most_bytes, least_revision)
    try:
        return file, file.revision(), file.leases()
    except StoreError as error:
        file.close()
        raise OSError(str(error)) from error
