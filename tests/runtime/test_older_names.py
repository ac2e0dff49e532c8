"""Names that scripts and the tests of earlier releases import, where they look for them (docs/api.md lists them)."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

import pytest
from error_codes import ends_with

import horovod.runner
from horovod.base.errors import TrainingCode
from horovod.common import basics, compatibility, util
from horovod.common.process_sets import ProcessSet, register
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.common.util.timeout import Timeout, TimeoutException
from horovod.runner.util.threads import in_thread

LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "SLURM_", "RANK", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("ver", "target", "expected"),
    [("2.10.0", "2.9.1", True), ("2.9.1", "2.9.1", True), ("2.9.0", "2.9.1", False), ("2.9.1+cpu", "2.9.1", True)],
)
def test_versions(ver: str, target: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(ver, target) is expected


def test_cache() -> None:
    calls: list[int] = []

    @util._cache
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [double(2), double(2), double(number=3)] == [4, 4, 6]
    assert calls == [2, 3]


def test_basics_as_an_object() -> None:
    found = basics.HorovodBasics("/some/where", "mpi_lib")
    assert isinstance(found, compatibility.HorovodBasics)
    assert found.gloo_built() == basics.gloo_built()
    with pytest.raises(AttributeError):
        _ = found.no_such_function
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        found._get_process_set_ids_and_ranks()
    found.init()
    try:
        process_set = ProcessSet([0])
        register(process_set, 3)
        assert found._get_process_set_ids_and_ranks() == {0: [0], 3: [0]}
    finally:
        found.shutdown()


@pytest.mark.parametrize("module", ["horovod.common.util", "horovod.common.basics"])
def test_other_names_are_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(module).no_such_name


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}, (3, 4)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (1, 2),
        ),
    ],
)
def test_rank_and_size_before_init(
    variables: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert get_env_rank_and_size() == expected


def test_the_launcher() -> None:
    assert horovod.runner.run is horovod.run
    assert not hasattr(horovod.runner, "no_such_name")
    command = [sys.executable, "-m", "horovod.runner.launch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == horovod.__version__


def test_a_thread() -> None:
    seen: list[int] = []
    thread = in_thread(seen.append, (1,), name="one")
    thread.join(10)
    assert (seen, thread.name, thread.daemon) == ([1], "one", True)


@pytest.mark.parametrize("silent", [False, True])
def test_a_thread_that_fails(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    in_thread(int, ("x",), silent=silent).join(10)
    assert len(said) == (not silent)


def test_torch() -> None:
    mpi_ops = pytest.importorskip("horovod.torch.mpi_ops")
    assert mpi_ops.handle_average_backwards_compatibility(None, None) == basics.Average
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "op", "average")):
        mpi_ops.handle_average_backwards_compatibility(basics.Sum, True)
    assert mpi_ops._basics.is_initialized() is False


def test_a_timeout_and_a_key() -> None:
    later = Timeout(1000, message="Timed out waiting for {activity} after {timeout} s.")
    later.check_time_out_for("workers")
    assert 0 < later.remaining() <= 1000
    over = Timeout(-1, message="Timed out waiting for {activity} after {timeout} s.")
    assert over.timed_out()
    assert over.remaining() == 0
    with pytest.raises(TimeoutException, match="Timed out waiting for workers after -1 s"):
        over.check_time_out_for("workers")
    assert make_secret_key() != make_secret_key()
