"""What an agent starts for each line of a job file: commands, folders, variables and GPUs of workers and of ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode
from horovod.protos.v1 import agents_pb2 as pb
from horovod.worker.agent.environment import Workspaces, lines_of, workers_of

OWN = {"PATH": "/usr/bin", "HOROVOD_TOKEN": "the agent's own", "HOROVOD_SET_NUM_THREADS": "0", "PYTHONHOME": "/x"}


def share(**fields: object) -> pb.StartShare:
    """Workers 1 and 2 of three, with two processes each."""
    start = pb.StartShare(job="j", size=6, processes_per_worker=2, token="t", environment={"A": "1"}, **fields)  # type: ignore[arg-type]
    for index, rank in enumerate(range(2, 6)):
        start.ranks.add(
            rank=rank,
            local_rank=index,
            local_size=4,
            cross_rank=1,
            cross_size=2,
            gpus=[str(2 * index), str(2 * index + 1)],
        )
    start.lines.add(command=["sh", "-c", "prepare"])
    start.lines.add(command=["python", "train.py"], distributed=True)
    return start


def test_a_plain_line_once_on_each_worker_a_distributed_one_for_each_process(tmp_path: Path) -> None:
    start = share()
    folders = Workspaces(tmp_path).make("a/job", len(workers_of(start)))
    plain, distributed = lines_of(start, OWN, folders, coordinator="c:1", host="h2")
    assert [(slot.rank, slot.command, slot.directory) for slot in plain] == [
        (2, ["sh", "-c", "prepare"], str(tmp_path / "work" / "a%2Fjob" / "worker.0")),
        (4, ["sh", "-c", "prepare"], str(tmp_path / "work" / "a%2Fjob" / "worker.1")),
    ]
    for worker, slot in enumerate(plain, 1):
        told = {name: value for name, value in slot.environ.items() if name.startswith("HOROVOD_")}
        assert told == {"HOROVOD_WORKER": str(worker), "HOROVOD_WORKERS": "3", "HOROVOD_SET_NUM_THREADS": "0"}
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in plain] == ["0,1,2,3", "4,5,6,7"]
    assert [slot.rank for slot in distributed] == [2, 3, 4, 5]
    assert [slot.environ["HOROVOD_WORKER"] for slot in distributed] == ["1", "1", "2", "2"]
    assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in distributed] == ["0,1", "2,3", "4,5", "6,7"]
    assert [slot.directory for slot in distributed] == [one.directory for one in plain for _ in range(2)]
    assert distributed[0].environ["HOROVOD_TOKEN"] == "t"
    assert distributed[0].environ["A"] == plain[0].environ["A"] == "1"


def test_a_directory_goes_before_the_folders_of_workers(tmp_path: Path) -> None:
    lines = lines_of(share(directory="/shared"), OWN, [tmp_path] * 2, coordinator="c:1", host="h2")
    assert {slot.directory for line in lines for slot in line} == {"/shared"}


def test_programs_of_a_python_environment_come_first(tmp_path: Path) -> None:
    start = share(python_environment=str(tmp_path))
    with pytest.raises(ValueError, match=ends_with(ClusterCode.NO_PYTHON_ENVIRONMENT, f"'{tmp_path}/bin/python'")):
        lines_of(start, OWN, [tmp_path] * 2, coordinator="c:1", host="h2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for line in lines_of(start, OWN, [tmp_path] * 2, coordinator="c:1", host="h2"):
        for slot in line:
            assert slot.environ["PATH"] == f"{tmp_path}/bin:/usr/bin"
            assert slot.environ["VIRTUAL_ENV"] == str(tmp_path)
            assert "PYTHONHOME" not in slot.environ


def test_folders_of_jobs_that_are_over_go_with_the_next_agent(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    workspaces.make("a/1", 2)
    workspaces.make("b", 1)
    Workspaces(tmp_path).clear(["a/1"])
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["a%2F1"]


def test_a_file_with_mistakes_is_not_submitted(
    horovodrun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """No coordinator is asked: nothing listens there."""
    file = tmp_path / "job.yaml"
    file.write_text("worker: 1\nworkers: 0\nrun: [a]\n")
    done = horovodrun("submit", "--coordinator", "127.0.0.1:1", str(file))
    assert done.returncode == 2
    facts = [f"horovodrun: {file}, line 1: ", "'worker'", f"\n{file}, line 2: ", "'workers'"]
    assert re.search(ends_with(ClusterCode.WRONG_JOB_FILE, *facts), done.stderr)
    assert done.stderr.count("\n") == 2
    done = horovodrun("submit", "--coordinator", "127.0.0.1:1", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert re.search(ends_with(ClusterCode.WRONG_JOB_FILE, str(tmp_path / "none.yaml"), "No such file"), done.stderr)
