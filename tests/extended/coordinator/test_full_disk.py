"""A store in a file on a disk that is full, and on one that may only be read: small ones in a namespace of mounts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode

FILLS = """
import asyncio, sys
from pathlib import Path
from horovod.base.errors import ClusterCode, code_of
from horovod.coordinator.store import WritesRefusedError
from horovod.coordinator.store.sqlite import SqliteStore
from horovod.coordinator.pages import Readiness

async def main():
    disk = Path(sys.argv[1])
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    store = SqliteStore(disk / "store")
    written = 0
    try:
        while True:
            await store.put(f"{written:04}", b"x" * 20_000)
            written += 1
    except WritesRefusedError as error:
        print(error)
    assert written > 5
    assert code_of(await Readiness(store)()) is ClusterCode.STORE_TAKES_NO_WRITES
    assert len((await store.range(""))[0]) == written
    ballast.unlink()
    await store.put("more", b"x" * 20_000)
    assert await Readiness(store)() == ""
    await store.close()

asyncio.run(main())
"""


def on_small_disk(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a namespace where `folder` is a disk of 3 MiB; skips the test where there can be none."""
    mount = f"mount -t tmpfs -o size=3m,mode=700 tmpfs {shlex.quote(str(folder))}"
    command = ["unshare", "--mount", "sh", "-c", f"{mount} || exit 77; {script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    return done


def test_a_full_disk_refuses_writes_until_there_is_space(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    done = on_small_disk(tmp_path, f"{python} -c {shlex.quote(FILLS)} {shlex.quote(str(tmp_path))}")
    assert done.returncode == 0, done.stderr
    assert f"[{ClusterCode.STORE_TAKES_NO_WRITES}]" in done.stdout


def test_a_disk_that_may_only_be_read_is_said_so_at_the_start(tmp_path: Path) -> None:
    coordinator = f"{shlex.quote(sys.executable)} -m horovod.coordinator --listen 127.0.0.1:0 --store sqlite:"
    folder = shlex.quote(str(tmp_path))
    script = (
        f"touch {folder}/store; chmod 600 {folder}/store; mount -o remount,ro {folder}; {coordinator}{folder}/store"
    )
    done = on_small_disk(tmp_path, script)
    assert done.returncode == 1
    assert re.search(ends_with(ClusterCode.STORE_UNUSABLE, tmp_path / "store", "read-only"), done.stderr), done.stderr
