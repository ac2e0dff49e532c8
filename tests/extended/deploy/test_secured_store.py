"""etcd, coordinators and an agent with the arguments of deploy/kubernetes, on this host: a job runs, and who has no
certificate can neither read nor write etcd, nor take the leader's key away.

Names of pods become addresses of this host, and paths of secrets those of files that `horovodrun certs` has made.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import etcd_server
import pytest
import yaml
from etcd_server import READY_S, Ready, ctl, ctl_command
from event_words import AGENT_SERVES, LISTENING
from launching import Launched
from resources import eventually

from benchmarks.ports import free_ports
from horovod.base.certificates import make
from horovod.coordinator.__main__ import _config, make_parser
from horovod.coordinator.store.seal import MAGIC

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())
pytest.importorskip("cryptography", reason="cryptography makes the certificates")

MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes"
TOKEN = "0123456789abcdef" * 4
LEADER = "horovod/cluster/leader"
KEPT = "horovod/kept-by-this-test"
DEADLINE_S = 60


def pod_of(file: str, kind: str) -> dict[str, Any]:
    """The template of the pods, and what the manifest calls them."""
    for document in yaml.safe_load_all((MANIFESTS / file).read_text()):
        if document["kind"] == kind:
            return dict(document["spec"]["template"]["spec"], name=document["metadata"].get("name", ""))
    raise AssertionError(f"{file} has no {kind}")


@dataclass
class Cluster:
    folder: Path
    addresses: dict[str, str] = field(default_factory=dict)  # of a pod's port, and of this host in its place
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    etcd: str = ""  # where its first member serves clients

    def arguments(self, file: str, kind: str, pod: int = 0) -> list[str]:
        """Of the container, as they are for this pod on this host."""
        found = pod_of(file, kind)
        name = f"{found['name']}-{pod}"
        words = [str(word).replace("$(NAME)", name).replace("$(NODE)", "h1") for word in found["containers"][0]["args"]]
        for index, word in enumerate(words):
            words[index] = self._here(word, name)
        return words

    def _here(self, word: str, name: str) -> str:
        if word.startswith(("--listen", "--web-listen")):
            domain = name.rpartition("-")[0]
            word = re.sub(r"0\.0\.0\.0", f"{name}.{domain}", word)
        for pod, address in self.addresses.items():
            word = word.replace(pod, address)
        word = word.replace("/data/etcd", str(self.folder / f"data-{name}"))
        word = word.replace("/state/agent", str(self.folder / "agent"))
        return word.replace("=/secrets/", f"={self.folder}/secrets/")

    def start(self, command: Sequence[str], **streams: IO[str] | int) -> subprocess.Popen[str]:
        environ = {**os.environ, "HOROVOD_TOKEN_FILE": str(self.folder / "secrets/token/token")}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        process = subprocess.Popen(command, text=True, env=environ, stdin=subprocess.DEVNULL, **streams)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(DEADLINE_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def certificate(self, folder: str, name: str) -> list[str]:
        """Options of etcdctl."""
        files = self.folder / "secrets" / folder
        return [f"--cacert={files}/ca.pem", f"--cert={files}/{name}.pem", f"--key={files}/{name}.key"]


def make_secrets(folder: Path) -> None:
    """As the comments of etcd.yaml and coordinator.yaml say, with the names that this host has besides."""
    comment = (MANIFESTS / "etcd.yaml").read_text()
    certs = re.search(r"horovodrun certs (\S+) --hosts (\S+)", comment)
    assert certs is not None
    make(folder / certs.group(1), [*certs.group(2).split(","), "127.0.0.1"], 1)
    secrets = re.findall(r"create secret generic (\S+) (--from-file=.+)", comment)
    assert len(secrets) == 2
    for name, options in secrets:
        target = folder / "secrets" / name.removeprefix("horovod-")
        target.mkdir(parents=True)
        for option in shlex.split(options):
            source = folder / option.removeprefix("--from-file=")
            (target / source.name).write_bytes(source.read_bytes())
            (target / source.name).chmod(0o600)
    for name in ("token", "web-token"):
        file = folder / "secrets" / name / "token"
        file.parent.mkdir()
        file.write_text(TOKEN if name == "token" else TOKEN[::-1])
        file.chmod(0o600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    make_secrets(found.folder)
    pods = {("horovod-etcd", port, pod): pod for port in (2379, 2380, 2381) for pod in range(3)}
    pods.update({("horovod-coordinator", port, pod): pod for port in (29400, 9400) for pod in range(2)})
    for (name, port, pod), free in zip(pods, free_ports(len(pods)), strict=True):
        found.addresses[f"{name}-{pod}.{name}:{port}"] = f"127.0.0.1:{free}"
    found.etcd = found.addresses["horovod-etcd-0.horovod-etcd:2379"]
    with ExitStack() as stack:
        stack.callback(found.stop)
        log = stack.enter_context((found.folder / "log").open("w"))
        etcd = etcd_server.program_of("etcd")
        ready = []
        for pod in range(3):
            command = [str(etcd), *found.arguments("etcd.yaml", "StatefulSet", pod), "--unsafe-no-fsync"]
            ready.append(Ready(found.start(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)))
        for one in ready:
            assert one.wait(READY_S), one.last_lines()
        for pod in range(2):
            command = found.arguments("coordinator.yaml", "StatefulSet", pod)
            process = found.start(command, stdout=subprocess.PIPE, stderr=log)
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            assert LISTENING in lines[1], (found.folder / "log").read_text()
        agent = found.start([*found.arguments("agents.yaml", "DaemonSet"), "--slots=1"], stdout=subprocess.PIPE)
        assert agent.stdout is not None
        assert agent.stdout.readline() == f"{AGENT_SERVES} 1 slots as h1\n"
        yield found


def test_the_coordinators_of_the_manifest_take_its_etcd_for_safe(cluster: Cluster) -> None:
    """With the names of pods, which are off loopback."""
    words = [str(word) for word in pod_of("coordinator.yaml", "StatefulSet")["containers"][0]["args"][1:]]
    words = [one.replace("=/secrets/", f"={cluster.folder}/secrets/") for one in words]
    words = [one.replace("$(NAME)", "horovod-coordinator-0") for one in words]
    assert _config(make_parser().parse_args(words)).token == TOKEN
    plain = [one.partition("?")[0] if one.startswith("--store=") else one for one in words]
    with pytest.raises(ValueError, match=r"without TLS .* and without credentials"):
        _config(make_parser().parse_args(plain))


def test_a_job_runs(cluster: Cluster) -> None:
    run_a_job(cluster)


def run_a_job(cluster: Cluster) -> None:
    where = cluster.arguments("submit.yaml", "Job")[1]
    launched = Launched(where, "-np", "1", sys.executable, "-c", "print(1)", environ={"HOROVOD_TOKEN": TOKEN})
    try:
        code, out, err = launched.finish()
    finally:
        launched.clean_up()
    assert (code, out) == (0, "[0]<stdout>:1\n"), err


def test_strangers_neither_read_nor_write_nor_delete(cluster: Cluster) -> None:
    client = cluster.certificate("etcd-client", "client")
    with_certificate = [*ctl_command(f"https://{cluster.etcd}"), *client]

    def value(key: str) -> bytes:
        command = [*with_certificate, "get", key, "--print-value-only"]
        return subprocess.run(command, check=True, capture_output=True, timeout=READY_S).stdout

    subprocess.run([*with_certificate, "put", KEPT, "ours"], check=True, capture_output=True, timeout=READY_S)
    authority = client[0]
    strangers = (
        (f"http://{cluster.etcd}", []),  # without TLS
        (f"https://{cluster.etcd}", ["--insecure-skip-tls-verify"]),
        (f"https://{cluster.etcd}", [authority]),  # as a pod that knows the authority, which is no secret
        (f"https://{cluster.etcd}", [authority, *member_certificate(cluster.folder)]),
    )
    for endpoint, options in strangers:
        for words in (["get", "horovod/", "--prefix"], ["put", KEPT, "theirs"], ["del", "horovod/", "--prefix"]):
            command = [*ctl_command(endpoint), "--dial-timeout=1s", "--command-timeout=1s", *options, *words]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
            assert ended.returncode != 0, (command, ended.stdout)
            assert ended.stdout == ""
    assert value(KEPT) == b"ours\n"
    assert eventually(lambda: value(LEADER) != b"")  # under a lease, which a busy host may have ended
    assert value(LEADER)[: len(MAGIC)] in (MAGIC, b"")  # with a coordinator's certificate one finds it sealed


def member_certificate(folder: Path) -> list[str]:
    """A certificate of training processes, which another authority has signed."""
    if not (folder / "member-tls").exists():
        make(folder / "member-tls", ["127.0.0.1"], 1)
    return [f"--cert={folder}/member-tls/client.pem", f"--key={folder}/member-tls/client.key"]


def test_no_certificate_of_a_client_makes_a_member(cluster: Cluster) -> None:
    """It is let in neither as a client of the port of members, nor by those who connect."""
    peer = cluster.addresses["horovod-etcd-0.horovod-etcd:2380"]

    def status(name: str, folder: str) -> int:
        files = cluster.folder / "secrets" / folder
        context = ssl.create_default_context(cafile=f"{files}/ca.pem")
        context.load_cert_chain(f"{files}/{name}.pem", f"{files}/{name}.key")
        connection = http.client.HTTPSConnection(peer, timeout=READY_S, context=context)
        try:
            connection.request("GET", "/version")
            return connection.getresponse().status
        finally:
            connection.close()

    assert status("coordinator", "etcd-server") == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):  # which one depends on when the refusal comes
        status("client", "etcd-client")


def test_the_port_for_probes_tells_health_and_no_keys(cluster: Cluster) -> None:
    probes = cluster.addresses["horovod-etcd-0.horovod-etcd:2381"]
    with urllib.request.urlopen(f"http://{probes}/health", timeout=READY_S) as answer:
        assert b"true" in answer.read()
    for words in (["get", LEADER], ["del", LEADER]):
        command = [*ctl_command(f"http://{probes}"), "--dial-timeout=1s", "--command-timeout=1s", *words]
        assert subprocess.run(command, capture_output=True, timeout=READY_S).returncode != 0


def test_a_leader_whose_key_is_deleted_is_followed_by_another(cluster: Cluster) -> None:
    """By somebody who has a coordinator's certificate: jobs go on, since nothing else is in that key."""
    client = cluster.certificate("etcd-client", "client")

    def revision() -> int:
        pairs = json.loads(ctl(f"https://{cluster.etcd}", *client, "get", LEADER, "-w", "json")).get("kvs")
        return int(pairs[0]["mod_revision"]) if pairs else 0

    before = revision()
    ctl(f"https://{cluster.etcd}", *client, "del", LEADER)
    assert eventually(lambda: revision() not in (0, before))
    run_a_job(cluster)
