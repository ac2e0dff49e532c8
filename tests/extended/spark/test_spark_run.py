"""`horovod.spark.run` and `run_elastic` on a local Spark, which runs three tasks at a time."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest
import spark_ranks
from error_codes import ends_with
from resources import eventually

import horovod.spark
from horovod.base.errors import LaunchCode, SettingCode, TrainingCode
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark import conf, job
from horovod.spark.common.backend import SparkBackend

READS_FROM_A_SERVICE = """
import json, sys
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
dataset = send_to_data_service(tf.data.Dataset.range(40).map(lambda number: number * 3), config, rank=0, size=1)
print(json.dumps([int(number) for number in dataset]))
config.compute_client().shutdown()
"""
FAILED = "Horovod detected that one or more processes exited with non-zero status"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def spark(made_context: Any) -> Any:
    """Two attempts for each task."""
    assert conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK[0] == "spark.task.maxFailures"
    settings = {"spark.executorEnv.OF_EXECUTORS": "1", "spark.executorEnv.HOROVOD_REPORT_SECONDS": "9"}
    return made_context("local[3,2]", settings)


def run(function: Any, *args: Any, **options: Any) -> list[Any]:
    return horovod.spark.run(function, args, num_proc=options.pop("num_proc", 2), **options)


def test_a_service_that_computes_data_sets(tmp_path: Path) -> None:
    from horovod.spark.tensorflow.compute_worker import main

    path = str(tmp_path / "config.json")
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT)):
        main(2, "compute", path, 60)  # for three workers
    service = threading.Thread(target=main, args=(1, "compute", path, 60, 2), daemon=True)
    service.start()
    done = subprocess.run(
        [sys.executable, "-c", READS_FROM_A_SERVICE, path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout)) == [3 * number for number in range(40)]
    service.join(60)
    assert not service.is_alive()
    assert not Path(path).exists()


def test_spark_takes_the_settings_together(spark: Any) -> None:
    """Tasks that are run again without end, on the same node, though nodes on which tasks fail may be left out."""
    jvm = spark._jvm.org.apache.spark
    settings = jvm.SparkConf(False)
    for name in ("ALWAYS_RESTART_FAILED_TASK", "BLACKLIST_ENABLED", "REUSE_NODE_ALWAYS_FOR_SAME_TASK"):
        settings.set(*getattr(conf, f"SPARK_CONF_{name}"))
    jvm.scheduler.HealthTracker.validateExcludeOnFailureConfs(settings)
    settings.set(conf.SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK[0], conf.SPARK_CONF_MAX_INT)
    with pytest.raises(Exception, match="maxTaskAttemptsPerNode"):
        jvm.scheduler.HealthTracker.validateExcludeOnFailureConfs(settings)


def test_results_places_variables_and_output() -> None:
    out, err = io.StringIO(), io.StringIO()
    names = ("OWN", "PATH", "HOME", "OF_EXECUTORS", "HOROVOD_REPORT_SECONDS", "HOROVOD_RANK")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_RANK", "9")
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "4096")
        found = horovod.spark.run(
            spark_ranks.place,
            ("given", *names, "HOROVOD_FUSION_THRESHOLD"),
            {"keyword": 3},
            num_proc=None,  # as many as Spark runs at a time
            env={"OWN": 4, "HOME": None},
            stdout=out,
            stderr=err,
        )
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert [one["local"] for one in found] == [(0, 3), (1, 3), (2, 3)]
    assert {(one["size"], one["sum"], one["folder"], one["values"]) for one in found} == {
        (3, 3.0, os.getcwd(), ("given", 3))
    }
    assert len({one["pid"] for one in found}) == 3
    for rank, one in enumerate(found):
        assert one["devices"] == []
        assert one["variables"] == {
            "OWN": "4",
            "PATH": os.environ["PATH"],
            "HOME": None,
            "OF_EXECUTORS": "1",
            "HOROVOD_REPORT_SECONDS": "9",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_FUSION_THRESHOLD": "4096",
        }
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:out {rank}" for rank in range(3)]
    assert sorted(err.getvalue().splitlines()) == [f"[{rank}]<stderr>:err {rank}" for rank in range(3)]


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("raise", "raised ZeroDivisionError: out of coffee (exit code 1)", LaunchCode.FUNCTION_RAISED),
        ("before init", "raised ZeroDivisionError: out of coffee (exit code 1)", LaunchCode.FUNCTION_RAISED),
        ("kill", "ended by signal 9 (SIGKILL)", LaunchCode.RANK_FAILED),
    ],
    ids=["raise", "before-init", "kill"],
)
def test_the_cause_of_a_failure(how: str, said: str, code: LaunchCode) -> None:
    """Not that of a victim, which raises at the same time."""
    with pytest.raises(RuntimeError, match=ends_with(code, FAILED, ": rank 1 on host", said)) as raised:
        run(spark_ranks.fail, how)
    assert str(raised.value).startswith(FAILED)
    assert ("in fail\n" in str(raised.value)) == (code is LaunchCode.FUNCTION_RAISED)


def test_a_rank_that_leaves_no_result() -> None:
    def end() -> None:
        spark_ranks.place()
        os._exit(0)

    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "Rank 0 on host", "there is no result")):
        run(end, num_proc=1)


def test_a_result_that_can_not_be_sent() -> None:
    def locked() -> Any:
        return {"lock": threading.Lock()}

    facts = (
        "rank 0 on host",
        "UnpicklableResultError",
        "of type dict",
        "['lock'] is of type _thread.lock",
        "cannot pickle",
    )
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FUNCTION_RAISED, FAILED, *facts)):
        run(locked, num_proc=1)


def test_too_few_slots_for_ever() -> None:
    """The number of slots of this Spark is final, so nothing is waited for."""
    for call in (
        lambda: run(spark_ranks.place, num_proc=8),
        lambda: horovod.spark.run_elastic(spark_ranks.place, num_proc=8),
        lambda: SparkBackend(8).check(),
    ):
        facts = "Timed out waiting for Spark tasks to start.", "num_proc asks for 8 tasks", "has 3 slots", "num_proc=3"
        with pytest.raises(TimeoutException, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, *facts)):
            call()


def test_slots_that_come_too_late(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up before Spark has got the job, which it must not begin later."""
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "0.001")
    with pytest.raises(Exception, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "3 slots now")) as raised:
        run(None, num_proc=3)
    assert str(raised.value).startswith("Timed out waiting for Spark tasks to start.")
    assert not any(thread.name.startswith("horovod-spark") for thread in threading.enumerate())
    assert eventually(lambda: not spark.statusTracker().getActiveJobsIds())


def test_a_job_that_the_user_cancels(spark: Any) -> None:
    """As notebooks cancel a cell: by its job group. The processes end, and so does the call."""
    lines: list[str] = []

    class Writer:
        def write(self, text: str) -> None:
            lines.append(text)
            if "".join(lines).count("pids") == 2:
                spark.cancelJobGroup("cell")

    spark.setJobGroup("cell", "of a notebook")
    try:
        with pytest.raises(RuntimeError, match=ends_with(LaunchCode.JOB_CANCELLED, "group cell")):
            run(spark_ranks.wait_for, "", stdout=Writer())
    finally:
        spark.setLocalProperty("spark.jobGroup.id", None)
    pids = [int(pid) for line in re.findall(r"pids (\d+) (\d+)", "".join(lines)) for pid in line[:1]]
    assert len(pids) == 2
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_ctrl_c() -> None:
    """It comes to the thread that called, as here; in the calls of a writer, or between them."""
    lines: list[str] = []

    class Writer:
        def write(self, text: str) -> None:
            lines.append(text)
            if "".join(lines).count("pids") == 2:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(spark_ranks.wait_for, "", stdout=Writer())
    pids = [int(pid) for pid in re.findall(r"pids (\d+) ", "".join(lines))]
    assert len(pids) == 2
    # PySpark's own handler of SIGINT has cancelled the job too: where that ends a task first, its guardian follows.
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_python_that_workers_do_not_have(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "pythonExec", "/nowhere/python")
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.HOST_INSTALLATION, "'/nowhere/python'")):
        run(spark_ranks.place)


def test_a_python_of_another_version(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(spark, "pythonVer", "2.7")
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.HOST_INSTALLATION, f"is {own} and that of", "2.7")):
        run(spark_ranks.place)


def test_a_python_without_horovod(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    monkeypatch.setattr(spark, "pythonExec", str(tmp_path / "bin" / "python"))
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.HOST_INSTALLATION, "no module 'horovod'")):
        run(spark_ranks.place)


def test_an_executable(tmp_path: Path) -> None:
    """Of the processes alone, and whatever else is said of how they run and print."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nBY=executable exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out, err = _Refusing(), io.StringIO()
    options = {"executable": str(python), "nics": "lo", "verbose": 2, "prefix_output_with_timestamp": True}
    with pytest.warns(RuntimeWarning, match="could not be written .*no room"):
        found = run(spark_ranks.place, "", "BY", num_proc=1, stdout=out, stderr=err, **options)
    assert found[0]["variables"] == {"BY": "executable"}
    assert re.search(r"^\S.*\[0\]<stderr>:err 0$", err.getvalue(), re.MULTILINE)
    assert "horovod.spark: " in err.getvalue()


def test_a_writer_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`write` returns only when the thread of the job has ended, which warns that it does not wait any longer."""
    monkeypatch.setattr(job, "LAST_OUTPUT_S", 0.1)

    class Slow:
        def write(self, text: str) -> None:
            for thread in threading.enumerate():
                if thread.name == "horovod-spark":
                    thread.join()

    def prints() -> None:
        print("x" * 100)

    with pytest.warns(RuntimeWarning, match="was not yet written 0.1 s after"):
        run(prints, num_proc=1, stdout=Slow())


class _Refusing:
    def write(self, text: str) -> None:
        raise ValueError("no room")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executable": "/nowhere/python"}, "exit code 127"),
        ({"executable": "a\0b"}, "can't be started or watched: ValueError: embedded null byte"),
        ({"env": {"LONG": "x" * (1 << 18)}}, "rank 0 cannot be started: Argument list too long"),
    ],
    ids=["not-there", "zero-byte", "too-long"],
)
def test_processes_that_can_not_be_started(options: dict[str, Any], said: str) -> None:
    """A task that starts none tells its driver, and so does one whose process ends at once."""
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "rank 0 on host", said)):
        run(spark_ranks.place, num_proc=1, **options)


def test_elastic_timeout() -> None:
    """A worker of Spark answers no more, as on a host that is out of reach, and Spark does not know."""
    options = {"elastic_timeout": 1, "env": {"HOROVOD_KEEPALIVE_TIMEOUT_SECONDS": 3}}
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "for 1 s, and the job needs 2")):
        horovod.spark.run_elastic(spark_ranks.elastic, (2, 5, {1: "stop"}), num_proc=2, **options)


def test_an_elastic_job_outlives_a_process_that_is_stopped() -> None:
    """That is continued when the others have done the work, hears of it, and ends."""
    environ = {"HOROVOD_ELASTIC_HUNG_SECONDS": "0.5"}
    found = horovod.spark.run_elastic(spark_ranks.outlive, ("stop",), num_proc=2, min_num_proc=1, env=environ)
    assert [one["slot"] for one in found] == [0]


def test_a_process_that_fails_when_others_have_ended_well() -> None:
    """Its result is missing."""
    facts = "rank 1 on host", "raised ZeroDivisionError: out of coffee", "Others had ended well"
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, *facts)):
        horovod.spark.run_elastic(spark_ranks.outlive, ("raise",), num_proc=2)


def test_elastic_limits() -> None:
    facts = "raised ZeroDivisionError: out of coffee", "number of resets during elastic job exceeded limit: 0"
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RESET_LIMIT, *facts)):
        horovod.spark.run_elastic(spark_ranks.elastic, (2, 5, {1: "raise"}), num_proc=2, reset_limit=0)

    def fails_always() -> None:
        raise ZeroDivisionError("out of coffee")

    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "All processes", "there is no result")):
        horovod.spark.run_elastic(lambda: sys.exit(0), num_proc=1)
    facts = "rank 0 on host", "raised ZeroDivisionError: out of coffee"
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FAILED_AT_START, *facts, "before hvd.init()")):
        horovod.spark.run_elastic(fails_always, num_proc=1)

    def fails_in_each_world() -> None:
        from horovod.common import basics as hvd

        hvd.init()
        fails_always()

    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, *facts, "spark.task.maxFailures")):
        horovod.spark.run_elastic(fails_in_each_world, num_proc=1)
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, "2, 1 and 1")):
        horovod.spark.run_elastic(fails_always, num_proc=1, min_num_proc=2)


def test_what_makes_no_sense() -> None:
    for options, code in (
        ({"num_proc": 0}, SettingCode.INVALID_SETTING),
        ({"use_mpi": True}, LaunchCode.UNSUPPORTED_OPTION),
        ({"start_timeout": -1}, SettingCode.INVALID_SETTING),
        ({"env": {"HOROVOD_CYCLE_TIME": "x"}}, SettingCode.INVALID_SETTING),
        ({"env": {"A=B": "1"}}, SettingCode.INVALID_SETTING),
        ({"env": {"A": "1\0"}}, SettingCode.INVALID_SETTING),
        ({"stdout": 1}, SettingCode.INVALID_SETTING),
        ({"verbose": "2"}, SettingCode.INVALID_SETTING),
    ):
        with pytest.raises(ValueError, match=ends_with(code)):
            run(spark_ranks.place, **options)
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "fn must be a function", "'place'")):
        run("place")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "reset_limit", "'2'")):
        horovod.spark.run_elastic(spark_ranks.place, num_proc=1, reset_limit="2")  # type: ignore[arg-type]
