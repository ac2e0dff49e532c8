"""`run` and `run_elastic`: their arguments are checked here; job.py does the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod.base.errors import LaunchCode, SettingCode, coded
from horovod.base.settings import MAX_SIZE, ROWS, resolve
from horovod.launch.asked import renamed
from horovod.launch.elastic import times
from horovod.launch.task import packed
from horovod.runner.common.util.timeout import TimeoutException
from horovod.spark.cluster import SparkCluster, never_enough, why_unusable
from horovod.spark.job import ElasticSizes, Request, run_request

__all__ = ["run", "run_elastic"]

_log = logging.getLogger("horovod.spark")
_DEFAULT_SIZE = "num_proc (by default spark.default.parallelism)"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, Any] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` in `num_proc` tasks of Spark that form one world, and returns the results by rank.

    fn: anything that cloudpickle can ship; it calls hvd.init() itself. In each task it runs in a separate process, in
        the folder of the executor and with its PYTHONPATH.
    args, kwargs: the arguments of fn.
    num_proc: one task each, all at the same time; default the context's defaultParallelism.
    start_timeout: seconds within which Spark must have started all tasks (HOROVOD_SPARK_START_TIMEOUT, 600).
    env: variables, added to those of the executors; None as a value removes one.
    stdout, stderr: objects with a method `write` that get what ranks print, as lines "[rank]<stdout>:text"; default
        sys.stdout and sys.stderr as they are now.
    verbose: 2 also tells which worlds the job had.
    nics: the network interfaces to use, where the addresses that Spark knows are not the right ones.
    executable: the Python of the processes, of the driver's version; default that of the executors.
    prefix_output_with_timestamp: whether each line that a rank prints begins with the time.
    use_mpi, use_gloo, extra_mpi_args: of Horovod 0.28. There is one way to start processes: use_mpi=True is an error.

    Raises RuntimeError with the failure that is the cause, naming its rank and with its traceback, when a process
    fails; the others are then ended. An exception that begins with "Timed out waiting for Spark tasks to start." when
    there are too few slots: at once if there will never be more, else after start_timeout.
    """
    _check_controller(use_mpi, use_gloo, extra_mpi_args)
    _check_call(fn, stdout, stderr, verbose)
    session = _connected()
    cluster = _cluster() if session is None else None
    size = _count(num_proc, "num_proc", cluster.parallelism if cluster is not None else None)
    if cluster is not None:
        check_slots(size, "num_proc" if num_proc is not None else _DEFAULT_SIZE, cluster)
    if verbose and num_proc is None:
        _log.info("Running %d processes (spark.default.parallelism).", size)
    request = Request(
        packed(fn, args, kwargs or {}),
        size,
        _start_timeout(start_timeout),
        dict(env or {}),
        stdout,
        stderr,
        int(verbose or 0),
        _interfaces(nics),
        prefix_output_with_timestamp,
        executable or "",
    )
    if cluster is None:
        from horovod.spark.connect import run_connected

        return run_connected(request, session)
    return run_request(request, cluster)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, Any] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """As `run`, for a function that is written for it (hvd.elastic.run): the job goes on when processes fail or
    executors are lost, with as few as `min_num_proc`, and accepts new ones, up to `max_num_proc`.

    fn, args, kwargs, env, stdout, stderr, verbose, nics, prefix_output_with_timestamp: as of `run`.
    num_proc: tasks at the beginning. min_num_proc, max_num_proc: the fewest and the most processes of a world; default
    num_proc.

    Spark runs tasks that failed again, as often as spark.task.maxFailures says; survivors keep their processes and what
    they have in memory. start_timeout: until `min_num_proc` tasks have started. elastic_timeout: how long fewer than
    that may be left, in seconds (HOROVOD_ELASTIC_TIMEOUT, 600). reset_limit: how many processes may fail; the next one
    ends the job. min_np, max_np: deprecated names.

    Returns what the ranks of the last world returned. Raises as `run`.
    """
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    _check_call(fn, stdout, stderr, verbose)
    if _connected() is not None:
        sentence = "An elastic job needs a SparkContext, which Spark Connect has not: use horovod.spark.run there."
        raise ValueError(coded(LaunchCode.UNSUPPORTED_OPTION, sentence))
    cluster = _cluster()
    size = _count(num_proc, "num_proc", cluster.parallelism)
    fewest, most = _count(min_num_proc, "min_num_proc", size), _count(max_num_proc, "max_num_proc", size)
    if not fewest <= size <= most:
        numbers = f"{fewest}, {size} and {most}"
        sentence = f"min_num_proc must be at most num_proc, and that at most max_num_proc; they are {numbers}."
        raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    check_slots(fewest, "min_num_proc" if min_num_proc is not None else "num_proc", cluster)
    if reset_limit is not None and not (type(reset_limit) is int and reset_limit >= 0):
        sentence = f"reset_limit must be an integer of at least 0, not {reset_limit!r}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    row = ROWS["elastic_timeout_seconds"]
    if elastic_timeout is not None:
        timeout_s = float(row.check(elastic_timeout, "elastic_timeout"))
    else:
        timeout_s = resolve().elastic_timeout_seconds if row.text(os.environ) else float(times.ELASTIC_TIMEOUT_SECS)
    request = Request(
        packed(fn, args, kwargs or {}),
        size,
        _start_timeout(start_timeout),
        dict(env or {}),
        stdout,
        stderr,
        int(verbose or 0),
        _interfaces(nics),
        prefix_output_with_timestamp,
        elastic=ElasticSizes(fewest, most, reset_limit, timeout_s),
    )
    return run_request(request, cluster)


def _connected() -> Any:
    """The session of Spark Connect, if that is what this program has."""
    from pyspark.sql import is_remote

    if not is_remote():
        return None
    from pyspark.sql.connect.session import SparkSession

    # The session of this thread; another thread of the program may have made the only one.
    if (session := SparkSession.getActiveSession() or SparkSession._get_default_session()) is None:
        sentence = (
            "This program is a client of Spark Connect, and has no session. Make one, for example with "
            "SparkSession.builder.getOrCreate()."
        )
        raise RuntimeError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    return session


def _cluster() -> SparkCluster:
    """Exception without a SparkContext."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        sentence = (
            "Could not find an active SparkContext: horovod.spark runs in the driver of a Spark application. Make one, "
            "for example with SparkSession.builder.getOrCreate()."
        )
        raise RuntimeError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    if unusable := why_unusable(context):
        raise RuntimeError(unusable)
    return SparkCluster(context)


def check_slots(wanted: int, what: str, cluster: SparkCluster) -> None:
    """TimeoutException if the application can never run so many tasks at the same time. what: asks for them."""
    if sentence := never_enough(wanted, what, cluster.slots()):
        raise TimeoutException(sentence)


def check_backend(num_proc: int) -> None:
    """check_slots for an estimator, before it writes data."""
    if _connected() is None:
        check_slots(num_proc, "num_proc", _cluster())


def _check_controller(use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi and use_gloo:
        sentence = "use_gloo and use_mpi exclude each other: give one of them."
        raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    if use_mpi or extra_mpi_args:
        sentence = "There is no MPI in this build: leave use_mpi and extra_mpi_args out, horovod.spark.run needs none."
        raise ValueError(coded(LaunchCode.UNSUPPORTED_OPTION, sentence))


def _check_call(fn: Any, stdout: Any, stderr: Any, verbose: Any) -> None:
    """ValueError for what would be noticed on ranks only, or not at all. fn: may be None where no rank is to start."""
    if fn is not None and not callable(fn):
        sentence = f"fn must be a function, or something else that can be called, not {fn!r}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    for name, stream in ("stdout", stdout), ("stderr", stderr):
        if stream is not None and not callable(getattr(stream, "write", None)):
            sentence = f"{name} must be an object with a method write, as an open file, not {stream!r}."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    if verbose is not None and not isinstance(verbose, int):
        sentence = f"verbose must be a number, 0 to 2, not {verbose!r}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))


def _count(given: int | None, name: str, default: int | None) -> int:
    if given is None and default is not None:
        return default
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MAX_SIZE:
        sentence = f"{name} must be an integer from 1 to {MAX_SIZE}, not {given!r}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    return given


def _start_timeout(given: float | None) -> float:
    if given is None:
        return resolve().spark_start_timeout_seconds
    return float(ROWS["spark_start_timeout_seconds"].check(given, "start_timeout"))


def _interfaces(nics: Iterable[str] | None) -> list[str]:
    """A string has them as --network-interfaces of horovodrun has: with commas between."""
    return sorted(nics.split(",") if isinstance(nics, str) else nics or ())
