"""A cluster goes to another release under a running job, and back: two coordinators over etcd, agents of two hosts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from agents import DEADLINE_S
from etcd_server import Etcd
from event_words import AGENT_SERVES
from launching import Launched
from other_release import install

from benchmarks.ports import free_ports
from horovod.base.protocol import __version__

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

TOKEN = "a-token-for-this-test-only"
LATER = "1.97.3"
# Steps, each of which is committed, so that none is taken twice; until a file says that it is done. What another file
# says shows the test which steps were taken after it had written that.
PROGRAM = """
import os, sys, time
from array import array
from horovod._core import OpSpec
from horovod.base.protocol import __version__
from horovod.common import basics as hvd
from horovod.common.elastic import HostUpdateResult, State, run_fn
from horovod.worker.runtime.context import current

def total(number):
    data = array("f", [float(number)])
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce.total", [(pointer, pointer, 7, (1,))]).result()
    return int(data[0])

class Steps(State):
    def __init__(self):
        super().__init__(lambda news, root_rank=0: (bool(total(int(news[0] and hvd.rank() == 0))),
                                                    HostUpdateResult.added), hvd.rank)
        self.step = self.saved = 0
    def save(self):
        self.saved = self.step
    def restore(self):
        print("went back", flush=True)
        self.step = self.saved
    def sync(self):
        self.step = total(0 if hvd.rank() else self.step)

def train(state):
    while not total(os.path.exists(sys.argv[1])):
        state.step += 1
        time.sleep(0.02)  # the work of a step
        if hvd.rank() == 0:
            with open(sys.argv[2]) as file:
                print("step", state.step, "size", hvd.size(), "at", file.read(), "with", __version__, flush=True)
        state.commit()

hvd.init()
run_fn(train, lambda: (hvd.shutdown(), hvd.init()))(Steps())
"""


class Service:
    """A coordinator or an agent, which is stopped and started again with another installation."""

    def __init__(self, folder: Path, name: str, serves: str, *command: str) -> None:
        self._log = folder / f"{name}.log"
        self._command = command
        self._serves = serves
        self.process: subprocess.Popen[str]

    def start(self, python: str) -> None:
        """Returns when it says that it serves."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [python, *self._command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "HOROVOD_TOKEN": TOKEN},
            )  # fmt: skip
        assert self.process.stdout is not None
        assert self._serves in self.process.stdout.readline(), self.said()

    def stop(self) -> None:
        """As systemd stops it: an agent drains."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, self.said()

    def replace(self, python: str) -> None:
        self.stop()
        self.start(python)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def said(self) -> str:
        return self._log.read_text()


class Cluster:
    def __init__(self, folder: Path, store: str, stack: ExitStack) -> None:
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.addresses = ",".join(addresses)
        access = ["--token-file", str(token), "--store", store, "--verbose"]
        self.coordinators = [
            Service(folder, f"c{place}", address, "-m", "horovod.coordinator", "--listen", address, *access)
            for place, address in enumerate(addresses)
        ]
        at = ["-m", "horovod.worker.agent", "--coordinator", self.addresses, "--slots", "1"]
        self.agents = [
            Service(folder, name, AGENT_SERVES, *at, "--name", name, "--state-dir", str(folder / name))
            for name in ("h1", "h2")
        ]
        for one in (*self.coordinators, *self.agents):
            one.start(sys.executable)
            stack.callback(one.kill)


class Steps:
    """What rank 0 says of the steps that it takes."""

    def __init__(self, launched: Launched, clock: Path) -> None:
        self._launched = launched
        self._clock = clock
        self._now = 0
        self.numbers: list[int] = []
        self.releases: set[str] = set()

    def go_on(self, size: int) -> None:
        """Until three steps were taken by so many ranks from now on."""
        self._now += 1
        self._clock.write_text(str(self._now))
        wanted = 3
        while wanted:
            (line,) = self._launched.lines(1)
            assert "went back" not in line
            if found := re.search(r"step (\d+) size (\d) at (\d*) with (\S+)$", line):
                self.numbers.append(int(found[1]))
                self.releases.add(found[4])
                wanted -= found.group(2, 3) == (str(size), str(self._now))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        etcd = stack.enter_context(Etcd(tmp_path / "etcd"))
        yield Cluster(tmp_path, etcd.url, stack)


@contextlib.contextmanager
def training(cluster: Cluster, folder: Path) -> Iterator[tuple[Steps, Launched, Path]]:
    """An elastic job on both hosts, and the file that ends it."""
    source, done, clock = (folder / name for name in ("program.py", "done", "clock"))
    source.write_text(PROGRAM)
    clock.write_text("0")
    launched = Launched(
        "--coordinator", cluster.addresses, "-np", "2", "--min-np", "1", "--max-np", "2", "--reset-limit", "0",
        sys.executable, str(source), str(done), str(clock),
        environ={"HOROVOD_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        yield Steps(launched, clock), launched, done
    finally:
        launched.clean_up()


def test_a_cluster_is_upgraded_and_rolled_back_under_a_running_job(cluster: Cluster, tmp_path: Path) -> None:
    later = install(tmp_path / "later", LATER)
    with training(cluster, tmp_path) as (steps, launched, done):
        steps.go_on(2)
        for before, release, python in ((__version__, LATER, later), (LATER, __version__, sys.executable)):
            for coordinator in cluster.coordinators:
                coordinator.replace(python)
                steps.go_on(2)
            for agent in cluster.agents:
                agent.stop()
                steps.go_on(1)
                agent.start(python)
                steps.go_on(2)  # before the next host is drained, or nobody would be left who holds the state
            mixed = f"The agent of host h2 has Horovod {before}, this coordinator {release}."
            assert any(mixed in coordinator.said() for coordinator in cluster.coordinators)
        done.touch()
        code, out, err = launched.finish()
    assert code == 0, err
    assert steps.numbers == list(range(1, len(steps.numbers) + 1)), "no step was lost or taken twice"
    assert steps.releases == {__version__}, "a job keeps the release of its own environment"
    assert "went back" not in out


def test_an_agent_of_another_release_takes_over_what_runs(cluster: Cluster, tmp_path: Path) -> None:
    """It was killed, and its ranks belong to processes of the release before."""
    later = install(tmp_path / "later", LATER)
    with training(cluster, tmp_path) as (steps, launched, done):
        steps.go_on(2)
        for agent in cluster.agents:
            agent.kill()
            agent.start(later)
            steps.go_on(2)
        done.touch()
        code, _, err = launched.finish()
    assert code == 0, err
    assert "room for" not in err, "no process was lost"
