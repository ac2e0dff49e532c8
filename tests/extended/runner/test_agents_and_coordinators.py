"""Jobs outlive coordinators: two of them on one etcd, of which the one that serves agents and jobs is killed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import etcd_server
import pytest
from etcd_server import Etcd
from launching import Launched
from replicated import TOKEN, Replicated, replicated
from test_etcd_store import with_store

from horovod.coordinator.store import Store
from horovod.coordinator.store.seal import Seal

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with Etcd(tmp_path / "etcd") as etcd:
        yield etcd.url


@contextlib.contextmanager
def launched_on(cluster: Replicated, source: Path, **environ: str) -> Iterator[Launched]:
    """A launcher of one rank."""
    command = ["--coordinator", cluster.addresses, "-np", "1", sys.executable, str(source)]
    launched = Launched(*command, environ={"HOROVOD_TOKEN": TOKEN, **environ})
    try:
        yield launched
    finally:
        launched.clean_up()


def test_a_job_goes_on_when_its_coordinator_is_killed(store: str, tmp_path: Path) -> None:
    go, source = tmp_path / "go", tmp_path / "program.py"
    os.mkfifo(go)
    source.write_text(
        f"import os\nprint('rank', os.environ['HOROVOD_RANK'])\nprint('heard', open({str(go)!r}).read().strip())"
    )
    with replicated(store, tmp_path) as cluster:
        cluster.start_agent("h1", 1)
        with launched_on(cluster, source) as launched:
            assert launched.lines(1) == ["[0]<stdout>:rank 0"]
            cluster.kill_first()
            with go.open("w") as file:
                file.write("go on\n")
            code, out, err = launched.finish()
            assert (code, out) == (0, "[0]<stdout>:heard go on\n"), err


def test_no_output_is_lost_when_the_coordinator_is_killed(store: str, tmp_path: Path) -> None:
    """In the middle of a flood: the next one goes on with the first byte that the launcher has not taken."""
    source = tmp_path / "program.py"
    count = 20_000
    source.write_text(f"for number in range({count}):\n    print(f'{{number:06d}}', 'x' * 992)\n")
    with replicated(store, tmp_path) as cluster:
        cluster.start_agent("h1", 1, "--log-limit-mb", "2")
        with launched_on(cluster, source) as launched:
            lines = launched.lines(count // 4)
            cluster.kill_first()
            lines += launched.lines(count - len(lines))
            assert lines == [f"[0]<stdout>:{number:06d} {'x' * 992}" for number in range(count)]
            code, out, err = launched.finish()
            assert (code, out) == (0, ""), err


def values_in(store: str) -> list[bytes]:
    found: list[bytes] = []

    async def body(store: Store) -> None:
        found.extend(entry.value for entry in (await store.range(""))[0])

    with_store(store, body, seal=Seal([TOKEN]))
    return found


def test_no_secret_of_the_launcher_stays_in_the_store(store: str, tmp_path: Path) -> None:
    """Its environment is in the record of the job as long as ranks may have to be started, and no longer."""
    secret = "a-key-that-nobody-may-keep"
    go, source = tmp_path / "go", tmp_path / "program.py"
    os.mkfifo(go)
    source.write_text(f"import os\nprint(len(os.environ['API_KEY']), flush=True)\nopen({str(go)!r}).read()")
    with replicated(store, tmp_path) as cluster:
        cluster.start_agent("h1", 1)
        with launched_on(cluster, source, API_KEY=secret) as launched:
            assert launched.lines(1) == [f"[0]<stdout>:{len(secret)}"]
            assert any(secret.encode() in value for value in values_in(store))
            with go.open("w"):
                pass
            code, _, err = launched.finish()
            assert code == 0, err
        left = values_in(store)
        assert any(b"program.py" in value for value in left)  # the record is there
        assert not any(secret.encode() in value for value in left)
        files = [path for path in (tmp_path / "h1").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if secret.encode() in path.read_bytes()]
