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
    `state.commit()`), nothing is undone. Then this process leaves the world and calls hvd.init() again with the
    arguments it had; once the next world stands, the state is made equal again and `func` called again.

    The next world of an elastic job (HOROVOD_MIN_SIZE, HOROVOD_MAX_SIZE) has those that are left and those that have
    come; where they are too few, they wait for others for HOROVOD_ELASTIC_TIMEOUT seconds. That of any other job has as
    many processes as before: who starts one in place of a lost one gives it the same HOROVOD_RANK, and the others wait
    for it for HOROVOD_START_TIMEOUT seconds.

    SIGTERM to a process of an elastic job that has no handler of its own and calls this in its main thread means that
    it leaves at the next commit, without a failed step of the others: this function raises SystemExit(143).
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
        Exception: what `func` raises, but for HorovodInternalError and HostsUpdatedInterrupt.
    """
    return run_fn(func, join_again)
