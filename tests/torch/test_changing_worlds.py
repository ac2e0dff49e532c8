"""Elastic training in real worlds that shrink and grow: the survivors keep their processes and train as if alone.

Each step takes the gradient of the same 12 rows, whatever the number of ranks that share them. So training in any
sequence of worlds gives the weights of one process.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiers
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, WorldCode

BATCHES = 12
ROWS = 12  # of a batch; 1 to 4 ranks share them evenly
KILLED_AT = 5
WAITS_AT = 8  # for the world to have its size again, where it grows

Incident = Callable[[Any], None]


def _model_and_rows() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(BATCHES, ROWS, 8, dtype=torch.float64, generator=generator)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    return model, rows


def _alone() -> list[Any]:
    """The weights after training in one process, without Horovod."""
    import torch

    model, rows = _model_and_rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in rows:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def _train(incident: Incident, grows_to: int = 0, own_reset: bool = False) -> dict[str, Any]:
    """own_reset: the program brings its own loop and leaves its world by hvd.shutdown()."""
    import torch

    import horovod.torch as hvd
    from horovod.common.elastic import run_fn
    from horovod.worker.runtime.context import current

    hvd.init()
    model, rows = _model_and_rows()
    torch.manual_seed(os.getpid())
    for parameter in model.parameters():
        if hvd.rank() > 0:  # what a newcomer begins with must not matter
            torch.nn.init.normal_(parameter)
    # Of equal names; a newcomer has none.
    past = [] if hvd.rank() in current().world.newcomers else _model_and_rows()[:1]
    past = [hvd.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), one.named_parameters()) for one in past]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    worlds = [(hvd.rank(), hvd.size())]
    connections = [current().socket_inodes]
    state = hvd.elastic.TorchState(model, optimizer, batch=0, seen=[])
    state.register_reset_callbacks(
        [lambda: worlds.append((hvd.rank(), hvd.size())), lambda: connections.append(current().socket_inodes)]
    )

    def train(state: Any) -> None:
        while state.batch < BATCHES:
            while state.batch == WAITS_AT and hvd.size() < grows_to:
                time.sleep(0.01)  # training takes its time meanwhile
                state.commit()
            optimizer.zero_grad()
            share = rows[state.batch].chunk(hvd.size())[hvd.rank()]
            model(share).square().mean().backward()
            incident(state)
            optimizer.step()
            state.seen.append(state.batch)
            state.batch += 1
            state.commit()

    def reset() -> None:
        hvd.shutdown()
        hvd.init()

    run = run_fn(train, reset) if own_reset else hvd.elastic.run(train)
    run(state)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {
        "weights": weights,
        "worlds": worlds,
        "connections": connections,
        "seen": state.seen,
        "pid": os.getpid(),
        "numbers": [one._hvd_made.first() for one in (optimizer, *past)],
    }


def _be_killed(
    victims: list[int],
    grows_to: int = 0,
    dies_joining: int | None = None,
    lives: str = "",
    own_reset: bool = False,
) -> Any:
    """The victims die in a step, and `dies_joining` while the next world forms. In place of one, another may come."""
    from horovod.worker.runtime import formation

    number = int(os.environ["HOROVOD_RANK"])
    is_first = True
    if number in victims and lives:
        with open(f"{lives}{number}", "a+") as file:
            is_first = file.tell() == 0
            file.write("x")

    def incident(state: Any) -> None:
        if state.batch == KILLED_AT and is_first and number in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.batch == KILLED_AT and number == dies_joining:
            formation.choose_transport = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    return _train(incident, grows_to, own_reset)


def _elastic(size: int, transport: str, fewest: int = 1) -> World:
    # The first world waits for all processes, for ten settle times after each.
    return World(size, transport, {"HOROVOD_MIN_SIZE": str(fewest), "HOROVOD_MAX_SIZE": str(size)})


def _assert_trained_as_one(result: dict[str, Any]) -> None:
    import numpy as np

    assert result["seen"] == list(range(BATCHES))
    for ours, expected in zip(result["weights"], _alone(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("size", "victims", "dies_joining", "transport"),
    tiers.some(
        [
            *((3, [0], None, "shm"), (2, [0], None, "tcp"), (4, [2, 3], None, "hosts"), (4, [1, 2], None, "hosts")),
            *((2, [1], None, "shm"), (4, [0], 3, "tcp"), (3, [1], 0, "shm"), (4, [0, 1, 2], None, "shm")),
        ],
        3,
    ),
)
def test_the_survivors_go_on(size: int, victims: list[int], dies_joining: int | None, transport: str) -> None:
    with _elastic(size, transport) as world:
        pids = world.pids
        outcomes = world.outcomes(_be_killed, victims, dies_joining=dies_joining)
    dead = {*victims, dies_joining}
    left = [rank for rank in range(size) if rank not in dead]
    by_network = transport == "tcp" or (transport == "hosts" and len({rank // 2 for rank in left}) > 1)
    assert [outcome.text for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        if rank in dead:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.value["pid"] == pids[rank]
        assert outcome.value["worlds"][0] == (rank, size)
        assert outcome.value["worlds"][-1] == (left.index(rank), len(left))
        _assert_trained_as_one(outcome.value)
        # Where one dies once more while they connect, a connection may serve neither world.
        if dies_joining is None:
            first, last = outcome.value["connections"][0], outcome.value["connections"][-1]
            assert last <= first
            assert len(last) == (len(left) - 1 if by_network else 0)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("size", "victim", "transport"), tiers.some([(3, 0, "shm"), (4, 1, "hosts"), (2, 1, "tcp"), (2, 0, "shm")], 2)
)
def test_a_process_in_the_place_of_a_lost_one_is_taken_in(
    size: int, victim: int, transport: str, tmp_path: Any
) -> None:
    with _elastic(size, transport) as world:
        outcomes = world.outcomes(
            _be_killed,
            [victim],
            size,
            lives=str(tmp_path / "lives"),
            own_reset=transport == "tcp",
            before_replacing=[lambda: None],
        )
    assert [outcome.text for outcome in outcomes] == [""] * size
    for rank, outcome in enumerate(outcomes):
        _assert_trained_as_one(outcome.value)
        assert outcome.value["numbers"][0] == "0.bias", "the first one in each world"
        ranks = [size for _, size in outcome.value["worlds"]]
        assert ranks == ([size] if rank == victim else [size, size - 1, size])
        if transport != "shm" and rank != victim:
            first, fewer, again = outcome.value["connections"]
            assert len(first) == len(again) == size - 1
            assert len(first & fewer & again) == size - 2
    assert outcomes[victim].value["worlds"][-1][0] == size - 1 or transport == "hosts"  # after those that survived


def _end_on_the_way() -> dict[str, Any]:
    """Rank 0 dies in a step. Rank 1 dies after it has left that world and before it joins the next one. No agent and no
    other rank watches their processes, so only the end of their connections tells the coordinator.
    """
    import horovod.torch as hvd
    from horovod.common import basics
    from horovod.worker.runtime import witness

    witness.process_namespace = lambda: ""
    basics._leave(returns=True)
    hvd.init()

    def die(**_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def incident(state: Any) -> None:
        if state.batch == KILLED_AT and hvd.size() == 3:
            if hvd.rank() == 0:
                die()
            elif hvd.rank() == 1:
                basics.init = die

    return _train(incident)


def test_one_that_ends_between_two_worlds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its last connection to the coordinator tells it."""
    from horovod.coordinator.core.world import rendezvous

    monkeypatch.setattr(rendezvous, "RETURN_S", 1e6)
    with _elastic(3, "tcp") as world:
        outcomes = world.outcomes(_end_on_the_way)
    assert sorted(outcome.exit_code or 0 for outcome in outcomes) == [-signal.SIGKILL, -signal.SIGKILL, 0]
    (left,) = (outcome for outcome in outcomes if outcome.exit_code is None)
    assert left.text == ""
    assert left.value["worlds"][-1] == (0, 1)
    _assert_trained_as_one(left.value)


def test_too_few_are_left() -> None:
    """Those who wait for others say what for, and end after the elastic timeout."""
    environment = {"HOROVOD_MIN_SIZE": "2", "HOROVOD_MAX_SIZE": "2", "HOROVOD_ELASTIC_TIMEOUT": "1"}
    with World(2, "shm", environment) as world:
        outcomes = world.outcomes(_be_killed, [1])
    pattern = ends_with(WorldCode.INCOMPLETE_WORLD, "HOROVOD_ELASTIC_TIMEOUT")
    assert re.search(pattern, str(outcomes[0].error))


def test_a_script_that_never_commits_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a world of one, to which this test says what a coordinator would."""
    from horovod.common import basics, elastic
    from horovod.worker.runtime.context import current
    from horovod.worker.runtime.world import WorldChange

    warned = threading.Event()
    monkeypatch.setattr(elastic, "UNTAKEN_SECONDS", 0.01)
    monkeypatch.setattr(elastic.log, "warning", lambda text, *values: (said.append(text % values), warned.set()))
    said: list[str] = []
    basics.init()
    try:
        elastic.notification_manager.world_changes(
            WorldChange(current().world.epoch + 1, newcomers=1)
        )  # of a world that is over
        elastic.notification_manager.world_changes(WorldChange(current().world.epoch, newcomers=2))
        assert warned.wait(60)
    finally:
        basics.shutdown()
    assert len(said) == 1
    assert "2 further processes have waited" in said[0]
    assert "state.commit()" in said[0]


def test_a_process_that_its_launcher_wants_back_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was told before it had its world: then when its state is registered."""
    from horovod.common import basics, elastic
    from horovod.worker.runtime.context import current
    from horovod.worker.runtime.world import WorldChange

    asked: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(elastic.departure, "request", asked.put)
    manager = elastic.NotificationManager()
    basics.init()
    try:
        epoch = current().world.epoch
        manager.world_changes(WorldChange(epoch, leavers=(1,)))
        manager.world_changes(WorldChange(epoch + 1, leavers=(0,)))
        assert asked.empty()
        manager.world_changes(WorldChange(epoch, leavers=(0, 1)))
        assert asked.get(timeout=60) == elastic.WANTED_BACK
        manager.tell_again(elastic.ObjectState(lambda value, root_rank=0: value, lambda: 0))
        assert asked.get(timeout=60) == elastic.WANTED_BACK
    finally:
        basics.shutdown()


def _submitted_alone() -> int:
    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    hvd.init()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    before = current().counters()["submitted"]
    weight.sum().backward()
    optimizer.step()
    return current().counters()["submitted"] - before


def test_an_optimizer_that_is_made_by_one_reduces_because_others_may_come() -> None:
    with World(1, "shm", {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": "2"}) as world:
        assert world.run(_submitted_alone) == [1]


def _train_in_sets() -> list[list[tuple[int | None, list[int] | None, Any]]]:
    """For each world: the sets, and what an allreduce in them gives."""
    import torch

    import horovod.torch as hvd
    from horovod.base.errors import code_of
    from horovod.common import basics

    sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [0, 3], [3])]
    basics._leave(returns=True)  # the world that stands already has no sets
    hvd.init(process_sets=sets)
    worlds = []
    state = hvd.elastic.TorchState(batch=0)

    def total(process_set: Any) -> Any:
        try:
            return hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total", process_set=process_set).item()
        except ValueError as error:
            return code_of(error)

    @hvd.elastic.run
    def train(state: Any) -> None:
        worlds.append([(one.process_set_id, one.ranks, total(one)) for one in sets])
        if hvd.size() == 4:
            hvd.barrier()  # all have these results
            if hvd.rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()

    train(state)
    hvd.shutdown()
    assert [(one.process_set_id, one.ranks) for one in sets] == [(None, [0, 1]), (None, [0, 3]), (None, [3])]
    return worlds


def test_process_sets_have_the_ranks_that_are_left() -> None:
    with _elastic(4, "shm") as world:
        outcomes = world.outcomes(_train_in_sets)
    assert [outcome.text for outcome in outcomes] == [""] * 4
    outside, gone = OperationCode.NOT_IN_SET, OperationCode.NO_SUCH_SET
    for rank, outcome in enumerate(outcomes[:3]):
        pair, other = (2.0 if rank < 2 else outside), (2.0 if rank == 0 else outside)
        alone = 1.0 if rank == 0 else outside
        assert outcome.value == [
            [(1, [0, 1], pair), (2, [0, 3], other), (3, [3], outside)],
            [(1, [0, 1], pair), (2, [0], alone), (None, [], gone)],
        ]
