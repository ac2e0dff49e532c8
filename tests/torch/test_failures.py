"""When something goes wrong: errors in words on every rank, and an engine that stays usable where it can."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with
from worlds import Outcome, World

from horovod.base.errors import EngineCode, OperationCode, TrainingCode, code_of

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def _assert_lost(outcome: Outcome, rank: int, *words: str) -> None:
    from horovod.common.exceptions import HorovodInternalError

    assert isinstance(outcome.error, HorovodInternalError), outcome
    message = str(outcome.error)
    for word in (f"ank {rank} (pid ", socket.gethostname(), *words):
        assert word in message, f"{word!r} is missing in: {message}"


# -- a rank is lost ----------------------------------------------------------------------------------------------------
def _train(steps: int, fatal_step: int, how: str) -> None:
    """Trains; rank 1 ends itself while gradients are on their way."""
    import torch
    from torch import nn

    import horovod.torch as hvd

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        if step == fatal_step and hvd.rank() == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise SystemExit(0)
        optimizer.step()


@TRANSPORTS
def test_a_killed_rank_is_named_on_all_others(transport: str) -> None:
    with World(3, transport) as world:
        outcomes = world.outcomes(_train, 10**6, 5, "kill")
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        _assert_lost(outcomes[rank], 1)


@TRANSPORTS
def test_a_rank_that_exits_normally_is_named_too(transport: str) -> None:
    with World(3, transport) as world:
        outcomes = world.outcomes(_train, 10**6, 5, "exit")
    assert outcomes[1].exit_code == 0
    for rank in (0, 2):
        _assert_lost(outcomes[rank], 1, "left")


def _wait_for(rank_that_dies: int, fifo: str) -> list[str]:
    import torch

    import horovod.torch as hvd

    hvd.allreduce(torch.ones(1), name="first")
    open(fifo, "r" if hvd.rank() == rank_that_dies else "w").close()  # both have the result
    if hvd.rank() == rank_that_dies:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    pending = [hvd.allreduce_async(torch.ones(10), name=f"pending.{i}") for i in range(3)]
    for handle in pending:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(handle)
        messages.append(str(caught.value))
        assert hvd.synchronize(handle) is None  # forgotten
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.broadcast(torch.ones(1), 0, name="later")
    hvd.shutdown()
    assert not hvd.is_initialized()
    return [*messages, str(caught.value)]


@TRANSPORTS
def test_everything_pending_and_later_fails_and_shutdown_works(transport: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with World(2, transport) as world:
        outcomes = world.outcomes(_wait_for, 1, str(fifo))
    assert outcomes[0].error is None, outcomes[0].text
    assert all("ank 1 (pid " in message for message in outcomes[0].value)


# -- ranks that do not agree: told in words, and the world goes on -----------------------------------------------------
def _disagree(case: str) -> str:
    import torch

    import horovod.torch as hvd

    odd = hvd.rank() == 1
    name = f"disagree.{case}"

    def act() -> Any:
        match case:
            case "dtype":
                return hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32), name=name)
            case "shape":
                return hvd.allreduce(torch.ones(3 if odd else 2), name=name)
            case "broadcast shape":
                return hvd.broadcast(torch.ones(3 if odd else 2), 0, name=name)
            case "allgather columns":
                return hvd.allgather(torch.ones(2, 3 if odd else 2), name=name)
            case "reducescatter shape":
                return hvd.reducescatter(torch.ones(4 if odd else 2), name=name)
            case "op":
                return hvd.allreduce(torch.ones(2), op=hvd.Sum if odd else hvd.Max, name=name)
            case "factor":
                return hvd.allreduce(torch.ones(2), prescale_factor=2.0 if odd else 1.0, name=name)
            case "root":
                return hvd.broadcast(torch.ones(2), 1 if odd else 0, name=name)
            case "operation":
                return hvd.broadcast(torch.ones(2), 0, name=name) if odd else hvd.allreduce(torch.ones(2), name=name)
            case "scalar":
                return hvd.allgather(torch.tensor(1.0), name=name)
            case "differentiable scalar":
                return hvd.allgather(torch.tensor(1.0, requires_grad=True), name=name)
            case "scalar to all":
                return hvd.alltoall(torch.tensor(1.0), name=name)
            case "allgather dimensions":
                return hvd.allgather(torch.ones([2, 2] if odd else [2]), name=name)
            case "alltoall columns":
                return hvd.alltoall(torch.ones(12, 3 if odd else 2), name=name)
            case "group length":
                return hvd.grouped_allreduce([torch.ones(2)] * (3 if odd else 2), name=name)
            case "group shape":
                return hvd.grouped_reducescatter([torch.ones(2), torch.ones(3 if odd else 4)], name=name)
            case "gathered group":
                return hvd.grouped_allgather([torch.ones(2, 3 if odd else 2)], name=name)
        raise AssertionError(case)

    with pytest.raises(hvd.HorovodInternalError) as caught:
        act()
    # The engine is still usable, also under the same name once the ranks agree.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"{name}.after").item() == hvd.size()
    assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name=name).sum().item() == 5 * hvd.size()
    return str(caught.value)


DISAGREEMENTS = {
    "dtype": ("Mismatched data types: One rank had type", "float32", "float64"),
    "shape": ("Mismatched ALLREDUCE tensor shapes", "[2]", "[3]"),
    "broadcast shape": ("Mismatched BROADCAST tensor shapes",),
    "allgather columns": ("Mismatched ALLGATHER tensor shapes",),
    "reducescatter shape": ("Mismatched REDUCESCATTER tensor shapes",),
    "op": ("Mismatched reduction operation",),
    "factor": ("Mismatched prescale and/or postscale factors",),
    "root": ("Mismatched BROADCAST root ranks",),
    "operation": ("Mismatched operations",),
    "scalar": ("ALLGATHER a rank-zero tensor",),
    "differentiable scalar": ("ALLGATHER a rank-zero tensor",),
    "scalar to all": ("ALLTOALL a rank-zero tensor",),
    "allgather dimensions": ("Mismatched ALLGATHER tensor shapes", "dimensions"),
    "alltoall columns": ("Mismatched ALLTOALL tensor shapes", "[*, 2]", "[*, 3]"),
    "group length": ("Mismatched ALLREDUCE tensor counts", "grouped_allreduce.disagree.group length"),
    "group shape": ("Mismatched REDUCESCATTER tensor shapes", "[4]", "[3]"),
    "gathered group": ("Mismatched ALLGATHER tensor shapes",),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_disagreement(world: World, case: str) -> None:
    messages = world.run(_disagree, case)
    for message in messages:
        for stem in DISAGREEMENTS[case]:
            assert stem in message
        if "scalar" not in case:
            assert re.search(r"ranks? 0\b", message, re.IGNORECASE)
            assert re.search(r"rank 1\b", message, re.IGNORECASE)


# -- wrong use on one rank ---------------------------------------------------------------------------------------------
def _duplicate_name() -> None:
    import torch

    import horovod.torch as hvd

    tensor = torch.ones(4)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match=ends_with(OperationCode.NAME_IN_FLIGHT, "allreduce.twice", "rank 0")):
            hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)
        hvd.broadcast_object("go", 0)
    else:
        hvd.broadcast_object(None, 0)
        handle = hvd.allreduce_async(tensor, name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 4
    assert hvd.allreduce(tensor, name="twice", op=hvd.Sum).tolist() == [hvd.size()] * 4


def test_duplicate_name(world: World) -> None:
    world.run(_duplicate_name)


def _after_shutdown() -> None:
    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    tensor = torch.ones(2)
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [2, 2]
    stale = hvd.allreduce_async(tensor, name="never") if hvd.rank() == 0 else None
    hvd.allgather_object("everyone is here")
    epoch = current().world.epoch
    hvd.shutdown()
    hvd.shutdown()
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(tensor), lambda: hvd.allgather_object(1)):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED, "hvd.init()")):
            call()
    hvd.init()
    assert current().world.epoch > epoch
    if stale is not None:  # belongs to the old world, whatever numbers the new one gives
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(stale)
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [2, 2]


@TRANSPORTS
def test_shutdown_and_init_again(transport: str) -> None:
    with World(2, transport) as world:
        world.run(_after_shutdown)


def _fork() -> str:
    import torch

    import horovod.torch as hvd

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce_(torch.ones(1))
            answer = "no error"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after the fork").item() == hvd.size()
    return answer


@TRANSPORTS
def test_forked_child(transport: str) -> None:
    with World(2, transport) as world:
        for answer in world.run(_fork):
            assert answer.startswith("ValueError: ")
            assert code_of(answer) is EngineCode.FORKED_CHILD


def _interrupt() -> list[float]:
    """Ctrl-C in a wait: the call ends, the tensors live on, the world is intact."""
    import threading
    import time

    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    if hvd.rank() == 0:
        main = threading.get_ident()
        engine = current().engine
        state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        before = engine.counters()["submitted"]

        def interrupt() -> None:
            # Nothing announces that a call has begun and that its thread sleeps until the peer comes.
            while engine.counters()["submitted"] == before or state.read_text().rpartition(")")[2].split()[0] != "S":
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce_(torch.ones(1 << 16), name="interrupted")  # nobody holds the tensor any more
        hvd.broadcast_object("go", 0)
    else:
        hvd.broadcast_object(None, 0)
        hvd.allreduce_(torch.ones(1 << 16), name="interrupted")
    return [float(x) for x in hvd.allgather(torch.ones(1), name="after")]


def test_keyboard_interrupt_leaves_the_world_intact(pair: World) -> None:
    assert pair.run(_interrupt) == [[1.0, 1.0], [1.0, 1.0]]
