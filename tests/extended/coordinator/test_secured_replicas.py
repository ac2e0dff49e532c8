"""Two coordinators, etcd, training processes, an agent and a launcher that all show certificates: whichever coordinator
dies, the other goes on, and nobody is taken in by a process that answers where it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import etcd_server
import pytest
from agents import AGENT, DEADLINE_S
from certificates import Authority
from error_codes import ends_with
from etcd_server import READY_S, Etcd, ctl_command
from event_words import NO_COORDINATOR_THERE, TAKEN_OVER, WAS_LOST
from launching import Launched
from replicas import Replica, holder_of
from stopped_jobs import job

from horovod.base.errors import AccessCode, SettingCode
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.store.seal import Seal

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

TOKEN = "a-token-for-this-test-only"


@dataclass
class Cluster:
    etcd: Etcd
    replicas: dict[str, Replica]
    members: dict[str, str]  # HOROVOD_TLS_* of whoever calls a coordinator
    log: IO[str]
    ctl: list[str]  # with which etcdctl is let in

    @property
    def addresses(self) -> str:
        return ",".join(self.replicas)

    def serving(self) -> tuple[str, str]:
        """Who serves the job: the address, and which process it is."""
        found = holder_of(f"https://{self.etcd.endpoints[0]}", "default", *self.ctl, token=TOKEN)
        return found.address, found.replica

    def put(self, key: str, value: str) -> None:
        """As one of the coordinators does."""
        command = [*ctl_command(f"https://{self.etcd.endpoints[0]}"), *self.ctl, "put", key]
        sealed = Seal([TOKEN]).close(key, value.encode())
        subprocess.run(command, input=sealed, check=True, capture_output=True, timeout=READY_S)

    def said(self, words: str) -> int:
        self.log.seek(0)
        return self.log.read().count(words)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tmp_path = tmp_path_factory.mktemp("cluster")
    ours = Authority(tmp_path / "tls")
    node, coordinator, client = (
        ours.issue(name, *names)
        for name, names in (
            ("etcd", ["127.0.0.1"]),
            ("coordinator", ["127.0.0.1"]),
            ("client", ["member.test"]),
        )
    )
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    flags = ["--cert-file", node.cert, "--key-file", node.key, "--trusted-ca-file", ours.file, "--client-cert-auth"]
    secured = ["--token-file", str(token), "--tls-cert", coordinator.cert, "--tls-key", coordinator.key]
    secured += ["--tls-client-ca", ours.file]
    with ExitStack() as stack:
        etcd = stack.enter_context(Etcd(tmp_path / "etcd", 1, flags, scheme="https"))
        store = f"{etcd.url}?ca={ours.file}&cert={coordinator.cert}&key={coordinator.key}"
        log = stack.enter_context((tmp_path / "log").open("w+"))
        made = [stack.enter_context(Replica(store, *secured, log=log)) for _ in range(2)]
        yield Cluster(
            etcd,
            {one.address: one for one in made},
            {"HOROVOD_TLS_CA": ours.file, "HOROVOD_TLS_CERT": client.cert, "HOROVOD_TLS_KEY": client.key},
            log,
            [f"--cacert={ours.file}", f"--cert={client.cert}", f"--key={client.key}"],
        )


def test_a_submitted_job_goes_on_too(cluster: Cluster, tmp_path: Path) -> None:
    """Agent, launcher and rank over mTLS; the coordinator that serves agents and jobs is killed."""
    go, source = tmp_path / "go", tmp_path / "program.py"
    os.mkfifo(go)
    source.write_text(
        "import horovod.common.basics as hvd\nhvd.init()\nprint('rank', hvd.rank(), flush=True)\n"
        f"print('heard', open({str(go)!r}).read().strip())\nhvd.shutdown()"
    )
    environ = {"HOROVOD_TOKEN": TOKEN, **cluster.members}
    command = [*AGENT, "--coordinator", cluster.addresses, "--name", "h1", "--slots", "1"]
    agent = subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "h1")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline(), "it serves"
        launched = Launched(
            *("--coordinator", cluster.addresses, "-np", "1", sys.executable, str(source)), environ=environ
        )
        try:
            assert launched.lines(1) == ["[0]<stdout>:rank 0"]
            first = next(iter(cluster.replicas.values()))  # it was there first, so it serves
            first.send_signal(signal.SIGKILL)
            first.process.wait()
            with go.open("w") as file:
                file.write("go on\n")
            code, out, err = launched.finish()
            assert (code, out) == (0, "[0]<stdout>:heard go on\n"), err
            first.start()
        finally:
            launched.clean_up()
    finally:
        agent.terminate()
        agent.communicate(timeout=DEADLINE_S)


def test_training_goes_on_with_the_other_one_and_no_impostor(cluster: Cluster, tmp_path: Path) -> None:
    """The second time a process with a false certificate answers where the killed one was, and the store says that the
    killed one lives."""
    other = Authority(tmp_path / "other")
    with job(cluster.addresses, TOKEN, **cluster.members) as ranks:
        address, _ = cluster.serving()
        cluster.replicas[address].kill()
        ranks.works()
        assert cluster.serving()[0] not in ("", address)
        cluster.replicas[address].start()

        address, replica = cluster.serving()
        (standing,) = (one for one in cluster.replicas.values() if one.address != address)
        cluster.put(f"horovod/replicas/{replica}", address)  # under no lease, so that it stays
        standing.send_signal(signal.SIGSTOP)  # until the impostor is there
        cluster.replicas[address].kill()
        with EmbeddedCoordinator(address, TOKEN, tls=other.server()) as impostor:
            standing.send_signal(signal.SIGCONT)
            ranks.works()
            assert cluster.serving()[0] == standing.address
            assert impostor.server is not None
            assert impostor.server.overview() == [], "no member has spoken to it"
        ranks.end_well()
        cluster.replicas[address].start()
    assert cluster.said(NO_COORDINATOR_THERE)
    assert cluster.said(address)
    assert cluster.said(f"{TAKEN_OVER}, with 2 of 2") == 2
    assert not cluster.said(WAS_LOST)


def test_each_asks_the_other_before_it_takes_a_job(cluster: Cluster) -> None:
    """Ranks that know one coordinator each: the one that does not serve has to believe the one that does."""
    told = cluster.said(NO_COORDINATOR_THERE), cluster.said(f"{TAKEN_OVER} by")
    with job(list(cluster.replicas), TOKEN, **cluster.members) as ranks:
        ranks.works()
        ranks.end_well()
    assert (cluster.said(NO_COORDINATOR_THERE), cluster.said(f"{TAKEN_OVER} by")) == told, (
        "the job has stayed where it was"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "pattern"),
    [
        ([], 2, ends_with(SettingCode.MISSING_SETTING, "--tls-peer-ca")),
        (
            ["--tls-peer-ca", "CA", "--advertise", "node-b:29400"],
            1,
            ends_with(AccessCode.UNTRUSTED_CERTIFICATE, "'node-b'", "--advertise"),
        ),
    ],
)
def test_a_coordinator_that_the_others_could_not_know_does_not_start(
    arguments: list[str], code: int, pattern: str, tmp_path: Path
) -> None:
    ours = Authority(tmp_path / "tls")
    pair = ours.issue("coordinator", "127.0.0.1")
    arguments = [ours.file if one == "CA" else one for one in arguments]
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--store", "etcd://127.0.0.1:9"]
    command += ["--tls-cert", pair.cert, "--tls-key", pair.key, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert re.search(pattern, done.stderr)
