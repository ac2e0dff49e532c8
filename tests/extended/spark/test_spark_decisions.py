"""What is decided without a Spark: whose failure it is, what Spark's own errors mean, what a process is given."""

from __future__ import annotations

import pytest
from error_codes import ends_with

from horovod.base.errors import LaunchCode, WorldCode
from horovod.runner.common.util.host_hash import host_hash
from horovod.spark.attending import Attempt
from horovod.spark.conf import SPARK_CONF_DEFAULT_VALUES
from horovod.spark.failures import Failure, cause_of, has_cause, of_spark, sentence_of
from horovod.spark.fixed import FixedSize
from horovod.spark.task import messages
from horovod.spark.task.attend import environment, unreachable

VICTIM = Failure(0, "a", code=1, error="HorovodInternalError: Rank 1 was lost.")
STOPPED = Failure(3, "a", code=-15, stopped=True)
RAISED = Failure(2, "b", code=1, error="ValueError: no [x]")
KILLED = Failure(1, "b", code=-9)
LOST = Failure(1, "b", lost="its executor is gone")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([VICTIM, RAISED], RAISED),
        ([RAISED, VICTIM], RAISED),
        ([VICTIM, RAISED, KILLED], KILLED),
        ([STOPPED, VICTIM, LOST], LOST),
        ([STOPPED, VICTIM], STOPPED),
    ],
)
def test_the_cause(failures: list[Failure], cause: Failure) -> None:
    assert cause_of(failures) is cause
    assert has_cause(failures) == (cause is not STOPPED)


def test_the_sentence_of_a_lost_task() -> None:
    said = sentence_of(LOST)
    assert "rank 1 on host b is lost: its executor is gone" in said
    assert said.endswith(f"[{LaunchCode.RANK_FAILED}]")


@pytest.mark.parametrize(
    ("text", "code", "fact"),
    [
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            LaunchCode.HOST_INSTALLATION,
            "workers is 3.10 and that of the driver 3.11",
        ),
        ("ModuleNotFoundError: No module named 'horovod.spark'", LaunchCode.HOST_INSTALLATION, "'horovod.spark'"),
        (f"error\n: trace\nRuntimeError: {unreachable('h:1', 'w')}\n at", WorldCode.COORDINATOR_UNREACHABLE, "h:1"),
        ("An error occurred.\n: Job 3 cancelled\n at x", LaunchCode.RANK_FAILED, "failed: Job 3 cancelled."),
    ],
)
def test_what_spark_says(text: str, code: LaunchCode, fact: str) -> None:
    with pytest.raises(RuntimeError, match=ends_with(code, fact)):
        raise RuntimeError(of_spark(text))


def test_what_a_process_is_given() -> None:
    start = messages.Start({"OWN": "1", "PYTHONPATH": "/user"}, ["GONE"], "", False)
    task = {"HOROVOD_RANK": "7", "SLURM_PROCID": "3", "GONE": "x", "PATH": "/bin", "PYTHONPATH": "/executor"}
    found = environment(task | {"HADOOP_TOKEN_FILE_LOCATION": "/t"}, start, ["2", "3"], ["/files"])
    assert found == {
        "OWN": "1",
        "PATH": "/bin",
        "PYTHONPATH": "/user:/executor:/files",
        "HADOOP_TOKEN_FILE_LOCATION": "/t",
        "HOROVOD_SPARK_GPUS": "2,3",
    }


def test_ranks_are_counted_host_by_host() -> None:
    on = ["a", "b", "a"]
    attempts = {number: Attempt(messages.Came(number, 0, host, host, []), 1) for number, host in enumerate(on)}
    places = FixedSize.places(attempts)
    assert {partition: (one.rank, one.local_rank) for partition, one in places.items()} == {
        0: (0, 0),
        2: (1, 1),
        1: (2, 0),
    }


def test_hosts_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_hash() == host_hash()
    assert host_hash("x") != host_hash()
    before = host_hash()
    monkeypatch.setenv("CONTAINER_ID", "container_1")
    assert host_hash() != before
    came = messages.Came(1, 2, "h", "h-1", ["0"])
    assert messages.read(messages.written(came)) == came
    assert not messages.is_output(messages.written(came))
    with pytest.raises(ValueError, match="not a message"):
        messages.read(b'["Nothing", {}]')
    assert all(not name.startswith("spark.blacklist") for name in SPARK_CONF_DEFAULT_VALUES)
