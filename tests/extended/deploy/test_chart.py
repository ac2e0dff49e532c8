"""The Helm chart: Helm's own checks, Kubernetes' schemas, and that it fits what our programs understand.

It has not been installed in a cluster. The coordinator and the agent run here with the arguments that it renders.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import helm
import pytest
import yaml
from event_words import AGENT_SERVES, LISTENING

from benchmarks.ports import free_ports
from horovod.base.certificates import make
from horovod.base.settings import SETTINGS
from horovod.coordinator.__main__ import make_parser as coordinator_parser
from horovod.launch.command_line.flags import parse_args as launcher_arguments
from horovod.worker.agent.__main__ import make_parser as agent_parser

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
pytest.importorskip("cryptography", reason="cryptography makes the certificates")
pytestmark = pytest.mark.skipif(helm.program() is None, reason=helm.MISSING)

VALUES = [None, *sorted((helm.CHART / "ci").glob("*.yaml"))]
TOKEN = "0123456789abcdef" * 4
DEADLINE_S = 60


def options_of(values: Path | None) -> list[str]:
    return [] if values is None else ["--values", str(values)]


@pytest.fixture(params=VALUES, ids=lambda path: path.stem if path else "values")
def values(request: pytest.FixtureRequest) -> Path | None:
    return request.param


def test_helm_finds_no_fault(values: Path | None) -> None:
    done = helm.helm("lint", "--strict", str(helm.CHART), *options_of(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.27", "1.30", "1.34"])
def test_manifests_are_what_kubernetes_takes(values: Path | None, version: str) -> None:
    for document in helm.rendered("horovod", *options_of(values)):
        kubernetes_validate.validate(document, version, strict=True)


def test_options_and_variables_are_ours(values: Path | None) -> None:
    known = {row.env for row in SETTINGS}
    programs = set()
    for _, pod in helm.pods_of(helm.rendered("horovod", *options_of(values))):
        for container in pod["containers"]:
            names = {one["name"] for one in container.get("env", [])}
            assert {name for name in names if name.startswith("HOROVOD_")} <= known
            program, *arguments = [re.sub(r"\$\((NAME|NODE)\)", "pod", word) for word in container["args"]]
            programs.add(program)
            if program == "horovod-coordinator":
                coordinator_parser().parse_args(arguments)
            elif program == "horovod-worker":
                agent_parser().parse_args(arguments)
            else:
                assert program == "horovodrun"
                launcher_arguments(arguments)
    assert "horovod-coordinator" in programs


def test_each_file_of_a_secret_is_mounted_and_each_selector_finds_its_pods(values: Path | None) -> None:
    documents = helm.rendered("horovod", *options_of(values))
    labels = [metadata["labels"] for metadata, _ in helm.pods_of(documents)]
    for document in documents:
        spec = document["spec"]
        if document["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            selector = spec.get("podSelector") or spec["selector"]
            selector = selector.get("matchLabels", selector)
            assert sum(selector.items() <= one.items() for one in labels) == 1, document
        elif document["kind"] != "Pod":
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    for _, pod in helm.pods_of(documents):
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {one["name"] for one in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes | {"data"}
            said = [*container.get("args", []), *(str(one.get("value")) for one in container.get("env", []))]
            for path in re.findall(r"/secrets/[^&\s]+", " ".join(said)):
                assert str(Path(path).parent) in mounts, path


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["coordinator.replicas=2"], "/coordinator/replicas"),  # on one file
        (["store.kind=etcd"], "/store/etcd/endpoints"),
        (["store.kind=nfs"], "/store/kind"),
        (["tls.enbled=false"], "enbled"),
        (["token.secret="], "/token/secret"),
        (["agents.gpus=-1"], "/agents/gpus"),
        (["coordinator.logLevel=loud"], "/coordinator/logLevel"),
        (["store.etcd.prefix=a&key=b"], "/store/etcd/prefix"),
    ],
)
def test_values_that_can_not_work_are_refused(given: list[str], named: str) -> None:
    done = helm.helm("template", "horovod", str(helm.CHART), *(word for one in given for word in ("--set", one)))
    assert done.returncode != 0
    assert named in done.stderr


def test_addresses_are_those_of_the_pods_and_in_the_notes() -> None:
    documents = helm.rendered("blue", *options_of(helm.CHART / "ci" / "etcd-values.yaml"))
    named = {document["kind"]: document for document in documents}
    coordinators = named["StatefulSet"]
    name, service = coordinators["metadata"]["name"], coordinators["spec"]["serviceName"]
    assert service == next(one["metadata"]["name"] for one in documents if one["kind"] == "Service")
    addresses = ",".join(f"{name}-{index}.{service}:29400" for index in range(coordinators["spec"]["replicas"]))
    assert f"--coordinator={addresses}" in named["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["args"]
    advertised = coordinators["spec"]["template"]["spec"]["containers"][0]["args"][2]
    assert advertised == f"--advertise=$(NAME).{service}:29400"


def test_the_version_is_that_of_the_package() -> None:
    project = re.search(r'^version = "(\d+\.\d+\.\d+)', (helm.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project.group(1)


# -- with the arguments of the chart, on this host ---------------------------------------------------------------------


class Release:
    """Names of pods become addresses of this host, and paths of secrets those of files."""

    def __init__(self, folder: Path, documents: list[dict[str, Any]], stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        ports = free_ports(2)
        self._replaced = {
            "$(NAME).": "",
            "horovod-coordinator-0.horovod-coordinator": "127.0.0.1",
            "--advertise=horovod-coordinator": "--advertise=127.0.0.1",
            "$(NODE)": "h1",
            "0.0.0.0": "127.0.0.1",
            ":29400": f":{ports[0]}",
            ":9400": f":{ports[1]}",
            "/secrets/": f"{folder}/secrets/",
            "/data/coordinator": str(folder / "store"),
            "/state/agent": str(folder / "agent"),
        }
        self._containers = {}
        for _, pod in helm.pods_of(documents):
            secrets = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
            self._containers[pod["containers"][0]["args"][0]] = (pod["containers"][0], secrets)

    def start(self, program: str, **secrets: Path) -> subprocess.Popen[str]:
        """secrets: the folder that stands for each Secret."""
        container, mounted = self._containers[program]
        folder = self._folder / program
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environ |= {one["name"]: self._here(one["value"], folder) for one in container["env"] if "value" in one}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        (folder / "secrets").mkdir(parents=True)
        for mount, secret in mounted.items():
            (folder / "secrets" / mount).symlink_to(secrets[secret.replace("-", "_")])
        words = [self._here(word, folder) for word in container["args"]]
        log = self._stack.enter_context((folder / "log").open("w"))
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self._stack.callback(self._end, process)
        return process

    def log(self, program: str) -> str:
        return (self._folder / program / "log").read_text()

    def _here(self, word: str, folder: Path) -> str:
        for pod, here in self._replaced.items():
            word = word.replace(pod, here)
        return word.replace(f"{self._folder}/secrets/", f"{folder}/secrets/")

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    (tmp_path / "store").mkdir(mode=0o700)
    with ExitStack() as stack:
        yield Release(tmp_path, helm.rendered("horovod", "--set", "agents.slots=1"), stack)


def secret(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content)
        path.chmod(0o600)
    return folder


def test_the_job_of_helm_test_runs_over_tls(release: Release, tmp_path: Path) -> None:
    """With what stands in values.yaml: SQLite, TLS, a certificate of members, and the token."""
    made = tmp_path / "tls"
    make(made, ["127.0.0.1"], 1)
    tokens = {
        "horovod_token": secret(tmp_path / "token", token=TOKEN.encode()),
        "horovod_web_token": secret(tmp_path / "web-token", token=TOKEN[::-1].encode()),
        "horovod_tls_coordinator": made,
        "horovod_tls_member": made,
    }
    coordinator = release.start("horovod-coordinator", **tokens)
    assert coordinator.stdout is not None
    lines = [coordinator.stdout.readline() for _ in range(2)]
    assert LISTENING in lines[1], release.log("horovod-coordinator")
    assert "https://" in lines[0]
    agent = release.start("horovod-worker", **tokens)
    assert agent.stdout is not None
    assert agent.stdout.readline() == f"{AGENT_SERVES} 1 slots as h1\n", release.log("horovod-worker")
    launcher = release.start("horovodrun", **tokens)
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert (launcher.returncode, out) == (0, "[0]<stdout>:rank 0 of 1\n"), release.log("horovodrun")
