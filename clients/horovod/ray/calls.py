"""One function that runs on all ranks: whose failure it is when it fails, and what ranks log meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.client import ray as ray_client
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.common.exceptions import HorovodInternalError
from horovod.ray.adapter import Meanwhile, wait

Callback = Callable[[dict[str, Any]], Any]

# A peer notices a killed process by its sockets, and Ray by its agents: seconds later when a whole node is gone.
AFTERMATH_S = 5.0
_TOLD_S = 10.0  # a thread of Ray tells of an end microseconds after ray.get knows it


class Call:
    """`results` waits for all ranks, or for the first failure and its cause."""

    def __init__(
        self, refs: Sequence[Any], failed: Callable[[int, BaseException], None], keeps_results: bool = True
    ) -> None:
        """refs: the results by rank. failed: called once, by a thread of Ray, with the first rank that fails.
        keeps_results: False where the results may be large, and `results` is not called.
        """
        self._changed = threading.Condition()  # guards what follows
        self._left = set(range(len(refs)))
        self._told = False  # `failed` has been called
        self._failures: list[tuple[int, BaseException]] = []  # in the order in which they came
        self._failed = failed
        self._refs = list(refs)
        futures: list[Future[Any]] = [ref.future() for ref in refs]
        self._futures = futures if keeps_results else []
        for rank, future in enumerate(futures):
            future.add_done_callback(lambda future, rank=rank: self._ended(rank, future))  # type: ignore[misc]

    def results(self, meanwhile: Meanwhile | None = None) -> list[Any]:
        """The results by rank. Raises the exception of the rank that is the cause, as ray.get would, with a note that
        names the rank.
        """
        wait(self._wait, meanwhile)
        if self._failures:
            raise self._cause()
        return [future.result() for future in self._futures]

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed."""
        with self._changed:
            return bool(self._failures)

    def is_over(self) -> bool:
        """Whether all ranks have ended. Each end of which ray.get would know by now counts."""
        refs = self._refs
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        ended = {rank for rank, ref in enumerate(refs) if ref in ready}
        with self._changed:
            self._changed.wait_for(lambda: not ended & self._left, _TOLD_S)
            return not self._left

    def wait(self) -> None:
        """Returns when all ranks have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def _wait(self, timeout_s: float | None) -> bool:
        """Whether all ranks have ended, or one has failed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left or bool(self._failures), timeout_s)

    def _ended(self, rank: int, future: Future[Any]) -> None:
        error = future.exception()
        with self._changed:
            is_first = error is not None and not self._told
            self._told = self._told or is_first
        if error is not None and is_first:
            self._failed(rank, error)  # first of all: a thread that waits for the results may begin another call then
        with self._changed:
            if error is not None:
                self._failures.append((rank, error))
            self._left.discard(rank)
            if not self._left:
                self._refs = []  # Ray may forget the results
            self._changed.notify_all()

    def _cause(self) -> BaseException:
        """A rank that only lost a peer may be the first to raise: the peer's own error is waited for."""
        end = time.monotonic() + AFTERMATH_S
        with self._changed:
            while self._left and all(_is_victim(error) for _, error in self._failures):
                if not self._changed.wait(end - time.monotonic()):
                    break
            failures = list(self._failures)
        lost = next((one for one in failures if isinstance(one[1], RayActorError)), None)
        rank, error = lost or next((one for one in failures if not _is_victim(one[1])), failures[0])
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"This is rank {rank} of {len(self._futures)}, as Horovod counts them.")
        return error


def _is_victim(error: BaseException) -> bool:
    return isinstance(error, HorovodInternalError)


def queue_here(maxsize: int = 0) -> Queue:
    """A queue that takes no place of a worker, and is on no node that may be lost while this process lives."""
    where: dict[str, Any]
    if ray_client.is_connected():  # this process is on no node, and its connection ends on the head
        where = {"resources": {"node:__internal_head__": 0.001}}
    else:  # not soft: Ray takes another node then whenever that is quicker
        here = ray.get_runtime_context().get_node_id()
        where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    return Queue(maxsize=maxsize, actor_options={"num_cpus": 0, **where})


class Callbacks:
    """Calls them in the driver's thread, with what ranks log (ray_logger.py) and has arrived. `close` when the ranks
    have ended.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.queue = queue_here()
        self._callbacks = callbacks

    def deliver(self) -> None:
        """The messages that have arrived so far."""
        with contextlib.suppress(Empty):
            for info in self.queue.get_nowait_batch(self.queue.size()):
                for callback in self._callbacks:
                    callback(info)

    def close(self) -> None:
        self.queue.shutdown(force=True)
