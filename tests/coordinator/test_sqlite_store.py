"""What only a file can do to a store: restarts, a second coordinator, damage, a disk that is full, other users.

What it has in common with other stores is in test_store_conformance.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from error_codes import ends_with
from event_words import LISTENING
from other_user import OTHER_USER, start_as_other_user
from test_store_conformance import WAIT_S, take

from horovod.base.errors import ClusterCode, SettingCode
from horovod.coordinator.__main__ import main as coordinator
from horovod.coordinator.pages import Readiness
from horovod.coordinator.store import (
    CompactedError,
    Guard,
    LeaseLostError,
    StoreError,
    WritesRefusedError,
    open_store,
)
from horovod.coordinator.store.sqlite import SqliteStore

Body = Callable[[SqliteStore], Awaitable[None]]


def with_store(path: Path, body: Body, now: float = 0.0, **options: int) -> None:
    async def main() -> None:
        store = SqliteStore(path, now=lambda: now, **options)
        try:
            await asyncio.wait_for(body(store), WAIT_S)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_entries_and_revisions_survive_a_restart(path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await store.put("a", b"1")
        await store.put("b", bytes(range(256)))
        await store.delete("a")

    async def second(store: SqliteStore) -> None:
        entries, revision = await store.range("")
        assert [(entry.key, entry.value, entry.revision) for entry in entries] == [("b", bytes(range(256)), 2)]
        assert revision == 3
        assert await store.put_if("b", b"", 1) is None
        with pytest.raises(CompactedError, match=r"revision 4 .* 2 "):
            await take(store.watch("", 2), 1)
        changes = store.watch("", revision + 1)
        written = await store.put_if("b", b"2", 2, guard=Guard("b", 2))
        assert written is not None
        assert written.revision == 4
        assert await take(changes, 1) == [("b", b"2")]

    with_store(path, first)
    with_store(path, second)


WRITES_FOR_EVER = """
import asyncio, sys
from pathlib import Path
from horovod.coordinator.store.sqlite import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    lease = await store.grant(1000.0)
    await store.put("leased", b"", lease)
    number = 0
    while True:
        number += 1
        await store.put("number", b"%d" % number)
        print(number, flush=True)

asyncio.run(main())
"""


def test_what_was_answered_is_there_after_a_kill(path: Path) -> None:
    """And a lease of the killed process begins anew: nobody could have kept it alive meanwhile."""
    writer = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    writer.kill()
    answered = [20, *(int(line) for line in writer.stdout.read().splitlines() if line)][-1]
    writer.wait()

    async def body(store: SqliteStore) -> None:
        entry = await store.get("number")
        assert entry is not None
        assert int(entry.value) in (answered, answered + 1)
        await store.keep_alive(1)
        assert await store.get("leased") is not None
        assert await store.grant(1.0) == 2  # a number is never given twice

    with_store(path, body)


def test_a_copy_that_is_put_back_begins_above_all_revisions_since(path: Path) -> None:
    async def write(store: SqliteStore) -> None:
        for number in range(5):
            found.append((await store.put(f"key-{number}", b"")).revision)

    found: list[int] = []
    with_store(path, write, now=1000.0)
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    with_store(path, write, now=1001.0)
    copy.rename(path)
    with_store(path, write, now=1002.0)
    with_store(path, write, now=1.0)  # a clock that goes wrong
    assert found == sorted(set(found))
    assert found[-1] < 2**40  # a term, of which the number of an error has 40 bits


def test_a_lease_that_nobody_keeps_after_a_restart_ends(path: Path) -> None:
    async def first(store: SqliteStore) -> None:
        await store.put("leased", b"1", await store.grant(0.05))
        await store.put("kept", b"1")

    async def second(store: SqliteStore) -> None:
        _, revision = await store.range("")
        assert await take(store.watch("leased", revision + 1), 1) == [("leased", None)]
        assert await store.get("kept") is not None
        with pytest.raises(LeaseLostError):
            await store.put("leased", b"1", 1)

    async def last(store: SqliteStore) -> None:
        with pytest.raises(LeaseLostError):
            await store.keep_alive(1)

    with_store(path, first)
    with_store(path, second)
    with_store(path, last)


# -- one coordinator ---------------------------------------------------------------------------------------------------


def test_a_second_coordinator_is_refused_and_the_first_goes_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def body(store: SqliteStore) -> None:
        await store.put("a", b"1")
        with pytest.raises(OSError, match=ends_with(ClusterCode.STORE_IN_USE, path)):
            await asyncio.to_thread(SqliteStore, path)
        command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--store", f"sqlite:{path}"]
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert re.search(ends_with(ClusterCode.STORE_IN_USE, path), second.stderr)
        shell = sqlite3.connect(path, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            shell.execute("DELETE FROM entries")
        shell.close()
        await store.put("a", b"2")

    with_store(path, body)


def test_the_event_loop_waits_for_no_disk(path: Path) -> None:
    async def body(store: SqliteStore) -> None:
        await store.put("a", b"1")
        lease = await store.grant(1000.0)
        go = threading.Event()
        store._thread.submit(go.wait)  # a disk that does not answer
        try:
            writing = asyncio.create_task(store.put("a", b"2"))
            reading = asyncio.create_task(store.get("a"))
            await store.keep_alive(lease)
            done, _ = await asyncio.wait([writing, reading], timeout=0.1)
            assert not done
        finally:
            go.set()
        assert (await reading) == await writing

    with_store(path, body)


def test_a_watch_hears_of_a_write_whose_caller_has_gone(path: Path) -> None:
    async def body(store: SqliteStore) -> None:
        _, revision = await store.range("")
        changes = store.watch("", revision + 1)
        go = threading.Event()
        store._thread.submit(go.wait)
        writing = asyncio.create_task(store.put("a", b"1"))
        await asyncio.sleep(0)
        next_one = asyncio.create_task(store.put("b", b"1"))
        await asyncio.sleep(0)
        store._thread.submit(lambda: None)
        go.set()
        writing.cancel()
        await next_one
        told = await take(changes, 1)
        assert told in ([("a", b"1")], [("b", b"1")])  # `a` was cancelled before it began, or done
        assert (await store.get("a") is not None) == (told[0][0] == "a")

    with_store(path, body)


# -- what may be wrong with the file -----------------------------------------------------------------------------------


def test_the_file_is_for_its_user_alone(path: Path) -> None:
    old = os.umask(0)
    try:

        async def body(store: SqliteStore) -> None:
            await store.put("a", b"secret")
            for file in path.parent.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

        with_store(path, body)
        path.chmod(0o644)
        with_store(path, body)
    finally:
        os.umask(old)


def test_what_is_deleted_is_on_the_disk_no_more(path: Path) -> None:
    async def body(store: SqliteStore) -> None:
        await store.put("a", b"the-secret-of-a-job" * 1000)
        await store.delete("a")

    with_store(path, body)
    assert b"the-secret-of-a-job" not in b"".join(file.read_bytes() for file in path.parent.iterdir())


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(40 * 4096))


def _execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "code", "number", "fact"),
    [
        (lambda path: path.write_bytes(b"no database at all" * 100), ClusterCode.STORE_DAMAGED, errno.EINVAL, ""),
        (_overwrite, ClusterCode.STORE_DAMAGED, errno.EINVAL, ""),
        (
            lambda path: _execute(path, "PRAGMA user_version = 99"),
            ClusterCode.STORE_FORMAT,
            errno.EINVAL,
            "format 99",
        ),
        (lambda path: (path.unlink(), path.mkdir()), ClusterCode.STORE_UNUSABLE, errno.EINVAL, ""),
        (lambda path: (path.unlink(), path.symlink_to("elsewhere")), ClusterCode.STORE_UNUSABLE, errno.EINVAL, ""),
        (lambda path: (path.unlink(), path.parent.chmod(0o777)), ClusterCode.STORE_UNUSABLE, errno.EPERM, "chmod go-w"),
        (lambda path: (path.unlink(), path.parent.rmdir()), ClusterCode.STORE_UNUSABLE, errno.ENOENT, "No such file"),
        (
            lambda path: (path.unlink(), _execute(path, "CREATE TABLE t (x)")),
            ClusterCode.STORE_FOREIGN,
            errno.EINVAL,
            "",
        ),
    ],
)
def test_a_file_that_can_not_be_used_is_said_so(
    tmp_path: Path, spoil: Callable[[Path], object], code: ClusterCode, number: int, fact: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    path = folder / "store"

    async def body(store: SqliteStore) -> None:
        for number in range(100):
            await store.put(f"{number}", b"x" * 4000)

    is_large = code is ClusterCode.STORE_DAMAGED
    with_store(path, body) if is_large else with_store(path, lambda store: store.put("a", b""))
    spoil(path)
    with pytest.raises(OSError, match=ends_with(code, path, fact)) as error:
        open_store(f"sqlite:{path}")
    assert error.value.errno == number


@pytest.mark.parametrize("text", ["sqlite:", "sqlite:/var/lib/"])
def test_a_store_without_a_file(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinator(["--store", text]) == 2
    assert re.search(ends_with(SettingCode.INVALID_SETTING, repr(text), "'sqlite:/"), capsys.readouterr().err)


def test_another_users_file_is_not_used(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path.touch(mode=0o600)
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(OSError, match=ends_with(ClusterCode.STORE_UNUSABLE, path, f"uid {OTHER_USER}")):
        SqliteStore(path)


def test_a_file_that_may_only_be_read() -> None:
    """As another user: root may write everywhere."""
    script = """
from horovod.coordinator.store.sqlite import SqliteStore
try:
    SqliteStore(pathlib.Path(sys.argv[1]))
except OSError as error:
    print(error.strerror)
"""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is for root alone
        path = Path(folder) / "store"
        with_store(path, lambda store: store.put("a", b"1"))
        path.chmod(0o400)
        reader = start_as_other_user(script, str(path))
        for file in (folder, path):
            os.chown(file, OTHER_USER, OTHER_USER)
        out, err = reader.communicate("", timeout=60)
        assert re.search(ends_with(ClusterCode.STORE_UNUSABLE, path, "permissions"), out), err


# -- no space ----------------------------------------------------------------------------------------------------------


def test_a_store_that_is_full_says_so_reads_on_and_goes_on_by_itself(path: Path) -> None:
    async def body(store: SqliteStore) -> None:
        lease = await store.grant(0.05)
        leased = await store.put("leased", b"1", lease)
        number = 0

        async def fill() -> None:
            nonlocal number
            while True:
                await store.put(f"filling/{number}", b"x" * 20_000)
                number += 1

        with pytest.raises(
            WritesRefusedError, match=ends_with(ClusterCode.STORE_TAKES_NO_WRITES, path, f"{1 << 18:,} bytes")
        ):
            await fill()
        assert number > 5
        ready = await Readiness(store)()
        assert re.search(ends_with(ClusterCode.STORE_TAKES_NO_WRITES, path), ready)
        assert (await store.get("filling/0")) is not None
        assert (await store.get(f"filling/{number}")) is None
        _, revision = await store.range("")
        assert await store.delete("filling/0")
        assert (await store.put("filling/0", b"x" * 20_000)).revision > revision
        with pytest.raises(WritesRefusedError):
            await fill()
        for gone in range(6):
            assert await store.delete(f"filling/{gone}")
        assert await Readiness(store)() == ""
        gone = await take(store.watch("leased", leased.revision + 1), 1)  # also what a lease leaves behind
        assert gone == [("leased", None)]
        assert await store.get("leased") is None

    with_store(path, body, most_bytes=1 << 18)


def test_a_store_larger_than_it_may_be_is_read_all_the_same(path: Path) -> None:
    async def fill(store: SqliteStore) -> None:
        for number in range(20):
            await store.put(f"{number}", b"x" * 20_000)

    async def read(store: SqliteStore) -> None:
        assert len((await store.range(""))[0]) == 20
        with pytest.raises(StoreError):
            await store.put("more", b"x" * 200_000)
        await store.delete("1")

    with_store(path, fill)
    with_store(path, read, most_bytes=1 << 16)


def test_signals_stop_a_coordinator_that_leaves_a_closed_file(path: Path) -> None:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--store", f"sqlite:{path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert LISTENING in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
    assert [file.name for file in path.parent.iterdir()] == ["store"]  # the log is written back
