"""Whose failure it is when a run fails, and the sentence for the user. Pure.

Several processes end when one fails: its peers raise HorovodInternalError, whatever Spark kills is killed, and Spark
itself names the task that it heard of first. The cause is the process that a signal ended or that was lost, else the
first one that raised something of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.base.errors import LaunchCode, coded, coded_like, without_code
from horovod.common.exceptions import HorovodInternalError
from horovod.coordinator.core.ending import how

_BEGINNING = "Horovod detected that one or more processes exited with non-zero status"  # programs look for it
_VICTIM = HorovodInternalError.__name__
# Py4J's words if the Java process to which a call goes has ended.
_JAVA_ENDED = re.compile(
    r"^(Answer from Java side is empty|Error while (sending|receiving)|.*Connection (refused|reset))"
)


@dataclass(frozen=True)
class Failure:
    """How one process failed. It has the fields of `coordinator.core.ending.Outcome`, so that `how` tells of it.

    lost: why its end is not known; "" where it is. error: "Type: text" of what its function raised; "" for nothing.
    """

    rank: int
    host: str
    pid: int = 0
    code: int | None = None
    stopped: bool = False
    lost: str = ""
    error: str = ""
    traceback: str = ""
    ended_s: float = 0.0
    incarnation: int = 1

    @property
    def was_ended(self) -> bool:
        """Whether a signal of somebody else than the task ended it, or it ended with its executor."""
        return bool(self.lost) or (self.code is not None and self.code < 0 and not self.stopped)

    @property
    def is_victim(self) -> bool:
        """It only noticed that another one has failed, or was stopped because of that."""
        return not self.was_ended and (self.stopped or self.error.partition(":")[0] == _VICTIM)

    def what(self) -> str:
        """Completes `rank 1 on host h ...`."""
        if self.error:
            return f"raised {without_code(self.error)} (exit code {self.code})"
        return how(self)


def has_cause(failures: Sequence[Failure]) -> bool:
    """Whether more than victims have failed."""
    return any(not failure.is_victim for failure in failures)


def cause_of(failures: Sequence[Failure]) -> Failure:
    """failures: at least one, in the order in which they came."""
    ended = next((one for one in failures if one.was_ended), None)
    return ended or next((one for one in failures if not one.is_victim), failures[0])


def repeated(failures: Sequence[Failure]) -> Failure:
    """The failure for which an elastic job has ended: the last one of the rank that failed most often. Victims count
    where nobody else has failed. failures: at least one, in the order in which they came.
    """
    causes = [failure for failure in failures if not failure.is_victim] or failures
    counts = Counter(failure.rank for failure in causes)
    most = max(counts.values())
    return next(failure for failure in reversed(causes) if counts[failure.rank] == most)


def sentence_of(failure: Failure) -> str:
    """For the driver. The code stands in a line of its own behind a traceback, of which it would look like a part."""
    sentence = f"{_BEGINNING}: {short(failure)}"
    if failure.error:
        return f"{sentence}\n\n{failure.traceback}[{LaunchCode.FUNCTION_RAISED}]"
    return coded(LaunchCode.RANK_FAILED, f"{sentence}.")


def failed_late(failure: Failure) -> str:
    """The sentence for an elastic job in which a process failed after others had ended well."""
    return coded(LaunchCode.RANK_FAILED, f"{sentence_of(failure)}\n\nOthers had ended well, so the job ends.")


def given_up(failure: Failure, verdict: str) -> str:
    """The sentence for an elastic job whose processes have failed too often. failure: the last of them. verdict: why it
    is too often, with a code.
    """
    return coded_like(verdict, f"{sentence_of(failure)}\n\n{without_code(verdict)}")


def short(failure: Failure) -> str:
    """One line, without a full stop."""
    return f"rank {failure.rank} on host {failure.host} {failure.what()}".strip().partition("\n")[0]


def said(error: BaseException) -> str:
    """Spark's text in an error of PySpark. If the context was stopped meanwhile, PySpark has raised another error while
    it handled that one.
    """
    first: BaseException | None = error
    while first is not None and not type(first).__module__.startswith(("py4j", "pyspark")):
        first = first.__context__
    return str(first or error)


def is_cancelled(text: str) -> bool:
    """Somebody has ended the job, or the whole driver, and its tasks with it. text: what Spark says."""
    if _JAVA_ENDED.search(text):
        return True
    return re.search(r"\bJob \d+ cancelled\b|\bOPERATION_CANCELED\b", text) is not None  # the latter: Spark Connect


def unusable_context(text: str) -> str:
    """The sentence for a SparkContext for which nothing can be run. text: why, of Spark or Py4J; "": it was stopped."""
    if text:
        sentence = (
            f"The Java process of the active SparkContext has ended: {_first_line(text)} Start the program again."
        )
    else:
        sentence = "The active SparkContext was stopped. Make another one with SparkSession.builder.getOrCreate()."
    return coded(LaunchCode.JOB_CANCELLED, sentence)


def not_repeated(failure: Failure, text: str) -> str:
    """The sentence for an elastic job of which Spark does not run a task again. text: Spark's own."""
    if is_cancelled(text):
        return of_spark(text)
    if "excludeOnFailure" in text:
        why = "it has failed on all executors that there are, and may not use them again (spark.excludeOnFailure.*)"
    else:
        why = "it failed as often as spark.task.maxFailures allows (with a local master the number F of local[N,F])"
    return coded(LaunchCode.RANK_FAILED, f"{sentence_of(failure)}\n\nSpark did not run this task again: {why}.")


def of_spark(text: str) -> str:
    """The sentence for a Spark job that failed before all processes ran, or that was cancelled. text: Spark's own, with
    its stack traces.
    """
    if _JAVA_ENDED.search(text):
        sentence = (
            "The Java process of the Spark driver has ended, and the tasks of this run with it. Was it killed, or out "
            f"of memory (spark.driver.memory)? {_first_line(text)}"
        )
        return coded(LaunchCode.JOB_CANCELLED, sentence)
    if is_cancelled(text):
        return coded(LaunchCode.JOB_CANCELLED, f"The Spark job of this run was cancelled: {_first_line(text)}")
    if found := re.search(r"PYTHON_VERSION_MISMATCH\].*?\(?'?(\d+\.\d+)\D+?(\d+\.\d+)", text, re.DOTALL):
        sentence = (
            f"The Python of the workers is {found[1]} and that of the driver {found[2]}; they must be of one version. "
            "Set PYSPARK_PYTHON, or spark.pyspark.python, to an interpreter that is the same on all hosts."
        )
        return coded(LaunchCode.HOST_INSTALLATION, sentence)
    if found := re.search(r"^RuntimeError: (.+ \[[a-z-]+\])$", text, re.MULTILINE):
        return found[1]  # what one of our own tasks has said
    if found := re.search(r"Cannot run program \"([^\"]+)\"", text):
        sentence = (
            f"The workers can't start their Python, {found[1]!r}. Set PYSPARK_PYTHON, or spark.pyspark.python, to an "
            "interpreter that is there on all hosts."
        )
        return coded(LaunchCode.HOST_INSTALLATION, sentence)
    if found := re.search(r"No module named '((?:horovod|grpc|cloudpickle|psutil|google)[\w.]*)'", text):
        sentence = (
            f"The Python of the workers has no module {found[1]!r}. Install the same version of Horovod on all hosts, "
            "or set PYSPARK_PYTHON, or spark.pyspark.python, to an interpreter that has it."
        )
        return coded(LaunchCode.HOST_INSTALLATION, sentence)
    if found := re.search(r"barrier.*?requires? more slots[^\n]*", text, re.IGNORECASE | re.DOTALL):
        sentence = f"Spark has too few slots for all tasks at the same time: {_first_line(found[0])}"
        return coded(LaunchCode.TOO_FEW_RESOURCES, sentence)
    if "SPARK-24942" in text:
        sentence = (
            "Under Spark Connect the tasks of a run form a barrier stage, which Spark does not support with "
            "dynamic allocation. Start the server with spark.dynamicAllocation.enabled=false."
        )
        return coded(LaunchCode.UNSUPPORTED_OPTION, sentence)
    return coded(LaunchCode.RANK_FAILED, f"The Spark job of this run failed: {_first_line(text)}")


def _first_line(text: str) -> str:
    """The text of a Java exception, without its name and without the line that Py4J puts before it; of an error of
    gRPC, under Spark Connect, its details.
    """
    if details := re.search(r'^\s*details = "(.+)"$', text, re.MULTILINE):
        text = details[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["without a reason"]
    line = next((line.removeprefix(": ") for line in lines[:3] if line.startswith(": ")), lines[0])
    line = re.sub(r"^\(?(?:[\w$]+\.)+[\w$]+(?:: |\) )(?:\[\w+\] )?|\s*SQLSTATE: \w+$", "", line)
    return line if line.endswith(".") else f"{line}."
