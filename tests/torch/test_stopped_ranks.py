"""A rank of an elastic job that is stopped: the others go on without it, and it comes back as a newcomer."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from test_changing_worlds import KILLED_AT, WAITS_AT, _assert_trained_as_one, _train
from worlds import World

from horovod.base.errors import OperationCode, WorldCode, code_of
from horovod.coordinator.config import Limits

SIZE = 3
STOPPED = 1


def _be_stopped(pids: list[int], is_seen: bool) -> dict[str, Any]:
    """One rank stops itself; the first of the others continues it once the world has shrunk."""
    import horovod.torch as hvd
    from horovod.common import basics, elastic
    from horovod.worker.runtime import witness

    if not is_seen:
        witness.process_namespace = lambda: "elsewhere"
        basics._leave(returns=True)
        hvd.init()
    errors: list[Any] = []
    warn = elastic.log.warning
    elastic.log.warning = lambda text, error: (errors.append(str(error)), warn(text, error))  # type: ignore
    me = pids.index(os.getpid())
    done: list[int] = []

    def incident(state: Any) -> None:
        if me == STOPPED and state.batch == KILLED_AT and not done:
            done.append(state.batch)
            os.kill(os.getpid(), signal.SIGSTOP)
        if me == 0 and hvd.size() < SIZE and state.batch == WAITS_AT - 1 and not done:
            done.append(state.batch)
            os.kill(pids[STOPPED], signal.SIGCONT)

    return {"errors": errors, **_train(incident, grows_to=SIZE)}


@pytest.mark.parametrize(("transport", "is_seen"), [("shm", True), ("tcp", False)])
def test_the_others_go_on_and_take_it_in_again(transport: str, is_seen: bool) -> None:
    """is_seen: by the coordinator; else only by another rank of its host."""
    environment = {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": str(SIZE), "HOROVOD_ELASTIC_HUNG_SECONDS": "1"}
    with World(SIZE, transport, environment, limits=Limits(reattach_grace_s=2.0)) as world:
        pids = world.pids
        outcomes = world.outcomes(_be_stopped, pids, is_seen)
    assert [outcome.text for outcome in outcomes] == [""] * SIZE
    for rank, outcome in enumerate(outcomes):
        assert outcome.value["pid"] == pids[rank]
        _assert_trained_as_one(outcome.value)
        sizes = [size for _, size in outcome.value["worlds"]]
        assert sizes == ([SIZE, SIZE] if rank == STOPPED else [SIZE, SIZE - 1, SIZE])
    (error,) = outcomes[STOPPED].value["errors"]
    assert code_of(error) in (WorldCode.DECLARED_LOST, OperationCode.PEER_LOST)  # by the coordinator, or by a peer
    assert f"(pid {pids[STOPPED]})" in error
    assert "HOROVOD_ELASTIC_HUNG_SECONDS" in error
    assert outcomes[STOPPED].value["worlds"][-1] == (SIZE - 1, SIZE)
