"""How many tasks a Spark application can run at the same time, and what to say if those are too few. Pure.

Spark itself waits for executors that may never come. Whether more may come its configuration tells: a local master, and
a fixed number of executors, have a number of slots that is final.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from horovod.base.errors import LaunchCode, coded

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
        "standalone cluster, spark.dynamicAllocation.maxExecutors where executors come on demand)."
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
