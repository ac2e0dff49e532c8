"""horovod.data: what a loader yields, that its thread ends with the iteration, and that no exit waits for it."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from error_codes import ends_with

from horovod.base.errors import TrainingCode, code_of
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader, prefetch
from horovod.data.data_loader_base import AsyncDataLoaderMixin as MixinByItsOldPath

SIZES = [0, 1, 3, 64]
BATCHES = 10


class Loader(BaseDataLoader):
    """Counts passes, remembers which thread made each batch, and raises after `fail_after` batches."""

    def __init__(self, batches: int = BATCHES, fail_after: int | None = None) -> None:
        self.batches = batches
        self.fail_after = fail_after
        self.passes = self.made = self.ended = 0
        self.makers: set[str] = set()
        self.handed_over = threading.Semaphore(0)  # released for each batch that the maker could hand over

    def __len__(self) -> int:
        return self.batches

    def _iterate(self) -> Iterator[Any]:
        self.passes += 1
        try:
            for number in range(self.batches):
                if number == self.fail_after:
                    raise OSError("the disk is gone")
                self.makers.add(threading.current_thread().name)
                self.made += 1
                yield number
                self.handed_over.release()
        finally:
            self.ended += 1

    def _process_batch(self, batch: Any) -> Any:
        return threading.current_thread().name, batch


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


class Plain(BaseDataLoader):
    """Yields what it is given."""

    def __init__(self, *batches: Any) -> None:
        self.given = batches

    def __len__(self) -> int:
        return len(self.given)

    def _iterate(self) -> Iterator[Any]:
        return iter(self.given)


class AsyncPlain(AsyncDataLoaderMixin, Plain):
    pass


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "horovod-data-loader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert loader_threads() == []


# -- what comes out ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_every_iteration_is_one_pass_in_order(size: int) -> None:
    loader = AsyncLoader(size)
    here = threading.current_thread().name
    for passes in (1, 2, 3):
        assert list(loader) == [(here, number) for number in range(BATCHES)]
        assert (loader.passes, loader.ended) == (passes, passes)
    assert loader.makers == {"horovod-data-loader" if size else here}
    assert len(loader) == BATCHES


def test_a_base_loader_is_synchronous() -> None:
    loader = Loader()
    assert [number for _, number in loader] == list(range(BATCHES))
    assert loader.makers == {threading.current_thread().name}


@pytest.mark.parametrize("size", SIZES)
def test_batches_may_be_anything(size: int) -> None:
    batches = (None, ValueError("a value, not raised"), StopIteration, (), [1], False)
    assert tuple(AsyncPlain(size, False, *batches)) == batches
    assert list(AsyncPlain(size)) == []


def test_a_loader_that_defines_nothing_says_so() -> None:
    with pytest.raises(NotImplementedError, match="BaseDataLoader must define __len__"):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError, match="BaseDataLoader must define _iterate"):
        next(iter(BaseDataLoader()))


def test_arguments_reach_the_loader() -> None:
    loader = AsyncLoader(5, True, 7, fail_after=9)
    assert (loader.async_loader_queue_size, loader.debug_data_loader) == (5, True)
    assert (loader.batches, loader.fail_after) == (7, 9)
    assert AsyncLoader().async_loader_queue_size == 64
    assert MixinByItsOldPath is AsyncDataLoaderMixin
    for wrong in (-1, "path/of/data"):
        with pytest.raises(
            ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "async_loader_queue_size", wrong)
        ):
            AsyncLoader(wrong)  # type: ignore[arg-type]


def test_a_batch_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE_SECONDS", 0.01)
    told = threading.Event()
    sentences: list[str] = []

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sentences.append(record.getMessage())
            told.set()

    class Slow(AsyncLoader):
        def _iterate(self) -> Iterator[Any]:
            told.wait(60)
            yield from super()._iterate()

    log, handler = logging.getLogger("horovod.data"), Tells()
    log.addHandler(handler)
    try:
        assert len(list(Slow(2))) == BATCHES
    finally:
        log.removeHandler(handler)
    assert "has waited" in sentences[0]
    assert "threading.py" in sentences[0]  # where wait() is


def test_an_item_that_takes_longer_than_it_may_is_given_up() -> None:
    begun, came = threading.Event(), threading.Event()

    def late() -> Iterator[int]:
        yield 1
        begun.set()
        came.wait(60)
        yield 2

    passed = prefetch.Prefetch(late, 1, limit=lambda: 0.01 if begun.is_set() else 60.0)
    try:
        assert next(iter(passed)) == 1
        assert begun.wait(60)
        with pytest.raises(TimeoutError, match="no answer"):
            next(passed)
        assert passed.is_late
        passed.close()  # waits for nothing
        assert len(loader_threads()) == 1
    finally:
        came.set()
    passed._thread.join(60)
    assert loader_threads() == []


def test_no_more_is_made_ahead_than_asked_for() -> None:
    loader = AsyncLoader(3)
    iterator = iter(loader)
    assert loader_threads() == []  # nothing begins before the first batch is asked for
    next(iterator)
    for _ in range(4):  # one was taken, three are in the queue
        loader.handed_over.acquire()
    next(iterator)
    loader.handed_over.acquire()
    # The maker may be at one more, and can't hand it over before the next is taken.
    assert loader.made in (5, 6)
    assert not loader.handed_over.acquire(blocking=False)
    assert len(list(iterator)) == BATCHES - 2


def test_two_iterations_at_once() -> None:
    loader = AsyncLoader(2)
    assert [(a, b) for (_, a), (_, b) in zip(loader, loader, strict=True)] == [(n, n) for n in range(BATCHES)]


def test_a_mixin_that_comes_last_is_no_mixin_and_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"synchronously: BaseDataLoader.__iter__ comes before .* class Late\(Async"):

        class Late(Loader, AsyncDataLoaderMixin):
            pass


def test_a_subclass_may_wrap_the_iteration(recwarn: pytest.WarningsRecorder) -> None:
    class Doubled(AsyncPlain):
        def __iter__(self) -> Iterator[Any]:
            return (2 * batch for batch in super().__iter__())

    assert list(Doubled(1, False, 1, 2)) == [2, 4]
    assert not recwarn.list


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_an_exception_comes_after_the_batches_before_it(size: int) -> None:
    loader = AsyncLoader(size, fail_after=4)
    for _ in range(2):
        iterator = iter(loader)
        assert [next(iterator)[1] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(iterator)
        assert "_iterate" in [entry.name for entry in caught.traceback], "where it happened is part of the traceback"
    assert loader.ended == 2


@pytest.mark.parametrize("size", SIZES)
def test_an_early_break_ends_the_thread(size: int) -> None:
    loader = AsyncLoader(size)
    for stop in (0, 3, BATCHES - 1):
        for _, number in loader:
            if number == stop:
                break
        assert loader_threads() == []
        assert loader.ended == loader.passes
    assert len(list(loader)) == BATCHES


def test_closing_ends_what_is_under_way() -> None:
    loader = AsyncLoader(1)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    loader.close_async_loader()
    assert loader_threads() == []
    assert list(first) == list(second) == []
    loader.close_async_loader()
    assert len(list(loader)) == BATCHES
    AsyncLoader(0).close_async_loader()


def test_closing_wakes_one_that_waits_for_a_batch() -> None:
    asked, may_go_on = threading.Event(), threading.Event()

    class Stuck(AsyncPlain):
        def _iterate(self) -> Iterator[Any]:
            yield 1
            asked.set()
            may_go_on.wait()

    loader = Stuck(1)
    iterator = iter(loader)
    assert next(iterator) == 1
    asked.wait()
    seen: list[Any] = []
    others = [threading.Thread(target=loader.close_async_loader), threading.Thread(target=seen.extend, args=[iterator])]
    for other in others:
        other.start()
    may_go_on.set()
    for other in others:
        other.join()
    assert seen == []


def test_a_loader_that_closes_itself_gives_nothing_more() -> None:
    class Short(AsyncPlain):
        def _iterate(self) -> Iterator[Any]:
            self.close_async_loader()
            yield 1

    assert list(Short(1)) == []


def test_nothing_keeps_a_loader_alive() -> None:
    loader = AsyncLoader(2, fail_after=3)
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del iterator, loader
        assert gone() is None
        assert loader_threads() == []
    finally:
        gc.enable()


def test_debugging_says_who_waited(capsys: pytest.CaptureFixture[str]) -> None:
    list(AsyncLoader(2, debug_data_loader=True))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("AsyncLoader: 10 batches; the training waited ")
    assert said.err.endswith(" s for the training (at most 2 batches ahead).\n")
    list(AsyncLoader(2))
    assert capsys.readouterr().err == ""


# -- the end of the process --------------------------------------------------------------------------------------------
HEADER = """
import os, sys, threading
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader, prefetch
class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def __len__(self):
        return 1000
    def _iterate(self):
        yield from range(1000)
class Stuck(Loader):
    def _iterate(self):
        yield 0
        threading.Event().wait()
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEADER + source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["Loader", "Stuck"])
def test_an_exit_in_the_middle_of_an_iteration(kind: str) -> None:
    done = run(f"iterator = iter({kind}(2)); print(next(iterator))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_an_exit_by_an_exception_in_the_middle_of_an_iteration() -> None:
    done = run("for batch in Loader(2):\n    raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'mine'\n")


def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent() -> None:
    source = """
loader = Stuck(2)
iterator = iter(loader)
next(iterator)
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except RuntimeError as error:
        print(error)
    loader.close_async_loader()
    print(list(Loader(2))[-1])
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(source)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["999", "3"]
    assert code_of(done.stdout.splitlines()[0]) is TrainingCode.FORKED_ITERATION


def test_no_framework_is_imported() -> None:
    source = "print([m for m in ('torch', 'numpy', 'tensorflow', 'grpc', 'horovod._core') if m in sys.modules])"
    assert run(source).stdout == "[]\n"


def test_what_fails_while_nobody_listens_is_shown() -> None:
    source = """
class Failing(Loader):
    def _iterate(self):
        yield 0
        self.close_async_loader()
        raise OSError("the disk is gone")
print(len(tuple(Failing(2))) <= 1)
"""
    done = run(source)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert done.stderr.startswith("Exception in thread horovod-data-loader")
    assert done.stderr.endswith("OSError: the disk is gone\n")
