"""Real worlds for the tests of frameworks: N processes, an embedded coordinator, a chosen transport.

The transport "hosts" makes every two ranks one host (by name), which share memory with each other and nobody else.

Importing a framework costs more than most tests, so the processes are forked from one that has done so
(fork_server.py), and a `World` is a set of them that run many test functions one after the other.
`world.run(function, *arguments)` runs it on every rank (`function` may call hvd.rank()) and returns the results in rank
order; `world.outcomes(...)` returns errors as values, for tests that expect some. Functions travel by cloudpickle;
those of test modules are imported by the processes.

Nothing waits for ever: after `deadline_seconds` the ranks that have not answered print their stacks, the processes are
killed and the test fails. A world in which something unexpected happened is `broken` and must not be used again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import cloudpickle
import fork_server
import pytest

from horovod.common import optimizer_numbers

DEADLINE_SECONDS = 120.0


@contextlib.contextmanager
def warnings_of_horovod() -> Iterator[list[str]]:
    """What Horovod warns of in this process meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("horovod").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("horovod").removeHandler(handler)


@dataclass
class Outcome:
    """What a function did on one rank."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""  # the traceback of `error`
    exit_code: int | None = None  # set when the process ended instead of answering; negative for a signal


class World:
    """preloaded: the module of what the ranks have imported. python: theirs, where it is of another environment.
    coordinator: arguments of the EmbeddedCoordinator, such as shorter limits."""

    def __init__(
        self,
        size: int,
        transport: str = "shm",
        environment: dict[str, str] | None = None,
        preloaded: str = "preloaded_ranks",
        python: str = sys.executable,
        **coordinator: Any,
    ) -> None:
        from horovod.coordinator.server import EmbeddedCoordinator  # the ranks do not need it

        self.size = size
        self.transport = transport
        self.broken = False
        self._environment = environment or {}
        self._preloaded = preloaded
        self._python = python
        self._processes: list[fork_server.Forked] = []
        self._pipes: list[Connection] = []
        self._coordinator = EmbeddedCoordinator(**coordinator)

    def __enter__(self) -> World:
        self._coordinator.start()
        try:
            for rank in range(self.size):
                self._start(rank)
            self.run(_ready)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")},
            "HOROVOD_COORDINATOR": self._coordinator.address,
            "HOROVOD_JOB": "test",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_TRANSPORT": self.transport,
            **self._environment,
        }
        if self.transport == "hosts":
            environment |= {"HOROVOD_TRANSPORT": "auto", "HOROVOD_HOSTNAME": f"host-{rank // 2}"}
        process = fork_server.shared(self._preloaded, self._python).start(environment, [theirs.fileno()])
        theirs.close()
        if rank < len(self._processes):  # in place of one that ended
            self._pipes[rank].close()
            self._processes[rank], self._pipes[rank] = process, ours
        else:
            self._processes.append(process)
            self._pipes.append(ours)

    @property
    def coordinator_address(self) -> str:
        return self._coordinator.address

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline_seconds: float = DEADLINE_SECONDS,
        before_replacing: Sequence[Callable[[], None]] = (),
        **options: Any,
    ) -> list[Outcome]:
        """Runs `function(*arguments, **options)` on every rank.

        As many processes that end instead of answering are replaced as `before_replacing` says: after a call of that,
        another one of the rank starts and runs the function, without a call of hvd.init() before.
        """
        replacements = iter(before_replacing)
        assert not self.broken, "a world in which a test failed can't be used again"
        self.broken = True  # until all have answered
        request = cloudpickle.dumps((function, arguments, options))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        outcomes: list[Outcome | None] = [None] * self.size
        deadline = time.monotonic() + deadline_seconds
        while missing := [rank for rank in range(self.size) if outcomes[rank] is None]:
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._print_stacks(missing)
                self.close()
                others = "".join(
                    f"\nrank {rank} answered: {outcome.text or outcome.exit_code or 'all is well'}"
                    for rank, outcome in enumerate(outcomes)
                    if outcome is not None
                )
                sentence = f"ranks {missing} did not finish {function.__name__} in {deadline_seconds} s"
                raise AssertionError(sentence + others)
            for rank in missing:
                if self._pipes[rank] not in ready:
                    continue
                outcomes[rank] = outcome = self._receive(rank)
                if outcome.exit_code is not None and (wait_before := next(replacements, None)) is not None:
                    try:
                        wait_before()
                    except AssertionError:
                        self._print_answers(rank)
                        raise
                    self._start(rank)
                    self._pipes[rank].send_bytes(request)
                    outcomes[rank] = None
        answers = [outcome for outcome in outcomes if outcome is not None]
        self.broken = any(outcome.exit_code is not None for outcome in answers)
        return answers

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Runs `function` on every rank, where it must not fail."""
        outcomes = self.outcomes(function, *arguments, **options)
        failures = [
            f"rank {rank}: {outcome.text or f'exit code {outcome.exit_code}'}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None or outcome.exit_code is not None
        ]
        if failures:
            self.broken = True
            raise AssertionError(f"{function.__name__} failed\n" + "\n".join(failures))
        return [outcome.value for outcome in outcomes]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            return Outcome(exit_code=self._processes[rank].wait(DEADLINE_SECONDS))
        outcome: Outcome = cloudpickle.loads(answer)
        return outcome

    def _print_answers(self, ended: int) -> None:
        """Of the others, as far as they have come: why what rank `ended` waited for did not happen."""
        for rank in range(self.size):
            if rank != ended and self._pipes[rank].poll(0):
                print(f"rank {rank} answered: {self._receive(rank)}", file=sys.stderr, flush=True)

    def _print_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self._processes[rank].wait(0) is None:
                print(f"rank {rank} hangs here:", file=sys.stderr, flush=True)
                self._processes[rank].send_signal(signal.SIGUSR1)
                time.sleep(0.3)  # not for an event: faulthandler writes from a signal handler, nobody announces its end

    def close(self) -> None:
        self.broken = True
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for the next function ends
        for process in self._processes:
            if process.wait(5) is None:
                process.send_signal(signal.SIGKILL)
                process.wait(60)
        self._coordinator.stop()


class Keeper:
    """Starts a world that many tests share at first use, and again after one has broken it."""

    def __init__(
        self,
        size: int,
        transport: str,
        environment: dict[str, str] | None = None,
        prepare: Callable[[World], None] = lambda _: None,
        **coordinator: Any,
    ) -> None:
        self.size = size
        self.transport = transport
        self._environment = environment
        self._prepare = prepare
        self._coordinator = coordinator
        self._world: World | None = None

    def get(self) -> World:
        if self._world is None or self._world.broken:
            self.close()
            self._world = World(self.size, self.transport, self._environment, **self._coordinator).__enter__()
            self._prepare(self._world)
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ready() -> None:
    from horovod.common import basics

    basics.init()


def serve(pipe: Connection, begin: Callable[[], object]) -> NoReturn:
    """What a rank does: runs what it is sent until nobody is left to send. begin: called before each function."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored when the tests run in the background of a shell
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            _end()
        try:
            function, arguments, options = cloudpickle.loads(request)
            begin()
            optimizer_numbers.restart()  # as Ray's workers do: another function may have failed on some ranks
            outcome = Outcome(function(*arguments, **options))
        except (Exception, pytest.fail.Exception) as error:
            outcome = Outcome(error=error, text=traceback.format_exc())
        try:
            answer = cloudpickle.dumps(outcome)
        except Exception:
            answer = cloudpickle.dumps(Outcome(error=AssertionError(f"not picklable: {outcome}"), text=str(outcome)))
        pipe.send_bytes(answer)


def _end() -> NoReturn:
    """Ends as an interpreter does, but leaves its modules to the kernel.

    To take all that a framework has imported apart, object by object, would copy the pages that the fork server shares:
    a quarter of a second of processor time for each rank, of which no test sees anything. A function that ends its
    process (sys.exit()) takes the whole way.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
