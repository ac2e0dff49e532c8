"""What ranks log (ray_logger.py) on its way to the callbacks of the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.client import ray as ray_client
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Callback = Callable[[dict[str, Any]], Any]


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
    """Calls them in the driver's thread, with what has arrived. `close` when the ranks have ended."""

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
