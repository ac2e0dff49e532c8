"""Runs the commands of docs/backup.md while jobs train, and checks which jobs and worlds a restored store has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import etcd_server
import psutil
import pytest
from agents import DEADLINE_S, Agents, CoordinatorProcess
from error_codes import ends_with
from etcd_server import READY_S, Etcd
from launching import STEPS, Launched

from horovod.base.errors import ClusterCode, WorldCode

Launch = Callable[..., Launched]
Program = Callable[[str], list[str]]

PAGE = Path(__file__).parents[3] / "docs" / "backup.md"
TRAINS = f"""{STEPS}
if rank == 0:
    open(GO).read()
step("after a new agreement")
"""


def commands(number: int) -> list[str]:
    """Of one block of the page: 0 and 1 back up, 2 and 3 restore, each SQLite before etcd."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[number].splitlines()


HEADER = "import os, sys\nrank = int(os.environ['HOROVOD_RANK'])\n"


@dataclass
class Job:
    launched: Launched
    go: Path

    def go_on(self) -> tuple[int, str, str]:
        """Lets it end; its exit code and the rest of its output."""
        with self.go.open("w"):
            pass
        return self.launched.finish()


class Site:
    """A store, the coordinator on it, and an agent."""

    def __init__(self, folder: Path, kind: str, stack: ExitStack) -> None:
        self.folder = folder
        self._kind = kind
        self._services: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        self._paths: Mapping[str, str] = {"/backup": str(folder / "backup")}
        if kind == "etcd":
            etcd = self._etcd = stack.enter_context(Etcd(folder / "etcd"))
            store = etcd.url
            self._paths = {
                **self._paths,
                "/var/lib/etcd": str(folder / "etcd" / "node0"),
                "--name NAME": "--name node0",
                "NAME=PEER-URL": f"node0={etcd._peers[0]}",
                "PEER-URL": etcd._peers[0],
                "etcdctl": f"ETCDCTL_API=3 {etcd_server.program_of('etcdctl')} --endpoints={etcd.endpoints[0]}",
                "etcdutl": str(etcd_server.program_of("etcdutl")),
            }
            self._services["etcd"] = (lambda: etcd.start(0).wait(READY_S), lambda: etcd.kill(0))
        else:
            (folder / "state").mkdir(mode=0o700)
            self._paths = {**self._paths, "/var/lib/horovod-coordinator": str(folder / "state")}
            store = f"sqlite:{folder}/state/store"
        self.coordinator = CoordinatorProcess(folder, "--store", store)
        self._services["horovod-coordinator"] = (self.coordinator.start, self.coordinator.stop)
        (folder / "backup").mkdir(mode=0o700, exist_ok=True)
        self.agents = stack.enter_context(Agents(folder, coordinator=self.coordinator))
        self.agents.add("h1", 3)

    def back_up(self) -> None:
        self._run(commands(0 if self._kind == "sqlite" else 1))

    def restore(self) -> None:
        self._run(commands(2 if self._kind == "sqlite" else 3))

    def ranks(self, program: str) -> list[psutil.Process]:
        found = psutil.Process(self.agents.processes["h1"].pid).children(recursive=True)
        return [one for one in found if one.cmdline()[-1].endswith(program)]

    def _run(self, lines: list[str]) -> None:
        for line in lines:
            if found := re.fullmatch(r"systemctl (start|stop) (\S+)", line):
                start, stop = self._services[found[2]]
                assert (start if found[1] == "start" else stop)() is not False
            elif not line.startswith("horovodrun"):
                command = line
                for name, here in self._paths.items():
                    command = re.sub(rf"(?<![\w/-]){re.escape(name)}(?!-)", here, command)
                subprocess.run(["bash", "-ec", command], check=True, capture_output=True, timeout=DEADLINE_S)


@pytest.fixture(params=["sqlite", "etcd"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "etcd" and etcd_server.missing():
        pytest.skip(etcd_server.missing())
    with ExitStack() as stack:
        yield Site(tmp_path, request.param, stack)


@pytest.fixture
def start(site: Site, tmp_path: Path, launch: Launch) -> Callable[..., Job]:
    """start(name, ranks, before="") submits a job, and returns when it has printed a line for each rank."""

    def submit(name: str, ranks: int, before: str = "") -> Job:
        go, source = tmp_path / f"{name}.go", tmp_path / f"{name}.py"
        os.mkfifo(go)
        source.write_text(HEADER + before + TRAINS.replace("GO", repr(str(go))))
        patient = {**site.agents.environ, "HOROVOD_REATTACH_GRACE_SECONDS": "300"}  # for a busy machine
        job = launch(*site.agents.options, "-np", str(ranks), sys.executable, str(source), environ=patient)
        assert len(job.lines(ranks)) == ranks
        return Job(job, go)

    return submit


def test_jobs_of_the_backup_go_on_and_later_ones_end(site: Site, start: Callable[..., Job]) -> None:
    job = start("first", 2)
    site.back_up()
    later = start("later", 1)
    ranks = site.ranks("later.py")
    site.restore()
    code, out, err = job.go_on()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:after a new agreement 3" for rank in range(2)]
    code, _, err = later.launched.finish()
    assert code == 1
    assert re.search(ends_with(ClusterCode.UNKNOWN_JOB), err), err
    assert psutil.wait_procs(ranks, timeout=DEADLINE_S)[1] == []
    assert start("next", 3).go_on()[0] == 0


def test_a_world_that_formed_after_the_backup_ends_when_it_needs_the_coordinator(
    site: Site, start: Callable[..., Job], tmp_path: Path
) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)
    job = start("first", 2, f"print('started', flush=True)\nif rank == 0:\n    open({str(began)!r}).read()\n")
    site.back_up()
    with began.open("w"):
        pass
    assert len(job.launched.lines(2)) == 2  # the world has formed
    site.restore()
    code, out, err = job.go_on()
    assert (code, out) == (1, "")
    assert f"[{WorldCode.UNKNOWN_WORLD}]" in err
