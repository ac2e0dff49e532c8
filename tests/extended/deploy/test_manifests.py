"""The files of deploy/: Kubernetes' own schemas, strictly, and that they fit what our programs understand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from horovod.base.settings import SETTINGS
from horovod.coordinator.__main__ import make_parser as coordinator_parser
from horovod.worker.agent.__main__ import make_parser as agent_parser

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = "1.30"


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Every container, and every service of compose.yaml."""
    if isinstance(node, dict):
        if "image" in node:
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_takes(path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        kubernetes_validate.validate(document, VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**found[-1], "spec": {**found[-1]["spec"], "unknown": 1}}, VERSION, strict=True)


@pytest.mark.parametrize("path", [*MANIFESTS, DEPLOY / "compose.yaml"], ids=lambda path: path.name)
def test_options_and_variables_are_ours(path: Path) -> None:
    known = {row.env for row in SETTINGS}
    for document in documents(path):
        for container in containers(document):
            environment = container.get("env") or container.get("environment") or {}
            names = [one["name"] for one in environment] if isinstance(environment, list) else list(environment)
            assert {name for name in names if name.startswith("HOROVOD_")} <= known
            command = container.get("args") or container.get("command") or []
            if "horovod-coordinator" in command:
                arguments = [re.sub(r"\$\(NAME\)", "pod", str(one)) for one in command[1:]]
                assert isinstance(coordinator_parser().parse_args(arguments), argparse.Namespace)
            if "horovod-worker" in command:
                arguments = [re.sub(r"\$\(NODE\)", "node", str(one)) for one in command[1:]]
                assert isinstance(agent_parser().parse_args(arguments), argparse.Namespace)


def test_nobody_is_root_and_every_selector_finds_its_pods() -> None:
    for path in MANIFESTS:
        for document in documents(path):
            template = document.get("spec", {}).get("template")
            if template is None:
                continue
            labels = template["metadata"]["labels"]
            selector = document["spec"].get("selector", {}).get("matchLabels", labels)
            assert selector.items() <= labels.items(), path
            assert template["spec"]["securityContext"]["runAsNonRoot"], path
            for container in containers(template):
                assert container["securityContext"]["allowPrivilegeEscalation"] is False, path
    assert "USER 10001" in (DEPLOY / "Dockerfile").read_text()
