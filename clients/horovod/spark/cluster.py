"""What runs the tasks of a job: a SparkContext."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from horovod.spark.failures import said, unusable_context
from horovod.spark.slots import Slots, slots_of
from horovod.spark.task.attend import Order, attended

_OF_EXECUTORS = "spark.executorEnv."  # the configuration of variables of executors


class Cluster(Protocol):
    """Made in the caller's thread; `run` is called in another one."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that the configuration gives to executors."""

    @property
    def reached_at(self) -> str | None:
        """The address of the driver for executors; None: they are on its host."""

    def slots(self) -> Slots | None:
        """How many tasks can run at the same time; None: not known."""

    def run(self, order: Order, count: int, together: bool) -> bool:
        """Runs so many tasks; raises what Spark does. together: all at the same time. True: all tasks have ended well;
        False: nothing is known of most of them.
        """

    def cancel(self, reason: str) -> None:
        """Ends them, and returns at once."""


def why_unusable(context: Any) -> str:
    """The sentence for a SparkContext that was stopped, or whose Java process has ended; else ""."""
    try:
        return unusable_context("") if context._jsc is None or context._jsc.sc().isStopped() else ""
    except Exception as error:  # of Py4J, or of the socket that it uses
        return unusable_context(said(error))


class SparkCluster:
    """A SparkContext. A tag tells its jobs apart: the job group of the caller, by which a notebook cancels its cell,
    stays.
    """

    def __init__(self, context: Any) -> None:
        """context: a SparkContext. In the caller's thread, whose local properties (pool, job group) the job gets."""
        self._context = context
        self._tag = f"horovod-{secrets.token_hex(8)}"
        self._properties = context._jsc.sc().getLocalProperties().clone()
        self._conf = context.getConf()

    @property
    def parallelism(self) -> int:
        """How many tasks Spark runs where nobody says it."""
        return int(self._context.defaultParallelism)

    @property
    def environ(self) -> Mapping[str, str]:
        return {
            name.removeprefix(_OF_EXECUTORS): value
            for name, value in self._conf.getAll()
            if name.startswith(_OF_EXECUTORS)
        }

    @property
    def reached_at(self) -> str | None:
        master = str(self._context.master)
        return None if master.startswith("local") else str(self._conf.get("spark.driver.host")).strip("[]")

    def slots(self) -> Slots:
        try:
            java = self._context._jsc.sc()
            profile = java.resourceProfileManager().defaultResourceProfile()
            now = int(java.maxNumConcurrentTasks(profile))
        except Exception:  # not part of the public API of Spark, or the context is stopped
            now = None
        return slots_of(str(self._context.master), dict(self._conf.getAll()), now)

    def run(self, order: Order, count: int, together: bool) -> bool:
        context = self._context
        java = context._jsc.sc()
        before = java.getLocalProperties().clone()
        java.setLocalProperties(self._properties)
        try:
            self._run(order, count, together)
        finally:  # with PYSPARK_PIN_THREAD=false other calls get this thread of the JVM, and would have our tag
            with contextlib.suppress(Exception):  # the context is stopped
                java.setLocalProperties(before)
        return True

    def _run(self, order: Order, count: int, together: bool) -> None:
        context = self._context
        context.addJobTag(self._tag)
        context.setInterruptOnCancel(True)
        context.setLocalProperty("callSite.short", f"horovod.spark.run with {count} tasks")
        numbers = context.parallelize(range(count), count)
        # Tasks of a barrier stage begin together or not at all, so two jobs never wait for each other's slots. Spark
        # has no such stages where the number of executors changes; there tasks wait for each other in the driver.
        changes = str(self._conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
        placed = numbers.barrier() if together and not changes else numbers
        placed.mapPartitions(functools.partial(attended, order)).collect()

    def cancel(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the context is stopped, and its jobs with it
            self._context._jsc.sc().cancelJobsWithTag(self._tag, reason)
