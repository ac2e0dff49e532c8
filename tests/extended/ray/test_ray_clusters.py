"""The descriptions of clusters in docs/ray.md: for Ray's own launcher by its schema, for KubeRay as far as Kubernetes
knows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "ray.md"
VERSION = "1.34"


@pytest.fixture(scope="module")
def described() -> list[Any]:
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)]


def test_the_launcher_of_ray_takes_it(described: list[Any]) -> None:
    pytest.importorskip("jsonschema", reason="needs jsonschema")
    from ray.autoscaler._private.util import prepare_config, validate_config

    (config,) = (one for one in described if "cluster_name" in one)
    whole = prepare_config(config)
    validate_config(whole)
    assert any("--autoscaling-config" in line for line in whole["head_start_ray_commands"]), "the head starts workers"
    with pytest.raises(Exception, match="unknown"):
        validate_config({**config, "unknown": 1})


def test_kubernetes_takes_the_pods_of_kuberay(described: list[Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    (cluster,) = (one for one in described if one.get("kind") == "RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay wants text"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
