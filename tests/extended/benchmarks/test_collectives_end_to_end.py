"""benchmarks/collectives.py, torch_distributed.py and network.py report no figure whose values were not checked."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.world import ROOT


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=380)


def is_png(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def left_namespaces() -> set[str]:
    """Those whose makers are gone; other tests make some at the same time."""
    found = (re.match(r"hvdbench(\d+)", path.name) for path in Path("/run/netns").glob("hvdbench*"))
    return {name.string for name in found if name and not Path(f"/proc/{name[1]}").exists()}


def test_collectives_from_end_to_end_without_mpi(tmp_path: Path) -> None:
    file = tmp_path / "results" / "out.json"
    options = ("--quick", "--np", "2", "--sizes", "4,64K", "--libraries", "horovod,gloo", "--idle", "0.5")
    plot = ("--plot", str(file.with_suffix(".png"))) if importlib.util.find_spec("matplotlib") else ()
    done = run("collectives.py", *options, "--json", str(file), *plot)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not plot or is_png(file.with_suffix(".png"))
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert document["machine"]["cores"] >= 1
    assert len(document["rows"]) == 2 * 6 + 1 + 2
    for row in document["rows"]:
        assert set(row["figures"]) == ({"horovod"} if row["operation"] == "adasum" else {"horovod", "gloo"})
        assert row["operation"] == "adasum" or row["times_faster_than"]["gloo"] > 0
        for figure in row["figures"].values():
            assert figure["seconds"] > 0
            assert figure["values_checked"] > 0 or row["operation"] == "barrier"
    assert len(document["idle"]["2"]["horovod"]["idle_percent_of_a_core"]) == 2


def test_the_backend_of_torch_distributed_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run("torch_distributed.py", "--quick", "--np", "2", "--sizes", "4,64K", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 2 * 5 + 1
    for row in document["rows"]:
        assert set(row["figures"]) == {"backend", "gloo", "horovod"}
        for figure in row["figures"].values():
            assert figure["values_checked"] > 0 or row["operation"] == "barrier"


@pytest.mark.parametrize("hosts", [("1",), ("2", "--ipv6")], ids=["one rank each", "two ranks each, IPv6"])
def test_network_from_end_to_end(hosts: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    before = left_namespaces()
    options = ("--quick", "--rate", "1gbit", "--sizes", "4,1M", "--libraries", "horovod,gloo")
    done = run("network.py", *options, "--ranks-per-host", *hosts, "--json", str(file))
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [4, 1 << 20]
    for row in rows:
        assert all(figure["values_checked"] > 0 for figure in row["figures"].values())
        assert 0 < row["of_wire_bound"]["horovod"] < 1.5  # more would mean that nothing limits the rate
    assert left_namespaces() <= before
