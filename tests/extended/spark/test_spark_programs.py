"""Whole programs, with a Spark of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from resources import eventually

from horovod.base.errors import LaunchCode, SettingCode

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "spark_run_digits.py"
pytestmark = pytest.mark.timeout(600)


def test_the_example_learns() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "8"],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": "--master local[2] --conf spark.ui.enabled=false pyspark-shell"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[0\]<stdout>:epoch 7: loss 0\.\d+$", done.stdout, re.MULTILINE)
    accuracy = re.search(r"^test accuracy: (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 0.93


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import cloudpickle
import spark_ranks
from pyspark import SparkConf, SparkContext
import horovod.spark
cloudpickle.register_pickle_by_value(spark_ranks)
SparkContext("local[2]", conf=SparkConf().set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false"))
horovod.spark.run(spark_ranks.wait_for, ("",), num_proc=2)
"""


def test_a_driver_that_is_killed() -> None:
    """Nobody tells the tasks; nothing stays."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(HERE)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout is not None
        pids: list[int] = []
        while len(pids) < 4:
            line = driver.stdout.readline()
            assert line, "the driver has ended"
            pids += [int(pid) for pid in re.findall(r"\d+", line.partition(":pids")[2])]
        driver.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


CONNECTED = """
import os
import signal
import sys
import threading
import time
sys.path[:0] = sys.argv[1:3]
import cloudpickle
import psutil
import resources
import spark_ranks
from pyspark.sql import SparkSession
import horovod.spark
cloudpickle.register_pickle_by_value(spark_ranks)
spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
found = horovod.spark.run(spark_ranks.place, ("given", "HOROVOD_FUSION_THRESHOLD"), num_proc=2)
print("ranks", [(one["rank"], one["sum"], one["values"], one["variables"]) for one in found])
late = []  # the session is that of another thread
thread = threading.Thread(target=lambda: late.extend(horovod.spark.run(spark_ranks.one_ends_late, num_proc=2)))
thread.start()
thread.join()
print("late", late)
try:
    horovod.spark.run(spark_ranks.fail, ("raise",), num_proc=2)
except RuntimeError as error:
    print("raised", str(error).splitlines()[0])


def interrupt():
    while len(os.listdir(sys.argv[3])) < 2:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt).start()
try:
    horovod.spark.run(spark_ranks.wait_for, (sys.argv[3],), num_proc=2)
except KeyboardInterrupt:
    print("interrupted")
pids = [int(name.partition(".")[0]) for name in os.listdir(sys.argv[3])]
print("ended", resources.eventually(lambda: not any(map(psutil.pid_exists, pids))))
os.environ["HOROVOD_CYCLE_TIME"] = "x"
for run, size in (horovod.spark.run, None), (horovod.spark.run_elastic, 2), (horovod.spark.run, 2):
    try:
        run(spark_ranks.place, num_proc=size)
    except ValueError as error:
        print("refused", error)
spark.stop()
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("grpc_status", "zstandard")),
    reason="what Spark Connect needs is not installed: pip install 'pyspark[connect]'",
)
def test_spark_connect(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED, str(HERE), str(HERE.parents[1]), str(tmp_path)],
        env={**os.environ, "GRPC_VERBOSITY": "ERROR", "HOROVOD_FUSION_THRESHOLD": "4096"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr
    settings = {"HOROVOD_FUSION_THRESHOLD": "4096"}
    assert f"ranks {[(rank, 1.0, ('given', None), settings) for rank in range(2)]}" in done.stdout
    assert "late [0, 1]" in done.stdout
    assert {"[0]<stdout>:out 0", "[1]<stdout>:out 1"} <= set(done.stdout.splitlines())
    assert "[1]<stderr>:err 1" in done.stderr
    assert re.search(r"^raised Horovod detected .*: rank 1 on host .* raised ZeroDivisionError", done.stdout, re.M)
    assert "interrupted\nended True\n" in done.stdout
    assert re.findall(r"^refused .* \[([a-z-]+)\]$", done.stdout, re.M) == [
        SettingCode.INVALID_SETTING,
        LaunchCode.UNSUPPORTED_OPTION,
        SettingCode.INVALID_SETTING,
    ]
