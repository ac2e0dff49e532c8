"""A rank that is lost, or whose NCCL fails, ends what the GPUs of all others wait for, wherever they are at that time.

Nothing here looks at a clock: every limit of the engine's is an hour away, so what ends a wait is the loss itself. The
libraries stand in for GPUs, whose kernels never end by themselves once a peer is gone. For a loss at a random point
see tests/engine/test_gpu_worlds.py, and for the time that it takes benchmarks/failover.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_words import WAS_LOST
from gpu_worlds import standin_world

FAR_AWAY = {"HOROVOD_PROGRESS_TIMEOUT": "3600"}
VICTIM = 1


class Gradient:
    """A tensor on the GPU that all ranks reduce under one name."""

    def __init__(self) -> None:
        import fake_gpu
        import torch

        self.tensor = fake_gpu.on_gpu(torch.ones(1000))
        self.reduce()  # there are communicators now
        fake_gpu.synchronize()

    def reduce(self) -> None:
        import horovod.torch as hvd

        hvd.allreduce_(self.tensor, name="gradient")


def meet() -> None:
    """Returns when all ranks have called it; nothing of it is on a GPU."""
    import horovod.torch as hvd

    hvd.allgather_object(None, name="meet")


# -- lost --------------------------------------------------------------------------------------------------------------
def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    import horovod.torch as hvd

    hvd.shutdown()


ENDINGS: dict[str, Callable[[], None]] = {"killed": kill, "exits": lambda: os._exit(3), "leaves": leave}


def be_lost(where: str, how: str) -> None:
    """The victim's part."""
    import fake_gpu
    import torch

    import horovod.torch as hvd

    gradient = Gradient()
    if where == "in join":
        hvd.allreduce(torch.ones(1), name="alone")  # of all others a joined rank takes part, and no other
    if where == "in the middle" or (where == "in join" and how != "leaves"):
        fake_gpu.hold()  # what follows never begins here, and never ends elsewhere
        gradient.reduce()
    if where != "in join":
        meet()
    ENDINGS[how]()


def lose_one(where: str, how: str) -> tuple[str, str, dict[str, int]]:
    import fake_gpu

    import horovod.torch as hvd
    from horovod.common.elastic import check_results

    if hvd.rank() == VICTIM:
        be_lost(where, how)
        return "", "", {}
    gradient = Gradient()
    aborts = fake_gpu.count("aborts")

    def wait() -> None:
        if where == "in join":
            hvd.join(gradient.tensor.device.index)
        elif where == "in the middle":
            gradient.reduce()
            meet()
            fake_gpu.synchronize()  # as loss.item() does: a kernel waits whose peer is gone
            check_results()  # as a state does before it is saved: what came after that kernel has no result
        else:
            handle = hvd.allreduce_async_(gradient.tensor, name="gradient")
            meet()
            hvd.synchronize(handle)

    with pytest.raises(hvd.HorovodInternalError) as first:
        wait()
    with pytest.raises(hvd.HorovodInternalError) as second:
        gradient.reduce()
    fake_gpu.synchronize()  # nothing is stuck there
    hvd.shutdown()
    counts = {name: fake_gpu.count(name) for name in ("communicators", "operations")}
    return str(first.value), str(second.value), {"aborts": fake_gpu.count("aborts") - aborts, **counts}


CASES = [(where, how) for where in ("in the middle", "before it arrives", "in join") for how in ENDINGS]
CASES.remove(("in the middle", "leaves"))  # who leaves finishes what is agreed: tests/engine/test_gpu_life.py


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("where", "how"), CASES)
def test_a_lost_rank_ends_every_wait_for_it(where: str, how: str, transport: str) -> None:
    # Of three the one that is told first leaves, too, and may be named for the other.
    with standin_world(2 if how == "leaves" else 3, transport, **FAR_AWAY) as keeper:
        world = keeper.get()
        pids = world.pids
        outcomes = world.outcomes(lose_one, where, how)
    assert outcomes[VICTIM].exit_code == {"killed": -signal.SIGKILL, "exits": 3, "leaves": None}[how]
    for rank in range(world.size):
        if rank == VICTIM:
            continue
        assert outcomes[rank].error is None, outcomes[rank].text
        first, second, counts = outcomes[rank].value
        for sentence in (first, second):
            assert f"ank {VICTIM} (pid {pids[VICTIM]})" in sentence
            assert ("it called hvd.shutdown()" if how == "leaves" else WAS_LOST) in sentence
        # After a rank that leaves nothing is under way, so the communicators end in order.
        assert counts == {"aborts": int(how != "leaves"), "communicators": 0, "operations": 0}


# -- an error of NCCL's own --------------------------------------------------------------------------------------------
def meet_an_asynchronous_error(where: str, fifo: str) -> tuple[str, int]:
    """Rank 1's stream stands still, so rank 0's kernel waits for it when NCCL fails on rank 0."""
    import threading

    import fake_gpu
    import torch

    import horovod.torch as hvd

    gradient = Gradient()
    aborts = fake_gpu.count("aborts")
    held = fake_gpu.hold() if hvd.rank() == 1 else 0
    gradient.reduce()

    def fail_when_told() -> None:
        open(fifo).close()
        fake_gpu.fail("ncclCommGetAsyncError", 3)

    def wait() -> None:
        pending = hvd.allreduce_async_(torch.ones(1), name="never") if where == "before the other arrives" else None
        if where != "in join":
            meet()
        if hvd.rank() == 0:
            if pending is not None:
                hvd.synchronize(pending)
            elif where == "in join":
                hvd.join(gradient.tensor.device.index)
            fake_gpu.synchronize()  # comes to its end by the abort
        else:
            if where == "in join":
                hvd.allreduce(torch.ones(1), name="alone")  # rank 0 has joined
            open(fifo, "w").close()
        for _ in range(1_000_000):  # with one that has joined it succeeds until then
            hvd.allreduce_(torch.ones(1), name="late")  # rank 1 is in here when it happens

    failing = threading.Thread(target=fail_when_told, daemon=True)
    if hvd.rank() == 0:
        failing.start()
    with pytest.raises(hvd.HorovodInternalError) as raised:
        wait()
    if held:
        fake_gpu.release(held)
    fake_gpu.synchronize()
    hvd.shutdown()
    hvd.init()
    gradient.reduce()  # the next world has a communicator of its own
    fake_gpu.synchronize()
    return str(raised.value), fake_gpu.count("aborts") - aborts


@pytest.mark.parametrize("where", ["in the middle", "before the other arrives", "in join"])
def test_an_asynchronous_error_ends_the_epoch_on_both(where: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with standin_world(2, **FAR_AWAY) as keeper:
        found: list[Any] = keeper.get().run(meet_an_asynchronous_error, where, str(fifo))
    for sentence, aborts in found:
        assert "ncclCommGetAsyncError failed: unknown result code (3)" in sentence
        assert aborts == 1
