"""A real Spark: one JVM for each module, since starting one takes seconds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import spark_ranks

WHY_NOT = (
    "pyspark is not installed"
    if importlib.util.find_spec("pyspark") is None
    else "java is not installed"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ
    else ""
)

if WHY_NOT:

    class _Skipped(pytest.Module):
        def collect(self) -> list[Any]:
            pytest.skip(WHY_NOT, allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _Skipped.from_parent(parent, path=module_path)

else:
    import cloudpickle

    # Processes of tasks have another import path than pytest, so functions travel as a whole.
    cloudpickle.register_pickle_by_value(spark_ranks)

Context = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HOROVOD_", "SPARK_"))]:
            patch.delenv(name)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # whatever names and interfaces the machine has
        # A Java that is there for seconds only spends more time on compiling its code well than it saves by that.
        patch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
        yield


@pytest.fixture(scope="module")
def made_context() -> Iterator[Context]:
    """Makes the SparkContext of the module."""
    from pyspark import SparkConf, SparkContext

    made: list[Any] = []

    def make(master: str, settings: Mapping[str, str]) -> Any:
        conf = SparkConf().setMaster(master).setAppName("horovod")
        conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false")
        for name, value in settings.items():
            conf.set(name, value)
        made.append(SparkContext(conf=conf))
        made[0].setLogLevel("OFF")
        return made[0]

    yield make
    for context in made:
        context.stop()
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is not None:  # the JVM outlives its context
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)
