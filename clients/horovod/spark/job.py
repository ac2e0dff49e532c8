"""One call of `run` or `run_elastic`, in the driver.

The Spark job runs in a thread of its own, what decides runs in another one, and the caller's thread writes what ranks
print: a notebook knows by the thread which cell a line belongs to, and Ctrl-C comes there.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.base.errors import LaunchCode, coded
from horovod.base.settings import ROWS, Settings, resolve
from horovod.coordinator.core.ending import AFTERMATH_S, RankEnded, how
from horovod.coordinator.core.ranks import Place
from horovod.coordinator.services.exchange import Exchange
from horovod.launch import task as function
from horovod.launch.console.report import StoryLines
from horovod.launch.console.streams import PythonStreams
from horovod.launch.elastic.request import REPLACEMENTS_PER_PROCESS, Replacement, elastic_variables
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import HostNames, OwnCoordinator
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.attending import LOST, Attempt, Tasks
from horovod.spark.cluster import BEGINNING, Cluster, still_waiting
from horovod.spark.failures import (
    Failure,
    cause_of,
    failed_late,
    given_up,
    has_cause,
    is_cancelled,
    not_repeated,
    of_spark,
    repeated,
    said,
    sentence_of,
    short,
)
from horovod.spark.policies import Elastic, Failed, FixedSize, rules_of
from horovod.spark.task.attend import Order
from horovod.spark.task.messages import Ordered, Start
from horovod.worker.agent.orders import END, FINISH, signalled
from horovod.worker.agent.output import Console
from horovod.worker.rank_environment import JobOnHost, rank_environment

_TELL_S = 10.0  # between two looks at how many tasks have come
_LOOK_S = 0.2  # between two looks at what no event tells
_VICTIMS_S = 5.0  # how long the cause of a failure is waited for, where only its victims have failed
_ENDING_S = 20.0  # for processes that are told to end: more than a task takes to kill its own
_SPARK_ENDS_S = 30.0  # for the Spark job, once all of its tasks have ended
_CANCEL_AGAIN_S, _CANCELLATIONS = 1.0, 10
_LAST_TASKS_S = 1.0  # for the tasks of an elastic job that have just begun when its work is done
LAST_OUTPUT_S = 10.0  # for the writer, once all processes have ended
_INTERRUPTED = "The driver was interrupted (Ctrl-C)."


@dataclass(frozen=True)
class ElasticSizes:
    """fewest, most: of its worlds. reset_limit: how many processes may fail; None: any number."""

    fewest: int
    most: int
    reset_limit: int | None
    timeout_s: float


@dataclass(frozen=True)
class Request:
    """The user's arguments, checked. function: as `packed` of launch/task.py makes it. env: None as a value removes a
    variable. elastic: None for a fixed size. settings: HOROVOD_... of the caller, where it is not in the driver.
    """

    function: bytes
    size: int
    start_timeout_s: float
    env: Mapping[str, Any] = field(default_factory=dict)
    stdout: Any = None
    stderr: Any = None
    verbose: int = 1
    nics: Sequence[str] = ()
    timestamps: bool = False
    python: str = ""
    elastic: ElasticSizes | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        """How many tasks Spark is to run."""
        return self.elastic.most if self.elastic is not None else self.size


def run_request(request: Request, cluster: Cluster) -> list[Any]:
    """The results by rank. RuntimeError with the failure that is the cause."""
    streams = PythonStreams(served=True, stdout=request.stdout, stderr=request.stderr)
    refused: list[OSError] = []
    streams.writer.failed = lambda descriptor, error: refused.append(error)
    console = Console(streams.writer, descriptors=streams.descriptors, timestamps=request.timestamps)
    job = Job(request, cluster, console)
    thread = threading.Thread(target=job.drive, name="horovod-spark")
    thread.start()
    while thread.is_alive():
        try:
            streams.serve(thread)
        except KeyboardInterrupt:
            job.interrupt()
    if refused:
        sentence = f"horovod.spark: the ranks' output could not be written ({refused[0].strerror})."
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    elif job.has_lost_output:
        sentence = f"horovod.spark: some of the ranks' output was not yet written {LAST_OUTPUT_S:g} s after they ended."
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    return job.result()


class Job:
    """`drive` runs it to its end in a thread; `result` says afterwards what came of it."""

    def __init__(self, request: Request, cluster: Cluster, console: Console) -> None:
        self._request = request
        self._cluster = cluster
        self._console = console
        given = {name: value for name, value in request.env.items() if value is not None}
        driver = {**os.environ, **request.settings, **cluster.environ}
        self._environ = job_environment(driver, given, request.start_timeout_s, request.nics)
        if request.elastic is not None:
            sizes = request.elastic.fewest, request.elastic.most
            self._environ |= elastic_variables(Replacement(None, sizes))
            self._environ.setdefault(ROWS["elastic_timeout_seconds"].env, f"{request.elastic.timeout_s:g}")
        self._unset = [name for name, value in request.env.items() if value is None]
        self._settings: Settings = resolve({**driver, **self._environ})  # ValueError before anything is started
        self._name = self._settings.job
        self._exchange = Exchange(request.function, replaced=request.elastic is not None)
        elastic = request.elastic
        self._fixed = FixedSize(request.size, self._start, self._failed)
        self._elastic = self._elastic_policy(elastic) if elastic else None
        self._tasks = Tasks(console, self._elastic or self._fixed)
        self._story = StoryLines(lambda line: console.note(f"horovod.spark: {line}"))
        self._failures: list[Failure] = []
        self._host_names = HostNames()
        self._coordinator: OwnCoordinator | None = None
        self._spark_said = ""  # why the Spark job failed
        self._spark_ended = False
        self._interrupted = False
        self.has_lost_output = False  # known when `drive` has returned
        self._results: list[Any] = []
        self._error: BaseException | None = None

    def _elastic_policy(self, sizes: ElasticSizes) -> Elastic:
        given = sizes.reset_limit
        limit = REPLACEMENTS_PER_PROCESS * self._request.size if given is None else given
        rules = rules_of(sizes.fewest, sizes.most, limit, given is not None)
        tell = lambda sentence: self._console.note(f"horovod.spark: {sentence}")  # noqa: E731
        later = lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call)  # noqa: E731
        return Elastic(rules, self._start, self._failed, self._latest_epoch, tell, later)

    def _latest_epoch(self) -> int | None:
        assert self._coordinator is not None
        return self._coordinator.latest_epoch(self._name)

    # -- for the caller's thread ---------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ctrl-C; a second one ends the processes sooner."""
        self._interrupted = True
        self._tasks.tell_all(Ordered(signalled(signal.SIGINT, stop=True)))
        with self._tasks.changed:
            self._tasks.changed.notify_all()

    def result(self) -> list[Any]:
        if self._interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error
        return self._results

    # -- in a thread of its own ----------------------------------------------------------------------------------------

    def drive(self) -> None:
        """Runs the job, from the start of the coordinator to the last line of output."""
        try:
            services = (self._exchange, self._tasks)
            self._coordinator = OwnCoordinator(
                self._settings, self._cluster.reached_at, self._request.nics, services=services
            )
            try:
                self._results = self._driven(self._coordinator)
            finally:
                self._coordinator.stop()
        except BaseException as error:
            self._error = error
        finally:
            self.has_lost_output = not self._console.close(LAST_OUTPUT_S)

    def _driven(self, coordinator: OwnCoordinator) -> list[Any]:
        assert coordinator.token is not None
        order = Order(
            coordinator.address,
            coordinator.token,
            coordinator.certificate,
            coordinator.server_name,
            self._settings.keepalive_timeout_seconds,
        )
        spark = threading.Thread(target=self._run_spark, args=(order,), name="horovod-spark-job", daemon=True)
        spark.start()
        try:
            self._wait_until_begun()
            if self._elastic is not None:
                self._wait_elastic(self._elastic)
            else:
                self._wait(lambda: self._fixed.is_done, None)
                self._check()
        except BaseException as error:
            self._end(str(error), spark)
            raise
        finally:
            spark.join(_SPARK_ENDS_S)
        return self._collected()

    def _run_spark(self, order: Order) -> None:
        has_ended = True
        try:
            has_ended = self._cluster.run(order, self._request.tasks, together=self._elastic is None)
        except BaseException as error:
            self._spark_said = said(error)
        finally:
            with self._tasks.changed:
                self._spark_ended = has_ended
                self._tasks.changed.notify_all()

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        """Until it came to that, or something has failed; False when the time is up."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def over() -> bool:
            has_failed = bool(self._failures) and self._elastic is None
            return has_failed or self._interrupted or self._spark_ended or until()

        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            step = left if self._request.verbose < 2 else _LOOK_S if left is None else min(left, _LOOK_S)
            found = self._tasks.wait(over, step)
            if self._request.verbose >= 2 and self._coordinator is not None:
                entries = self._coordinator.story(self._name)
                self._tasks.call(functools.partial(self._story.tell, entries))
            if found or (left is not None and step == left):
                return found

    def _wait_until_begun(self) -> None:
        request = self._request

        def begun() -> bool:
            if self._elastic is None or request.elastic is None:
                return self._fixed.has_begun
            return self._tasks.most >= request.elastic.fewest or self._elastic.has_failed

        needed = request.size if request.elastic is None else request.elastic.fewest
        if not self._wait_for_tasks(begun, needed):
            sentence = (
                f"{BEGINNING} Please check that you have enough resources to run all processes: each is one "
                f"task of Spark, of spark.task.cpus cores. {self._there(needed, request.start_timeout_s)} If "
                "executors are allocated on demand, pass a longer start_timeout."
            )
            raise TimeoutException(coded(LaunchCode.TOO_FEW_RESOURCES, sentence))
        if request.elastic is None:
            self._check()

    def _wait_for_tasks(self, begun: Callable[[], bool], needed: int) -> bool:
        """False when the time is up. A user who waits is told for how many tasks, when that has changed."""
        waited_s, told = 0.0, ""
        while waited_s < (limit_s := self._request.start_timeout_s):
            step = min(_TELL_S, limit_s - waited_s)
            if self._wait(begun, step):
                return True
            waited_s += step
            found = self._there(needed, waited_s)
            if self._request.verbose and waited_s < limit_s and found.partition(" s.")[2] != told:
                told = found.partition(" s.")[2]
                self._console.note(f"horovod.spark: {found}")
        return False

    def _there(self, needed: int, seconds: float) -> str:
        return still_waiting(len(self._tasks.running), needed, seconds, self._cluster.slots())

    def _wait_elastic(self, elastic: Elastic) -> None:
        """Until its work is done. RuntimeError when it can't be any more."""
        sizes = self._request.elastic
        assert sizes is not None
        short_since: float | None = None
        has_told = False
        while True:
            self._wait(lambda: elastic.is_over(len(self._tasks.running)) or elastic.has_failed, _LOOK_S * 5)
            if self._interrupted:
                raise KeyboardInterrupt(_INTERRUPTED)
            if elastic.has_failed_late:
                raise RuntimeError(failed_late(self._failures[-1]))
            if elastic.is_over(len(self._tasks.running)):
                break
            if elastic.verdict:
                last = [one for one in self._failures if not one.is_victim] or self._failures
                raise RuntimeError(given_up(last[-1], elastic.verdict))
            if self._spark_ended:
                self._spark_gave_up()
            if elastic.is_done and not has_told:
                has_told = True
                self._tasks.tell_all(Ordered(FINISH))
                self._tasks.tell_all(Ordered(signalled(signal.SIGCONT)))  # at once: the supervisor waits
            is_short = len(self._tasks.running) < sizes.fewest and not elastic.is_done
            short_since = None if not is_short else short_since or time.monotonic()
            if short_since is not None and time.monotonic() - short_since > sizes.timeout_s:
                sentence = (
                    f"{len(self._tasks.running)} tasks were left for {sizes.timeout_s:g} s, and the job needs "
                    f"{sizes.fewest}. {self._last_failure()}"
                )
                raise RuntimeError(coded(LaunchCode.TOO_FEW_RESOURCES, sentence.strip()))
        self._tasks.finish()
        if not self._tasks.wait(lambda: self._spark_ended, _LAST_TASKS_S):
            self._cluster.cancel("The work of this job is done.")

    def _spark_gave_up(self) -> None:
        """Spark runs a task that failed again for as often as it is told."""
        failures = list(self._failures)  # further ones come of the tasks that Spark now kills
        if not failures:
            raise RuntimeError(of_spark(self._spark_said))
        raise RuntimeError(not_repeated(repeated(failures), self._spark_said))

    def _last_failure(self) -> str:
        failures = [one for one in self._failures if not one.is_victim] or self._failures
        return f"The last failure: {short(failures[-1])}." if failures else ""

    def _check(self) -> None:
        """Raises the cause, if the job of fixed size has failed."""
        if self._interrupted:
            raise KeyboardInterrupt(_INTERRUPTED)
        if self._fixed.is_done:
            return
        self._check_cancelled()
        if not self._failures and self._spark_ended:  # messages of the tasks may be under way
            self._tasks.wait(lambda: bool(self._failures), AFTERMATH_S)
        if self._failures:
            tasks = self._tasks
            tasks.wait(lambda: has_cause(self._failures) or not tasks.running, _VICTIMS_S)
            if not cause_of(self._failures).was_ended:  # a peer that notices may be faster than what ends a process
                tasks.wait(lambda: cause_of(self._failures).was_ended or not tasks.running, AFTERMATH_S)
            if cause_of(self._failures).lost:  # perhaps because all tasks are: the SparkContext was stopped
                tasks.wait(lambda: self._spark_ended, AFTERMATH_S)
                self._check_cancelled()
            if not has_cause(self._failures) and (silent := sorted(self._fixed.done - self._exchange.results.keys())):
                raise RuntimeError(function.no_result(silent[0], self._host_of(silent[0])))
            raise RuntimeError(sentence_of(cause_of(self._failures)))
        if self._spark_ended:
            raise RuntimeError(of_spark(self._spark_said))

    def _check_cancelled(self) -> None:
        if self._spark_ended and is_cancelled(self._spark_said):
            raise RuntimeError(of_spark(self._spark_said))

    def _end(self, reason: str, spark: threading.Thread) -> None:
        """Ends all that still runs. spark: the thread of the Spark job."""
        self._tasks.refuse_all(coded(LaunchCode.RANK_FAILED, "The job of this task has ended."))
        if self._coordinator is not None:
            self._coordinator.give_up(self._name, reason)
        # A failed job is to look like one in Spark's own pages. The cancellation takes some seconds to reach the tasks.
        cause = reason.partition("\n")[0]
        self._cluster.cancel(cause)
        if not self._interrupted:
            self._tasks.tell_all(Ordered(END))
        self._tasks.release_failed()
        self._tasks.wait(lambda: not self._tasks.running, _ENDING_S)
        for _ in range(_CANCELLATIONS):  # where it was not yet submitted, nothing was cancelled
            spark.join(_CANCEL_AGAIN_S)
            if not spark.is_alive():
                return
            self._cluster.cancel(cause)

    def _collected(self) -> list[Any]:
        arrived = self._arrived()
        if self._elastic is not None:
            return function.of_last_world(arrived)
        if silent := [rank for rank in range(self._request.size) if rank not in arrived]:
            raise RuntimeError(function.no_result(silent[0], self._host_of(silent[0])))
        return [function.value_of(rank, arrived[rank]) for rank in range(self._request.size)]

    def _host_of(self, rank: int) -> str:
        fixed = self._fixed
        return next(self._host_name(one) for one in fixed.attempts.values() if fixed.ranks[one.came.partition] == rank)

    def _arrived(self) -> dict[int, function.Result]:
        return {rank: function.Result(*pickle.loads(content)) for rank, content in self._exchange.results.items()}  # noqa: S301

    # -- in the coordinator's event loop -------------------------------------------------------------------------------

    def _start(self, attempt: Attempt, place: Place) -> Start:
        assert self._coordinator is not None
        on = JobOnHost(
            self._environ,
            self._host_name(attempt),
            self._request.size,
            self._coordinator.address,
            self._coordinator.token,
            is_own=True,
            job=self._name,
        )
        environ = rank_environment(on, place, incarnation=attempt.number)
        return Start(environ, self._unset, self._request.python, fails_task=self._elastic is not None)

    def _host_name(self, attempt: Attempt) -> str:
        """The name of its host for processes and the coordinator: several containers of YARN may have one name."""
        together = [(one.came.together, one.came.host) for one in (*self._tasks.running.values(), attempt)]
        return self._host_names.given(together)[attempt.came.together]

    def _failed(self, attempt: Attempt, rank: int) -> Failed:
        """Told to the others at once: in their world, or where they join one, by the coordinator."""
        coordinator, ended = self._coordinator, attempt.ended
        assert coordinator is not None
        left = self._exchange.results.get(rank) if ended is not None and ended.code != 0 else None
        result = function.Result(*pickle.loads(left)) if left is not None else None  # noqa: S301
        if self._elastic is not None:
            self._exchange.results.pop(rank, None)  # not that of the next process in this slot
        failure = Failure(
            rank,
            self._host_name(attempt),
            ended.pid if ended else 0,
            ended.code if ended else None,
            ended.stopped if ended else False,
            LOST if ended is None else ended.sentence,
            (result.error or "") if result is not None else "",
            result.traceback if result is not None else "",
        )
        self._failures.append(failure)
        cause = failure.lost or f"its process {how(failure)}"
        coordinator.rank_ended(RankEnded(self._name, rank, failure.host, failure.pid, cause, attempt.number))
        if self._elastic is None and len(self._failures) == 1:
            coordinator.give_up(self._name, coded(LaunchCode.RANK_FAILED, f"{short(failure)}.".capitalize()))
        return Failed(
            failure.host, failure.what(), not failure.lost and not failure.stopped and (failure.code or 0) > 0
        )
