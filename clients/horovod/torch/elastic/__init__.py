"""Elastic training: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
>>> @hvd.elastic.run
... def train(state):
...     while state.batch < 100:
...         train_one_batch(model, optimizer)
...         state.batch += 1
...         state.commit()
>>> train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.common.basics import init as init
from horovod.common.basics import join_again
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import leave_at_next_commit, run_fn
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "leave_at_next_commit", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function `func(state, ...)`, so that it goes on after failures.

    Before `func` starts, the state is made equal on all ranks. When a collective in it fails (HorovodInternalError: a
    rank was lost), the state goes back to its last commit; when hosts come or go (HostsUpdatedInterrupt from
    `state.commit()`), nothing is undone. Then this process shuts Horovod down and calls hvd.init() again with
    the same arguments; once the next world stands, the state is made equal again and `func` called again.

    The next world of an elastic job (HOROVOD_MIN_SIZE, HOROVOD_MAX_SIZE) has the remaining and the new
    processes. If they are too few, they wait for others for HOROVOD_ELASTIC_TIMEOUT seconds. In any other job the next
    world has as many processes as before: start a process with the HOROVOD_RANK of the lost one; the others wait for it
    for HOROVOD_START_TIMEOUT seconds.

    A process of an elastic job that gets SIGTERM leaves at the next commit, and no step of the others fails: this
    function raises SystemExit(143). That holds if it runs in the main thread and the program has no SIGTERM handler.
    A second SIGTERM ends the process at once. See also `hvd.elastic.leave_at_next_commit`.

    Between hvd.init() and `func` a script must run no collective, because a process that joins later would have nobody
    to run it with. Process sets that were added after hvd.init() are gone in the next world; add them in a callback of
    `state.register_reset_callbacks`. Example:

        >>> state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
        >>> @hvd.elastic.run
        ... def train(state, batches):
        ...     while state.batch < batches:
        ...         optimizer.zero_grad()
        ...         state.model(tensor).sum().backward()
        ...         optimizer.step()
        ...         state.batch += 1
        ...         state.commit()
        ...     return state.batch
        >>> train(state, 3)
        3

    Raises:
        ValueError: before hvd.init(), or the next world did not stand in time ("Horovod initialization failed. ...").
        Exception: any other exception of `func` than HorovodInternalError and HostsUpdatedInterrupt.
    """
    return run_fn(func, join_again)
