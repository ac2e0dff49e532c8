"""Job files on two agents with two coordinators on one etcd: lines in turn, shipped code, faults."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import etcd_server
import pytest
from error_codes import ends_with
from etcd_server import Etcd
from launching import Launched
from replicated import TOKEN, Replicated, replicated

from horovod.base.errors import LaunchCode

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "jobs" / "digits.yaml"


@dataclass
class Hosts:
    """h1 and h2 with two slots each."""

    cluster: Replicated

    @contextlib.contextmanager
    def submit(self, file: Path, *options: str) -> Iterator[Launched]:
        """The launcher that follows the job of this file."""
        environ = {"HOROVOD_TOKEN": TOKEN, "SECRET_OF_THE_SHELL": "x"}
        launched = Launched("submit", "--coordinator", self.cluster.addresses, *options, str(file), environ=environ)
        try:
            yield launched
        finally:
            launched.clean_up()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with Etcd(folder / "etcd") as etcd, replicated(etcd.url, folder) as cluster:
        for name in ("h1", "h2"):
            cluster.start_agent(name, 2)
        yield Hosts(cluster)


def test_the_example_trains(hosts: Hosts) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    with hosts.submit(EXAMPLE) as launched:
        code, out, err = launched.finish()
    assert code == 0, err
    first, *_, last = (line for line in out.splitlines() if "NCCL" not in line)
    assert (first.partition(":")[2], last) == ("1797 images", "[0]<stdout>:trained by 2 workers")
    assert float(out.partition("[0]<stdout>:test accuracy: ")[2].partition("\n")[0]) > 0.8


def test_a_dry_run_shows_the_placement(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("workers: 2\nslots: 2\nrun:\n  - echo a\n  - distributed: echo b\n")
    with hosts.submit(file, "--dry-run") as launched:
        code, out, err = launched.finish()
    assert (code, err) == (0, "")
    assert (
        out
        == """\
2 workers of 1 process each; the job file is in order.
1. echo a  (2 processes)
2. echo b  (2 processes, distributed)
Worker 0: rank 0 on h1
Worker 1: rank 1 on h2
"""
    )


def test_a_failing_line_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("""\
workers: 2
slots: 2
run:
  - echo $HOROVOD_WORKER of $HOROVOD_WORKERS
  - test $HOROVOD_WORKER = 0 || exit 7
  - distributed: echo never
""")
    with hosts.submit(file) as launched:
        code, out, err = launched.finish()
    assert code == 7
    assert sorted(out.splitlines()) == ["[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]
    facts = ["Line 2 of 3 (`test $HOROVOD_WORKER = 0 || exit 7`)", "worker 1 on host h2 (pid ", "exit code 7"]
    assert re.search(ends_with(LaunchCode.RANK_FAILED, *facts), err)


def test_lines_wait_for_each_other_and_outlive_a_coordinator(hosts: Hosts, tmp_path: Path) -> None:
    """While worker 1 has finished the first line and worker 0 has not, the coordinator that serves is killed, and the
    agent of worker 1 as well; another one finds its shim.
    """
    go, marks = tmp_path / "go", tmp_path / "marks"
    os.mkfifo(go)
    marks.mkdir()
    (tmp_path / "code" / "data").mkdir(parents=True)
    (tmp_path / "code" / "data" / "word").write_text("shipped")
    (tmp_path / "code" / ".horovodignore").write_text("*.log\n")
    (tmp_path / "code" / "big.log").write_text("stays here")
    (tmp_path / "code" / "first.py").write_text(f"""\
import os, pathlib
worker = os.environ["HOROVOD_WORKER"]
assert "HOROVOD_RANK" not in os.environ and "SECRET_OF_THE_SHELL" not in os.environ
assert not pathlib.Path("big.log").exists()
if worker == "0":
    print("waits", flush=True)
    open({str(go)!r}).read()
pathlib.Path("mine").write_text(worker)
pathlib.Path({str(marks)!r}, worker).touch()
print("prepared", flush=True)
""")
    (tmp_path / "code" / "second.py").write_text(f"""\
import os, pathlib
mine, word = (pathlib.Path(name).read_text() for name in ("mine", "data/word"))
told = [os.environ[name] for name in ("HOROVOD_RANK", "HOROVOD_SIZE")]
print("rank {{}} of {{}}".format(*told), mine, word, sorted(os.listdir({str(marks)!r})))
""")
    file = tmp_path / "job.yaml"
    file.write_text(f"""\
name: lines
workers: 2
slots: 2
code: code
run:
  - {sys.executable} first.py
  - distributed: {sys.executable} second.py
  - echo closing
""")
    with hosts.submit(file) as launched:
        assert sorted(launched.lines(2)) == ["[0]<stdout>:waits", "[1]<stdout>:prepared"]
        hosts.cluster.kill_first()
        hosts.cluster.agents["h2"].kill()
        hosts.cluster.agents["h2"].wait()
        hosts.cluster.start_agent("h2", 2)
        with go.open("w"):
            pass
        code, out, err = launched.finish()
    assert code == 0, err
    lines = out.splitlines()  # in the order in which each rank wrote them; the output of another host may come earlier
    for rank, left in ((0, ["prepared"]), (1, [])):
        told = [*left, f"rank {rank} of 2 {rank} shipped ['0', '1']", "closing"]
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [f"[{rank}]<stdout>:{one}" for one in told]
    assert len(lines) == 5
    for host in ("h1", "h2"):  # what is left are archives; the folders of workers are gone
        assert list((hosts.cluster.folder / host / "work").glob("lines-*")) == []
        assert [
            path.name[:4] for path in (hosts.cluster.folder / host / "code").iterdir() if len(path.name) != 64
        ] == []
