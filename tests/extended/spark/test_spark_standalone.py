"""`horovod.spark` on Spark's own cluster: a master and a worker by Spark's scripts, executors that get lost, GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import spark_ranks
from error_codes import ends_with

import horovod.spark
from horovod.base.errors import LaunchCode

SLOTS = 2
pytestmark = pytest.mark.timeout(600)


class Daemon:
    """A JVM of the cluster, which runs until `stop`."""

    def __init__(self, *command: str, **environ: str) -> None:
        import pyspark

        script = Path(pyspark.__file__).parent / "bin" / "spark-class"
        self._process = subprocess.Popen(
            [str(script), *command],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._drain)

    def until(self, pattern: str) -> re.Match[str]:
        """What it logs. Once."""
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := re.search(pattern, line):
                self._reader.start()
                return found
        raise AssertionError("".join(lines))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._reader.join()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        for _ in self._process.stderr:
            pass


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. The worker has two cores, and GPUs that are not real."""
    folder = tmp_path_factory.mktemp("worker")
    gpus = folder / "gpus.sh"
    gpus.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["4", "5"]}'\n""")
    gpus.chmod(0o755)
    conf = folder / "spark.conf"
    conf.write_text(f"spark.worker.resource.gpu.amount 2\nspark.worker.resource.gpu.discoveryScript {gpus}\n")
    small = {"SPARK_DAEMON_MEMORY": "256m"}
    port = "127.0.0.1", "--port", "0", "--webui-port", "0"
    running = [Daemon("org.apache.spark.deploy.master.Master", "--host", *port, **small)]
    try:
        address = running[0].until(r"Starting Spark master at (spark://\S+)")[1]
        options = "--cores", str(SLOTS), "--memory", "1g", "--work-dir", str(folder), "--properties-file", str(conf)
        running.append(Daemon("org.apache.spark.deploy.worker.Worker", "--host", *port, *options, address, **small))
        running[1].until("Successfully registered with master")
        yield address
    finally:
        for one in reversed(running):
            one.stop()


@pytest.fixture(scope="module", autouse=True)
def spark(master: str, made_context: Any) -> Any:
    """Each executor has one slot, so that there are two."""
    return made_context(
        master,
        {
            "spark.executor.cores": "1",
            "spark.executor.memory": "450m",
            "spark.executor.resource.gpu.amount": "1",
            "spark.task.resource.gpu.amount": "1",
            "spark.driver.host": "127.0.0.1",
        },
    )


def test_results_and_gpus() -> None:
    found = horovod.spark.run(spark_ranks.place, ("", "HOROVOD_TLS_CA"), num_proc=SLOTS)
    assert [(one["rank"], one["local"], one["sum"]) for one in found] == [(0, (0, 2), 1.0), (1, (1, 2), 1.0)]
    assert sorted(one["devices"] for one in found) == [["4"], ["5"]]
    assert all(one["variables"]["HOROVOD_TLS_CA"] for one in found)  # an executor may be on another host
    assert os.getcwd() not in {one["folder"] for one in found}

    environ = {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}
    assert horovod.spark.run(spark_ranks.place, num_proc=1, env=environ)[0]["devices"] == []


def test_an_executor_that_is_killed() -> None:
    """Spark starts another one, but the world can't go on."""
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "rank 1 on host", "executor has ended")):
        horovod.spark.run(spark_ranks.fail, ("executor",), num_proc=SLOTS)


def test_an_elastic_job_goes_on_without_an_executor() -> None:
    """The survivor keeps its process, and its rank."""
    found = horovod.spark.run_elastic(spark_ranks.elastic, (SLOTS, 5, {1: "executor"}), num_proc=SLOTS)
    assert sorted((one["slot"], one["own"]) for one in found) == [(0, [1, 2, 3, 4, 5]), (1, [3, 4, 5])]
    assert [one["rank"] for one in found] == [0, 1]
