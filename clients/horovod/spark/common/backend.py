"""Where the ranks of an estimator run: in the executors of Spark, or as processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Backend:
    """Runs a function on all ranks of a new world. An estimator takes any object with these two methods."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The results of fn(*args, **kwargs) by rank.

        fn: a function that cloudpickle can send. args, kwargs: its arguments. env: variables for the ranks, beside
        the ones that they have.
        """
        raise NotImplementedError

    def num_processes(self) -> int:
        """How many ranks a world has."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Ranks in tasks of the active Spark application.

    num_proc: ranks; default: the application's default parallelism. kwargs go to horovod.spark.run.
    env: variables of the processes; those given to run() come before these.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        from pyspark import SparkContext

        if num_proc is None:
            context = SparkContext._active_spark_context
            num_proc = context.defaultParallelism if context is not None else 1
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def check(self) -> None:
        """TimeoutException if Spark can never run so many tasks at the same time."""
        from horovod.spark.runner import check_backend

        check_backend(self._num_proc)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """As Backend.run, by horovod.spark.run."""
        import horovod.spark

        variables = {**(self._env or {}), **(env or {})} or None
        arguments: Any = {"args": args, "kwargs": dict(kwargs or {}), "env": variables, **self._kwargs}
        return horovod.spark.run(fn, num_proc=self._num_proc, **arguments)

    def num_processes(self) -> int:
        return self._num_proc


class LocalBackend(Backend):
    """Ranks as processes of the machine of the driver, without Spark. kwargs go to horovod.run.

    num_proc: the number of ranks. env: variables of the processes; those given to run() come before these.
    """

    def __init__(self, num_proc: int = 1, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._env = env
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """As Backend.run, by horovod.run."""
        from horovod.launch.function import run

        call = (fn, tuple(args), dict(kwargs or {}), {**(self._env or {}), **(env or {})})
        return run(_with_environment, args=call, num_proc=self._num_proc, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc


def _with_environment(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], env: dict[str, str]
) -> Any:
    os.environ.update({name: str(value) for name, value in env.items()})
    return fn(*args, **kwargs)
