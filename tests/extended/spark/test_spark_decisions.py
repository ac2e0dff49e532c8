"""What is decided without a Spark: whose failure it is, what Spark's own errors mean, what a process is given."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
from error_codes import ends_with
from event_words import tells
from py4j.protocol import Py4JError
from pyspark import SparkConf

from horovod.base.errors import DataCode, LaunchCode, TrainingCode, WorldCode
from horovod.base.settings import Settings
from horovod.launch.own_coordinator import HostNames, OwnCoordinator
from horovod.runner.common.util.host_hash import host_hash
from horovod.spark.attending import Attempt
from horovod.spark.cluster import SparkCluster, never_enough, slots_of, still_waiting, why_unusable
from horovod.spark.common.data_files import is_without_file_system, refused_by_file_system, task_failed
from horovod.spark.conf import SPARK_CONF_DEFAULT_VALUES
from horovod.spark.failures import (
    Failure,
    cause_of,
    has_cause,
    is_cancelled,
    not_repeated,
    of_spark,
    repeated,
    said,
    sentence_of,
)
from horovod.spark.policies import Elastic, Failed, FixedSize, rules_of
from horovod.spark.task import messages
from horovod.spark.task.attend import Order, Output, environment, unreachable
from horovod.worker.agent.orders import signalled
from horovod.worker.agent.output import QUEUE_LIMIT_BYTES

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


def test_the_failure_that_ended_an_elastic_job() -> None:
    """Not that of a peer, nor of a task that Spark killed after it had given up."""
    last = replace(RAISED, incarnation=2)
    assert repeated([RAISED, VICTIM, last, VICTIM, VICTIM, LOST]) is last
    assert repeated([VICTIM]) is VICTIM


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("Task 2 in stage 0.0 failed 4 times", LaunchCode.RANK_FAILED, ("rank 2 on host b raised", "maxFailures")),
        (
            "Aborting TaskSet 0.0 because task 2 (partition 2)\ncannot run anywhere due to node excludeOnFailure.",
            LaunchCode.RANK_FAILED,
            ("rank 2 on host b raised", "spark.excludeOnFailure"),
        ),
        ("Job 0 cancelled because SparkContext was shut down", LaunchCode.JOB_CANCELLED, ("SparkContext was shut",)),
    ],
    ids=["attempts", "excluded", "stopped"],
)
def test_why_spark_runs_a_task_no_more(text: str, code: LaunchCode, facts: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match=ends_with(code, *facts)):
        raise RuntimeError(not_repeated(RAISED, text))


@pytest.mark.parametrize(
    ("master", "host", "address"),
    [
        ("local[4]", "driver", None),
        ("local-cluster[2,1,1024]", "driver", None),
        ("spark://head:7077", "driver", "driver"),
        ("yarn", "node-7.example", "node-7.example"),
        ("k8s://https://api:6443", "train-driver-svc.jobs.svc", "train-driver-svc.jobs.svc"),
        ("k8s://https://api:6443", "[fd00::7]", "[fd00::7]"),
    ],
)
def test_where_tasks_find_the_driver(master: str, host: str, address: str | None) -> None:
    """The driver need not know the name by which it is found, nor has that to be in its certificate."""
    cluster = SparkCluster(context_of(master, {"spark.driver.host": host}))
    coordinator = OwnCoordinator(Settings(), cluster.reached_at)
    try:
        own, _, port = coordinator.address.rpartition(":")
        assert int(port) > 0
        assert own == (address or "127.0.0.1")
        assert bool(coordinator.certificate) == (address is not None)
    finally:
        coordinator.stop()


@pytest.mark.parametrize(("allocation", "together"), [("false", True), ("TRUE", False)])
def test_tasks_begin_together(allocation: str, together: bool) -> None:
    settings = {"spark.dynamicAllocation.enabled": allocation, "spark.executorEnv.NAME": "value"}
    context = context_of("yarn", settings)
    cluster = SparkCluster(context)
    assert cluster.environ == {"NAME": "value"}
    cluster.run(Order("h:1", "token", "", None, 20), 2, together=True)
    assert context.parallelize.return_value.barrier.called == together


GPUS = {"spark.task.resource.gpu.amount": "0.5", "spark.executor.resource.gpu.amount": "1"}
DYNAMIC = {"spark.dynamicAllocation.enabled": "true"}
FOUR = {"spark.executor.instances": "3", "spark.executor.cores": "4"}


@pytest.mark.parametrize(
    ("master", "settings", "now", "most"),
    [
        ("local[4]", {}, 4, 4),
        ("local[*, 2]", {"spark.task.cpus": "2"}, 1, 1),
        ("local-cluster[2,5,1024]", {"spark.task.cpus": "2"}, 0, 4),
        ("yarn", FOUR, 0, 12),
        ("yarn", FOUR | GPUS, 0, 6),
        ("yarn", FOUR | DYNAMIC, 4, None),
        ("yarn", FOUR | DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "9"}, 4, 36),
        ("k8s://https://api:6443", {}, 0, 2),
        ("spark://head:7077", FOUR, 8, None),
        ("spark://head:7077", {"spark.cores.max": "8", "spark.task.cpus": "3"}, 0, 2),
        ("elsewhere://", FOUR, 1, None),
        ("local[2]", {}, None, None),
    ],
)
def test_how_many_tasks_spark_can_run(master: str, settings: dict[str, str], now: int | None, most: int | None) -> None:
    slots = slots_of(master, settings, now)
    assert slots.most == most
    assert never_enough(most or 1, "num_proc", slots) == ""
    if most is None:
        assert never_enough(1000, "num_proc", slots) == ""
        return
    sentence = never_enough(most + 1, "num_proc (the default)", slots)
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, master, f"num_proc={most} or less")):
        raise RuntimeError(sentence)


def test_what_is_told_of_tasks_that_are_waited_for() -> None:
    told = still_waiting(2, 8, 10, slots_of("yarn", {"spark.task.cpus": "2"}, 4))
    assert tells(told, "2 of 8 tasks", "10 s", "4 slots", "2 cores", "spark.task.cpus")
    assert "other jobs" in still_waiting(0, 8, 10, slots_of("yarn", {}, 8))
    assert tells(still_waiting(0, 8, 10, None), "0 of 8 tasks", "10 s")


def test_why_a_file_system_refuses() -> None:
    spark = "An error occurred while calling o1.\n: org.apache.spark.SparkException: Job aborted.\n\tat a.b(C.java:1)"
    hadoop = "Caused by: org.apache.hadoop.security.AccessControlException: Permission denied: user=me, access=WRITE"
    assert refused_by_file_system(f"{spark}\n{hadoop}\n\tat x") == "Permission denied: user=me, access=WRITE"
    local = ": java.io.IOException: Mkdirs failed to create file:/proc/x (exists=false, cwd=file:/)"
    assert refused_by_file_system(local).startswith("Mkdirs failed to create file:/proc/x")
    assert refused_by_file_system(f"{spark}\nZeroDivisionError: division by zero") == ""


def context_of(master: str, settings: dict[str, str]) -> Any:
    """What SparkCluster asks of a SparkContext."""
    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        conf.set(name, value)
    return MagicMock(master=master, getConf=lambda: conf)


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
        (
            "An error occurred.\n: a.b.SparkException: [SPARK_JOB_CANCELLED] Job 3 cancelled part of x SQLSTATE: XXKDA",
            LaunchCode.JOB_CANCELLED,
            "cancelled: Job 3 cancelled part of x.",
        ),
        (
            "(org.apache.spark.SparkSQLException) [OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008",
            LaunchCode.JOB_CANCELLED,
            "cancelled: Operation has been canceled.",
        ),
        ("Answer from Java side is empty", LaunchCode.JOB_CANCELLED, "Java process of the Spark driver has ended"),
        ("BarrierJobRunWithDynamicAllocationException: [SPARK-24942]: no", LaunchCode.UNSUPPORTED_OPTION, "Connect"),
        (
            '<_Rendezvous of RPC that terminated with:\n\tstatus = X\n\tdetails = "Sent message larger than max"\n>',
            LaunchCode.RANK_FAILED,
            "failed: Sent message larger than max.",
        ),
        ("An error occurred.\n: a.b.SparkException: It fell.\n at x", LaunchCode.RANK_FAILED, "failed: It fell."),
    ],
)
def test_what_spark_says(text: str, code: LaunchCode, fact: str) -> None:
    with pytest.raises(RuntimeError, match=ends_with(code, fact)):
        raise RuntimeError(of_spark(text))


@pytest.mark.parametrize(
    ("text", "is_without"),
    [
        ('(org.apache.hadoop.fs.UnsupportedFileSystemException) No FileSystem for scheme "s3"', True),
        (
            "o40.parquet.\n: java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
            True,
        ),
        (
            "java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.azure.NativeAzureFileSystem$Secure not found",
            True,
        ),
        ("org.apache.hadoop.fs.s3a.auth.NoAuthWithAWSException: No AWS Credentials provided", False),
        ("java.lang.ClassNotFoundException: Class com.example.Committer not found", False),
    ],
)
def test_whether_spark_can_write_to_a_store(text: str, is_without: bool) -> None:
    assert is_without_file_system(text) == is_without


def test_why_tasks_could_not_write() -> None:
    spark = (
        "Job aborted: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown: Trace"
    )
    for raised, facts in (
        ("ImportError: s3a://b/x: Install s3fs to access S3 [missing-data-package]", ["s3fs", "all executors"]),
        ("ModuleNotFoundError: No module named 'horovod'", ["'horovod'", "all executors"]),
        ("PermissionError: s3a://b/x can't be used: Forbidden. [data-store-failed]", ["Forbidden", "fsspec"]),
    ):
        error = task_failed("s3a://b/data", f'{spark}\n  File "x.py", line 1\n{raised}\n SQLSTATE: 38000')
        assert error is not None
        with pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, "s3a://b/data", *facts)):
            raise error
    assert task_failed("s3a://b/data", f"{spark}\nZeroDivisionError: division by zero") is None


def test_a_context_that_can_not_be_used() -> None:
    context = context_of("local[2]", {})
    context._jsc.sc().isStopped.return_value = False
    assert why_unusable(context) == ""
    context._jsc.sc().isStopped.return_value = True
    assert "was stopped" in why_unusable(context)
    context._jsc.sc.side_effect = ConnectionRefusedError(111, "Connection refused")
    assert "Connection refused" in why_unusable(context)


def test_what_spark_said_before_pyspark_failed() -> None:
    """As in a call whose SparkContext is stopped meanwhile."""
    error = AttributeError("'NoneType' object has no attribute 'setCallSite'")
    error.__context__ = Py4JError("Job 0 cancelled because SparkContext was shut down")
    assert is_cancelled(said(error))
    assert said(ValueError("other")) == "other"


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


def test_hosts_keep_their_names() -> None:
    """Containers of one machine, of which the first one comes alone, and is lost."""
    names = HostNames()
    first = names.given([("aaaa1", "node")])["aaaa1"]
    others = names.given([("bbbb1", "node"), ("bbbb2", "node"), ("cccc", "other")])
    assert others == {"aaaa1": first, "bbbb1": "node-bbbb1", "bbbb2": "node-bbbb2", "cccc": "other"}
    assert names.given([("dddd", "node")])["dddd"] == "node-dddd"
    assert names.given([("aaaa1", "node")])["aaaa1"] == first == "node"


def test_output_that_waits_goes_in_one_message() -> None:
    async def sent() -> list[bytes]:
        output = Output()
        ended = messages.written(messages.Ended(1, 0, False))
        for piece in (b"a", b"b"):
            output.feed(0, "stdout", piece)
        output.feed(0, "stderr", b"c")
        output.put(ended)
        output.put(ended)
        assert not output.feed(0, "stdout", bytes(QUEUE_LIMIT_BYTES))
        told: list[bool] = []
        output.room = lambda: told.append(True)
        output.feed(0, "stdout", b"d")
        output.close()
        found = [content async for content in output]
        assert told == [True]
        return [content for content in found if content != ended]

    first, second, third, fourth = asyncio.run(sent())
    assert (first, second) == (messages.STDOUT + b"ab", messages.STDERR + b"c")
    assert (third, fourth) == (messages.STDOUT + bytes(QUEUE_LIMIT_BYTES), messages.STDOUT + b"d")


def test_hosts_and_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_hash() == host_hash()
    assert host_hash("x") != host_hash()
    before = host_hash()
    monkeypatch.setenv("CONTAINER_ID", "container_1")
    assert host_hash() != before
    came = messages.Came(1, 2, "h", "h-1", ["0"])
    ordered = messages.Ordered(signalled(2, stop=True))
    assert [messages.read(messages.written(one)) for one in (came, ordered)] == [came, ordered]
    assert not messages.is_output(messages.written(came))
    with pytest.raises(ValueError, match="not a message"):
        messages.read(b'["Nothing", {}]')
    assert all(not name.startswith("spark.blacklist") for name in SPARK_CONF_DEFAULT_VALUES)


def test_names_that_programs_for_earlier_releases_import() -> None:
    from horovod.spark import conf
    from horovod.spark.common.util import host_hash

    assert conf.SPARK_CONF_MAX_INT == conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK[1] == "2147483647"
    for kind in ("REUSE", "DONT_REUSE"):
        for scope in ("", "_IN_APP"):
            failing = getattr(conf, f"SPARK_CONF_{kind}_FAILING_NODE{scope}")
            assert failing == getattr(conf, f"SPARK_CONF_{kind}_FAILED_NODE{scope}")
            assert failing[0] in conf.SPARK_CONF_DEFAULT_VALUES
    assert host_hash() == host_hash() != host_hash("salt")
    assert int(conf.SPARK_CONF_MAX_INT_MINUS_ONE) == int(conf.SPARK_CONF_MAX_INT) - 1


def test_modules_that_programs_for_earlier_releases_import() -> None:
    import torch
    from packaging.version import Version

    import horovod.spark.keras.util
    import horovod.spark.tensorflow.compute_worker
    from horovod.spark.lightning import TorchEstimator
    from horovod.spark.lightning.estimator import MIN_PL_VERSION
    from horovod.spark.lightning.legacy import import_lightning, lightning_module

    pl = import_lightning()
    assert Version(MIN_PL_VERSION) <= Version(pl.__version__)
    model = torch.nn.Linear(2, 1)
    module = lightning_module(pl, model, torch.optim.SGD(model.parameters(), 0.1), None, ["x"], ["y"], None)
    assert isinstance(module, pl.LightningModule)
    assert module.model is model
    estimator = TorchEstimator(model=model)
    assert estimator.setNumGPUs(2).getNumGPUs() == estimator.getNumGpus() == 2
    keras = horovod.spark.keras.util.import_keras("keras")
    dense = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    content = horovod.spark.keras.util.to_bytes(dense)
    assert horovod.spark.keras.util.from_bytes(keras, content, None, compiled=False).count_params() == 3
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT)):
        horovod.spark.tensorflow.compute_worker.workers_of_each(2, 3)


class _Elastic:
    """A job of two slots whose tasks come again at once, as Spark does it where it always restarts them."""

    def __init__(self, limit: int, fewest: int = 1, epoch: int | None = 1) -> None:
        self.now_s, self.epoch = 0.0, epoch
        self.told: list[str] = []
        self.starts: list[tuple[float, int]] = []
        self.timers: list[tuple[float, Any]] = []
        self.policy = Elastic(
            rules_of(fewest, 2, limit, False),
            lambda attempt, place: self.starts.append((self.now_s, place.rank)),  # type: ignore[arg-type,func-returns-value]
            lambda attempt, rank: Failed("a", "raised ImportError: no [x]", True),
            lambda: self.epoch,
            self.told.append,
            lambda seconds, call: self.timers.append((self.now_s + seconds, call)),
            lambda: self.now_s,
        )

    def came(self, slot: int, number: int = 1) -> Attempt:
        attempt = Attempt(messages.Came(slot, number - 1, "a", "a", []), number)
        self.policy.came(attempt)
        return attempt

    def wait(self) -> None:
        """Until all processes that were put off have started."""
        timers, self.timers = self.timers, []
        for due_s, start in timers:
            self.now_s = max(self.now_s, due_s)
            start()

    def ends(self, attempt: Attempt, code: int) -> None:
        attempt.ended = messages.Ended(77, code, False)
        self.policy.ended(attempt)


def test_a_task_that_fails_at_its_start_is_put_off_while_the_other_one_goes_on() -> None:
    """Without end, as the other one is enough; the user is told each time."""
    job = _Elastic(limit=6)
    other = job.came(0)
    for number in range(1, 11):
        attempt = job.came(1, number)
        job.wait()
        job.ends(attempt, 1)
    assert not job.policy.has_failed
    assert len(job.told) == 10
    starts = [at_s for at_s, slot in job.starts if slot == 1]
    delays = [later - sooner for sooner, later in itertools.pairwise(starts)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    waiting = job.came(1, 11)
    job.ends(other, 0)
    assert isinstance(waiting.orders.get_nowait(), messages.Release)
    waiting.lost = True  # as its stream has ended without a word of its process
    job.policy.ended(waiting)
    job.wait()
    assert job.policy.is_over(running=0)
    assert not job.policy.has_failed


def test_tasks_that_all_fail_again_end_the_job() -> None:
    job = _Elastic(limit=6)
    for number in range(1, 5):
        attempts = [job.came(0, number), job.came(1, number)]
        job.wait()
        for attempt in attempts:
            if not job.policy.has_failed:
                job.ends(attempt, 1)
    assert len(job.starts) == 8
    assert re.search(ends_with(LaunchCode.RESET_LIMIT, "limit: 6", "without progress"), job.policy.verdict)


def test_a_task_that_fails_before_the_other_one_has_come_is_tried_again() -> None:
    job = _Elastic(limit=6, fewest=2, epoch=None)
    job.ends(job.came(0), 1)
    assert not job.policy.has_failed
    job.ends(job.came(1), 1)
    assert re.search(ends_with(LaunchCode.FAILED_AT_START, "ImportError"), job.policy.verdict)
