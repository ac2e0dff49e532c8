"""The launchers of CONTRIBUTING.md, run as they stand there: what is tested is the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching_fixtures import HEADER
from test_found_hosts import FOLLOWS, took

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CHAPTER = PAGE.partition("\n## A new launcher\n")[2].partition("\n## ")[0]
FILE = r"^New file `clients/horovod/launch/(.*?)`:\n\n```python\n(.*?)^```$"
LINE = r"launchers.py`, before `(.*?)`:\n\n```text\n(.*?)\n```$"
FILES = dict(re.findall(FILE, CHAPTER, re.DOTALL | re.MULTILINE))
PROGRAM = """
import sys
from horovod.common import basics as hvd
hvd.init()
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
open(f"{sys.argv[1]}/{hvd.rank()}", "w").write(repr(place))
sys.exit(3 * (hvd.rank() == 2))
"""
# As the launcher of the page would be called if it were in the package: in its folder, and in the list.
WITH_PODS = """
import sys
import horovod.launch
horovod.launch.__path__.append(sys.argv.pop(1))
from horovod.launch.launchers import LAUNCHERS
LAUNCHERS.insert(LAUNCHERS.index({before!r}), {name!r})
from horovod.launch.__main__ import run_commandline
run_commandline()
"""
# A pod is a process on this host; the number of its agent's process stands in a file.
KUBECTL = """#!/bin/sh
[ "$1 $2 $4 $5 $6" = "exec -i -- sh -c" ] || exit 9
case "$3" in pod-*) ;; *) echo "Error from server (NotFound): pods \\"$3\\" not found" >&2; exit 1;; esac
echo $$ > "$(dirname "$0")/$3.pid"
exec sh -c "$7"
"""


def test_the_launcher_of_the_page(tmp_path: Path) -> None:
    module: dict[str, Any] = {}
    exec(compile(FILES["children.py"], "children.py", "exec"), module)
    assert module["launch"]([sys.executable, "-c", PROGRAM, str(tmp_path)], ["h1", "h1", "h2"]) == [0, 0, 3]
    told = [eval((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert told == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]


class Pods:
    """`pods.run(*arguments)` runs `horovodrun` with the page's launcher for pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(KUBECTL)
        self.kubectl.chmod(0o755)
        (folder / "pods.py").write_text(FILES["pods.py"])
        ((before, line),) = re.findall(LINE, CHAPTER, re.MULTILINE)
        (self.before,), (self.name,) = eval(f"({before})"), eval(f"({line.strip()})")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        main = WITH_PODS.format(before=self.before, name=self.name)
        command = [sys.executable, "-c", main, str(self.folder), *arguments]
        environ = {**os.environ, "KUBECTL": str(self.kubectl)}
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


def test_an_elastic_job_in_pods_loses_a_host_and_grows(pods: Pods) -> None:
    hosts, program = pods.folder / "hosts", pods.folder / "program.py"
    hosts.write_text("pod-a:1\npod-b:1")
    # All of a host: its agent, the shim of the job there, and the process that trains.
    killed = f"""
if first[1] == "pod-b":
    for pid in (int(open("{pods.folder}/pod-b.pid").read()), os.getppid(), os.getpid()):
        os.kill(pid, signal.SIGKILL)
"""
    then = [killed, "find('pod-a:1 pod-c:1')"]
    values = {"SIZES": [2, 1, 2], "NEXT": then, "HOSTS": str(hosts)}
    program.write_text(HEADER + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + FOLLOWS)
    options = ["-np", "2", "--min-np", "1", "--host-discovery-script", f"cat {hosts}"]
    done = pods.run(*options, sys.executable, str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[3] for line in took(done.stdout)] == ["pod-a", "pod-c"], done.stdout
    assert "Host pod-b is set aside" in done.stderr


def test_what_kubectl_refuses_is_told_of_its_pod(pods: Pods) -> None:
    done = pods.run("-np", "2", "-H", "pod-a:1,other:1", "true")
    assert done.returncode == 1
    assert "other: kubectl refuses: Error from server (NotFound)" in done.stderr
    pods.kubectl.unlink()
    assert "[missing-program]" in pods.run("-np", "1", "-H", "pod-a:1", "true").stderr


@pytest.mark.parametrize("name", re.findall(r"`((?:launch|worker|coordinator)/[\w/]+\.py)`", PAGE))
def test_files_that_the_page_names(name: str) -> None:
    assert (ROOT / name).exists() or (ROOT / "clients" / "horovod" / name).exists()
