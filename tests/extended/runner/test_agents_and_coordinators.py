"""Jobs outlive coordinators: two of them on one etcd, of which the one that serves agents and jobs is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import etcd_server
import pytest
from agents import AGENT, DEADLINE_S
from etcd_server import Etcd
from launching import Launched
from test_etcd_store import with_store

from horovod.coordinator.store import Store

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

TOKEN = "a-token-for-this-test-only"
COORDINATOR = [sys.executable, "-m", "horovod.coordinator"]


class Process(subprocess.Popen[str]):
    """One whose first line of output says that it serves."""

    def __init__(self, *command: str) -> None:
        super().__init__(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HOROVOD_TOKEN": TOKEN},
        )
        assert self.stdout is not None
        self.first = self.stdout.readline().strip()
        assert self.first, command


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    with Etcd(tmp_path / "etcd") as etcd:
        yield etcd.url


def test_a_job_goes_on_when_its_coordinator_is_killed(store: str, tmp_path: Path) -> None:
    token, go, source = (tmp_path / name for name in ("token", "go", "program.py"))
    token.write_text(TOKEN)
    token.chmod(0o600)
    os.mkfifo(go)
    source.write_text(
        f"import os\nprint('rank', os.environ['HOROVOD_RANK'])\nprint('heard', open({str(go)!r}).read().strip())"
    )
    command = [*COORDINATOR, "--listen", "127.0.0.1:0", "--token-file", str(token), "--store", store]
    processes = []
    try:
        coordinators = [Process(*command) for _ in range(2)]
        processes += coordinators
        addresses = ",".join(one.first.rpartition(" ")[2] for one in coordinators)
        options = ["--name", "h1", "--slots", "1", "--state-dir", str(tmp_path / "h1")]
        processes.append(Process(*AGENT, "--coordinator", addresses, *options))
        launched = Launched(
            *("--coordinator", addresses, "-np", "1", sys.executable, str(source)), environ={"HOROVOD_TOKEN": TOKEN}
        )
        try:
            assert launched.lines(1) == ["[0]<stdout>:rank 0"]
            coordinators[0].send_signal(signal.SIGKILL)  # the first that was there serves
            coordinators[0].wait()
            with go.open("w") as file:
                file.write("go on\n")
            code, out, err = launched.finish()
            assert (code, out) == (0, "[0]<stdout>:heard go on\n"), err
        finally:
            launched.clean_up()
    finally:
        for process in reversed(processes):
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


def test_no_output_is_lost_when_the_coordinator_is_killed(store: str, tmp_path: Path) -> None:
    """In the middle of a flood: the next one goes on with the first byte that the launcher has not taken."""
    token, source = tmp_path / "token", tmp_path / "program.py"
    token.write_text(TOKEN)
    token.chmod(0o600)
    count = 20_000
    source.write_text(f"for number in range({count}):\n    print(f'{{number:06d}}', 'x' * 992)\n")
    command = [*COORDINATOR, "--listen", "127.0.0.1:0", "--token-file", str(token), "--store", store]
    processes = []
    try:
        coordinators = [Process(*command) for _ in range(2)]
        processes += coordinators
        addresses = ",".join(one.first.rpartition(" ")[2] for one in coordinators)
        options = ["--name", "h1", "--slots", "1", "--state-dir", str(tmp_path / "h1"), "--log-limit-mb", "2"]
        processes.append(Process(*AGENT, "--coordinator", addresses, *options))
        launched = Launched(
            *("--coordinator", addresses, "-np", "1", sys.executable, str(source)), environ={"HOROVOD_TOKEN": TOKEN}
        )
        try:
            lines = launched.lines(count // 4)
            coordinators[0].send_signal(signal.SIGKILL)  # the first that was there serves
            coordinators[0].wait()
            lines += launched.lines(count - len(lines))
            assert lines == [f"[0]<stdout>:{number:06d} {'x' * 992}" for number in range(count)]
            code, out, err = launched.finish()
            assert (code, out) == (0, ""), err
        finally:
            launched.clean_up()
    finally:
        for process in reversed(processes):
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


def values_in(store: str) -> list[bytes]:
    found: list[bytes] = []

    async def body(store: Store) -> None:
        found.extend(entry.value for entry in (await store.range(""))[0])

    with_store(store, body)
    return found


def test_no_secret_of_the_launcher_stays_in_the_store(store: str, tmp_path: Path) -> None:
    """Its environment is in the record of the job as long as ranks may have to be started, and no longer."""
    secret = "a-key-that-nobody-may-keep"
    token, go, source = (tmp_path / name for name in ("token", "go", "program.py"))
    token.write_text(TOKEN)
    token.chmod(0o600)
    os.mkfifo(go)
    source.write_text(f"import os\nprint(len(os.environ['API_KEY']), flush=True)\nopen({str(go)!r}).read()")
    processes = [Process(*COORDINATOR, "--listen", "127.0.0.1:0", "--token-file", str(token), "--store", store)]
    address = processes[0].first.rpartition(" ")[2]
    try:
        options = ["--name", "h1", "--slots", "1", "--state-dir", str(tmp_path / "h1")]
        processes.append(Process(*AGENT, "--coordinator", address, *options))
        command = ["--coordinator", address, "-np", "1", sys.executable, str(source)]
        launched = Launched(*command, environ={"HOROVOD_TOKEN": TOKEN, "API_KEY": secret})
        try:
            assert launched.lines(1) == [f"[0]<stdout>:{len(secret)}"]
            assert any(secret.encode() in value for value in values_in(store))
            with go.open("w"):
                pass
            code, _, err = launched.finish()
            assert code == 0, err
        finally:
            launched.clean_up()
        left = values_in(store)
        assert any(b"program.py" in value for value in left)  # the record is there
        assert not any(secret.encode() in value for value in left)
        files = [path for path in (tmp_path / "h1").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    finally:
        for process in reversed(processes):
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
