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
