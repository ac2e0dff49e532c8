"""The SparkContext that runs the tasks of a job, and how many tasks it can run at the same time.

Spark itself waits for executors that may never come. Its configuration tells whether more may come: a local master, and
a fixed number of executors, have a number of slots that is final. The functions that count slots are pure.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from horovod.base.errors import LaunchCode, coded
from horovod.spark.failures import said, unusable_context
from horovod.spark.task.attend import Order, attended

# Programs look for this beginning, whenever the error comes.
BEGINNING = "Timed out waiting for Spark tasks to start."
_LOCAL = re.compile(r"local(\[.*\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")
_AMOUNT = re.compile(r"spark\.task\.resource\.(.+)\.amount")


@dataclass(frozen=True)
class Slots:
    """now: with the executors that are there; None: not known. most: never more than that; None: not known."""

    master: str
    cpus_per_task: int
    now: int | None
    most: int | None


def slots_of(master: str, settings: Mapping[str, str], now: int | None) -> Slots:
    """master, settings: of a SparkContext. now: how many tasks it runs at the same time, as Spark says."""
    return Slots(master, _cpus(settings), now, _most(master, settings, now))


def _most(master: str, settings: Mapping[str, str], now: int | None) -> int | None:
    if _LOCAL.fullmatch(master):
        return now
    if cluster := _LOCAL_CLUSTER.fullmatch(master):
        return int(cluster[1]) * _on_executor(int(cluster[2]), settings)
    is_fixed = settings.get("spark.dynamicAllocation.enabled", "false").lower() != "true"
    if master.startswith("spark://"):  # all cores that there are, unless it is told how many
        most = settings.get("spark.cores.max")
        return int(most) // _cpus(settings) if most and is_fixed else None
    if not (master == "yarn" or master.startswith("k8s://")):
        return None
    executors = settings.get("spark.executor.instances", "2")
    if not is_fixed and (executors := settings.get("spark.dynamicAllocation.maxExecutors", "")) in ("", "infinity"):
        return None
    return int(executors) * _on_executor(int(settings.get("spark.executor.cores", "1")), settings)


def _on_executor(cores: int, settings: Mapping[str, str]) -> int:
    """Slots of one executor: by its cores, and by its GPUs or the like where tasks ask for some."""
    found = [cores // _cpus(settings)]
    for name, amount in settings.items():
        if resource := _AMOUNT.fullmatch(name):
            of_executor = settings.get(f"spark.executor.resource.{resource[1]}.amount", "0")
            found.append(int(Fraction(of_executor) / Fraction(amount)) if Fraction(amount) > 0 else found[0])
    return min(found)


def _cpus(settings: Mapping[str, str]) -> int:
    return max(int(settings.get("spark.task.cpus", "1")), 1)


def never_enough(wanted: int, what: str, slots: Slots) -> str:
    """Why it makes no sense to wait for `wanted` tasks; "" if it does. what: the argument that asks for them."""
    if slots.most is None or wanted <= slots.most:
        return ""
    return coded(
        LaunchCode.TOO_FEW_RESOURCES,
        f"{BEGINNING} They could not all start: {what} asks for {wanted} tasks at the same time, and this application "
        f"has {slots.most} slots (master {slots.master}, spark.task.cpus {slots.cpus_per_task}) and gets no more. "
        f"{_remedy(wanted, what, slots)}",
    )


def _remedy(wanted: int, what: str, slots: Slots) -> str:
    fewer = f"Pass {what.partition(' ')[0]}={slots.most} or less, or give" if slots.most else "Give"
    if slots.master.startswith("local"):
        return f"{fewer} Spark more cores: {wanted * slots.cpus_per_task} in the master, as local[N] has them."
    return (
        f"{fewer} the application more: spark.executor.instances, spark.executor.cores (spark.cores.max on a "
        "standalone cluster, spark.dynamicAllocation.maxExecutors if executors are allocated on demand)."
    )


def still_waiting(there: int, wanted: int, seconds: float, slots: Slots | None) -> str:
    """The line for a user who waits for tasks."""
    return f"{there} of {wanted} tasks were there after {seconds:g} s.{_known(wanted, slots)}"


def _known(wanted: int, slots: Slots | None) -> str:
    if slots is None or slots.now is None:
        return ""
    if slots.now < wanted:
        return f" Spark has {slots.now} slots now, of {slots.cpus_per_task} cores each (spark.task.cpus)."
    return f" Spark has {slots.now} slots now: other jobs of this application may have them."


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
