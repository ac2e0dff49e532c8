"""hvd.elastic: state that goes back to its last commit, and training that goes on after failures in real worlds."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode
from horovod.common.elastic import HostUpdateResult, notification_manager
from horovod.common.exceptions import HostsUpdatedInterrupt

BATCHES = 12


# -- TorchState --------------------------------------------------------------------------------------------------------
def _adam(seed: int) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))


def _step(model: Any, optimizer: Any) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


def _everything(state: Any) -> str:
    """All there is to know of a state, for comparing."""
    model = {name: value.tolist() for name, value in state.model.state_dict().items()}
    optimizer = state.optimizer.state_dict()
    moments = {
        index: {name: value.tolist() for name, value in moment.items()} for index, moment in optimizer["state"].items()
    }
    groups = [sorted(group.items()) for group in optimizer["param_groups"]]
    return repr((model, moments, groups, state.sampler.state_dict(), state.epoch, state.losses))


def _schedulers() -> None:
    """After restore() and sync() they steer the optimizer that trains, not a copy of it."""
    import torch

    import horovod.torch as hvd

    class Warmup:
        """Wraps another scheduler, as some of those outside of torch do."""

        def __init__(self, after: Any) -> None:
            self.after = after
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            self.after.step()

        def state_dict(self) -> dict[str, Any]:
            return self.__dict__

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)

    class Holder:
        """A plain value that refers to the optimizer."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model, plain = _adam(seed=0)
    schedules = torch.optim.lr_scheduler
    before = schedules.ExponentialLR(plain, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    after = schedules.ExponentialLR(optimizer, gamma=0.5)
    warmup = Warmup(schedules.ExponentialLR(optimizer, gamma=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = hvd.elastic.TorchState(
        model, optimizer, before=before, after=after, warmup=warmup, scaler=scaler, holder=Holder(optimizer), late=None
    )
    state.late = schedules.ExponentialLR(optimizer, gamma=0.5)
    state.commit()
    rate = optimizer.param_groups[0]["lr"]

    def step_all() -> None:
        scaler.scale(model(torch.ones(2, 3, dtype=torch.float64)).sum()).backward()
        scaler.unscale_(optimizer)  # a failure in a step after this one would let the scaler refuse the next
        for scheduler in (before, after, warmup, state.late):
            scheduler.step()

    step_all()
    assert optimizer.param_groups[0]["lr"] == rate / 16
    state.restore()
    assert optimizer.param_groups[0]["lr"] == rate
    assert (after.last_epoch, warmup.steps) == (0, 0)
    step_all()
    assert optimizer.param_groups[0]["lr"] == rate / 16
    optimizer.zero_grad()
    scaler.update()
    state.sync()
    assert optimizer.param_groups[0]["lr"] == rate / 16
    step_all()
    assert optimizer.param_groups[0]["lr"] == rate / 256
    state.restore()
    assert optimizer.param_groups[0]["lr"] == rate / 16
    assert (after.last_epoch, warmup.steps) == (1, 1)
    assert (state.before, state.after, state.warmup, state.scaler) == (before, after, warmup, scaler)
    assert state.holder.optimizer is optimizer


def test_schedulers_steer_the_optimizer_that_trains(pair: World) -> None:
    pair.run(_schedulers)


def _commit_restore_sync() -> list[str]:
    import horovod.torch as hvd

    rank = hvd.rank()
    model, optimizer = _adam(seed=rank)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=rank, losses=[])

    def advance() -> None:
        _step(model, optimizer)
        sampler.record_batch(0, rank + 1)
        state.epoch += 10
        state.losses.append(float(rank))

    advance()
    advance()
    committed = _everything(state)
    state.commit()
    advance()
    advance()
    changed = _everything(state)
    state.restore()
    assert _everything(state) == committed != changed
    advance()  # neither the live nor the saved state has lost its tensors to the other
    assert _everything(state) != committed
    state.restore()
    assert _everything(state) == committed

    advance()
    live = _everything(state)
    state.sync()
    synced = _everything(state)
    assert (synced == live) is (rank == 0)
    advance()
    state.restore()
    assert _everything(state) == synced, "a restore never goes back behind a sync"
    assert len(sampler) == len(list(sampler))
    return [synced]


def test_commit_restore_and_sync(world: World) -> None:
    results = world.run(_commit_restore_sync)
    assert all(result == results[0] for result in results)


def _assign() -> None:
    import torch

    import horovod.torch as hvd

    state = hvd.elastic.TorchState(extra=torch.nn.Linear(1, 1), note="a")
    assert state.model is None
    model, optimizer = _adam(seed=0)
    state.model, state.optimizer = model, optimizer  # plain until now
    before = model[0].weight.tolist()
    _step(model, optimizer)
    state.restore()
    assert model[0].weight.tolist() == before

    other = torch.nn.Linear(2, 1)
    state.extra = other
    assert state.extra is other
    weight = other.weight.tolist()
    torch.nn.init.zeros_(other.weight)
    state.note = "b"
    state.restore()
    assert other.weight.tolist() == weight
    assert state.note == "a", "plain values are saved by save()"


def test_assigning_a_model_saves_it(pair: World) -> None:
    pair.run(_assign)


def _registry() -> list[Any]:
    import horovod.torch as hvd
    from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

    class Table:
        rows: tuple[int, ...] = (hvd.rank(), 1)

    class TableHandler(StateHandler):
        def save(self) -> None:
            self.saved = self.value.rows

        def restore(self) -> None:
            self.value.rows = self.saved

        def sync(self) -> None:
            self.value.rows = hvd.broadcast_object(self.value.rows, self.root_rank)

    before = get_handler_registry()
    try:
        set_handler_registry([(Table, TableHandler), *before])
        table = Table()
        state = hvd.elastic.TorchState(table=table)
        state.sync()
        synced = table.rows
        table.rows = ()
        state.restore()
        assert state.table is table
        assert get_handler_registry()[0] == (Table, TableHandler)
        return [synced, table.rows]
    finally:
        set_handler_registry(before)


def _changed_in_place() -> None:
    import horovod.torch as hvd
    from horovod.torch.elastic.state import StateHandler, get_handler_registry

    class Kind(int):
        pass

    class KindHandler(StateHandler):
        save = restore = sync = lambda self: None

    get_handler_registry().insert(0, (Kind, KindHandler))
    try:
        state = hvd.elastic.TorchState(kind=Kind(3))
        assert isinstance(state._handlers["kind"], KindHandler)
    finally:
        del get_handler_registry()[0]


def test_the_registry_may_be_changed_in_place(pair: World) -> None:
    pair.run(_changed_in_place)


def test_handlers_of_ones_own(pair: World) -> None:
    assert pair.run(_registry) == [[(0, 1), (0, 1)]] * 2


def _furthest(is_newcomer: bool = False) -> tuple[list[float], int]:
    import torch

    import horovod.torch as hvd
    from horovod.common import elastic

    model = torch.nn.Linear(1, 1, bias=False)
    state = hvd.elastic.TorchState(model, batch=0)
    state.sync()
    if hvd.rank() == 1:  # rank 0 was interrupted before it had saved this commit
        state.check_host_updates = lambda: None
        torch.nn.init.constant_(model.weight, 7.0)
        state.batch = 1
        state.commit()
    torch.nn.init.constant_(model.weight, 9.0)
    state.restore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_is_newcomer", lambda: is_newcomer and hvd.rank() == 1)
        state.sync()
    return model.weight.flatten().tolist(), state.batch


def test_the_state_comes_from_the_rank_that_has_committed_most_often(pair: World) -> None:
    assert pair.run(_furthest) == [([7.0], 1)] * 2


def test_the_state_never_comes_from_a_rank_without_which_the_others_have_gone_on(pair: World) -> None:
    (weight, batch), other = pair.run(_furthest, True)
    assert (weight, batch) == other
    assert weight != [7.0]
    assert batch == 0


def _other_names() -> str:
    import horovod.torch as hvd

    state = hvd.elastic.TorchState(**{"batch": 0, "loss" if hvd.rank() else "losses": 0})
    with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_STATES, "loss, losses")) as error:
        state.sync()
    return str(error.value)


def test_states_of_other_names(pair: World) -> None:
    first, second = pair.run(_other_names)
    assert first == second
    assert "rank 1" in first


# -- training that goes on ---------------------------------------------------------------------------------------------
class Rejoining(logging.Handler):
    """Writes to a FIFO when this process has joined again and waits for others: once in each attempt."""

    def __init__(self, fifo: str) -> None:
        super().__init__()
        self._fifo = fifo
        self._told = False
        logger = logging.getLogger("horovod")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "lost while the next world formed" in message:
            self._told = False
        elif "Waiting for the world" in message and not self._told:
            self._told = True
            Path(self._fifo).write_text("x")


def _train(incident: Callable[[Any], None] = lambda state: None) -> dict[str, Any]:
    """Trains on batches that depend on the rank and the number of the batch alone; calls `incident` in each."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())  # sync() must make them equal
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(range(1000), seed=3)
    worlds: list[int] = []
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, seen=[])
    state.register_reset_callbacks([lambda: worlds.append(hvd.rank())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        data = iter(state.sampler)
        while state.batch < BATCHES:
            indices = [next(data) for _ in range(2)]
            rows = torch.tensor([[index % (k + 3) for k in range(8)] for index in indices], dtype=torch.float64)
            loss = model(rows / 10).square().sum()
            loss.backward()
            incident(state)
            optimizer.step()
            optimizer.zero_grad()  # after the step: what a failed one leaves there must not be added to the next
            state.batch += 1
            state.seen.append(state.batch)
            sampler.record_batch(state.batch, 2)
            state.commit()

    train(state)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"weights": weights, "worlds": worlds, "rank": hvd.rank(), "seen": state.seen, "done": sampler.processed_num}


def _assert_same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        for what in ("weights", "seen", "done"):
            assert result[what] == expected[0][what], what
    assert expected[0]["seen"] == list(range(1, BATCHES + 1))


def _disagree_once() -> dict[str, Any]:
    import torch

    import horovod.torch as hvd

    happened: list[int] = []

    def incident(state: Any) -> None:
        if state.batch == 5 and not happened:
            happened.append(5)
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="mismatch")

    return _train(incident)


def test_ranks_that_disagree_start_over_from_the_commit(world: World) -> None:
    results = world.run(_disagree_once)
    assert [result["worlds"] for result in results] == [[rank] for rank in range(world.size)]
    _assert_same(results, world.run(_train))


def _hear_late(victim: int) -> None:
    """In the next world, the victim's process ends before this one's engine starts, and its news comes after that."""
    from horovod.worker.runtime import formation, local_member

    choose, start, on_event = formation.choose_transport, formation._engine, local_member.LocalMember.on_event
    failed = threading.Event()

    def choose_later(settings: Any, world: Any) -> Any:
        formation.choose_transport = choose
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(world.members[victim].pid)
            assert select.select([process], [], [], 60)[0], "the victim lives"
            os.close(process)
        return choose(settings, world)

    def start_or_tell(*arguments: Any, **options: Any) -> Any:
        try:
            return start(*arguments, **options)
        except Exception:
            failed.set()
            raise

    def hear_later(self: Any, event: Any) -> None:
        if event.WhichOneof("event") == "gone" and self._engine is None:
            assert failed.wait(60), "the engine started"
        on_event(self, event)

    formation.choose_transport, formation._engine = choose_later, start_or_tell
    local_member.LocalMember.on_event = hear_later  # type: ignore[method-assign]


def _be_killed(victim: int, deaths: int, lives: str, fifo: str, late: bool = False) -> dict[str, Any]:
    """Rank `victim` dies in training and, if that is not enough, each process in its place between world and engine."""
    from horovod.worker.runtime import formation

    rank = int(os.environ["HOROVOD_RANK"])
    life = 0
    if rank == victim:
        with open(lives, "a+") as file:
            life = file.tell()
            file.write("x")
    if rank == min({0, 1} - {victim}):
        Rejoining(fifo)
    if late and rank != victim:
        _hear_late(victim)
    if 0 < life < deaths:
        formation.choose_transport = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def incident(state: Any) -> None:
        if rank == victim and life == 0 and state.batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    return _train(incident)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A name, and a function that waits until a process has written there."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # also a writer, so that it never ends

    def wait() -> None:
        assert select.select([descriptor], [], [], 60)[0], "no survivor joined again"
        os.read(descriptor, 1)

    yield str(path), wait
    os.close(descriptor)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("size", "victim", "deaths", "transport"),
    tiers.some(
        [
            *((4, 1, 2, "hosts"), (2, 1, 1, "shm"), (2, 0, 1, "tcp"), (3, 0, 1, "shm"), (3, 1, 1, "tcp")),
            *((3, 2, 1, "shm"), (3, 1, 2, "shm"), (3, 0, 2, "tcp")),
        ],
        4,
    ),
)
def test_a_killed_rank_is_replaced(
    size: int, victim: int, deaths: int, transport: str, tmp_path: Path, fifo: tuple[str, Callable[[], None]]
) -> None:
    name, wait = fifo
    lives = str(tmp_path / "lives")
    with World(size, transport) as world:
        expected = world.run(_train)
        outcomes = world.outcomes(_be_killed, victim, deaths, lives, name, before_replacing=[wait] * deaths)
    assert [outcome.text for outcome in outcomes] == [""] * size
    results = [outcome.value for outcome in outcomes]
    assert [result["worlds"] for result in results] == [[] if rank == victim else [rank] for rank in range(size)]
    _assert_same(results, expected)


def test_an_engine_that_fails_before_the_news_of_a_lost_member(
    tmp_path: Path, fifo: tuple[str, Callable[[], None]]
) -> None:
    name, wait = fifo
    with World(2, "shm") as world:
        outcomes = world.outcomes(
            _be_killed, 1, 2, str(tmp_path / "lives"), name, late=True, before_replacing=[wait] * 2
        )
    assert [outcome.text for outcome in outcomes] == ["", ""]


def _hosts_come(timestamp: float) -> dict[str, Any]:
    import horovod.torch as hvd

    told: list[float] = []

    def incident(state: Any) -> None:
        if state.batch == 4 and hvd.rank() == 0 and not told:
            told.append(timestamp)
            notification_manager.handle_hosts_updated(timestamp, HostUpdateResult.added)

    return _train(incident)


def test_news_on_rank_0_interrupts_all(world: World) -> None:
    results = world.run(_hosts_come, 1.0)
    assert [result["worlds"] for result in results] == [[rank] for rank in range(world.size)]
    _assert_same(results, world.run(_train))


def _interrupted(update_res: HostUpdateResult) -> tuple[int, bool, int]:
    import horovod.torch as hvd

    state = hvd.elastic.TorchState(batch=0)
    notification_manager.register_listener(state)
    try:
        for state.batch in range(6):
            if state.batch == 3 and hvd.rank() == 0:
                notification_manager.handle_hosts_updated(1.0, update_res)
            if state.batch == 1 and hvd.rank() == 1:
                notification_manager.handle_hosts_updated(1.0, update_res)  # nobody asks rank 1
            state.check_host_updates()
    except HostsUpdatedInterrupt as interrupt:
        return state.batch, interrupt.skip_sync, hvd.rank()
    finally:
        notification_manager.remove_listener(state)
    raise AssertionError("nobody was interrupted")


@pytest.mark.parametrize("update_res", [HostUpdateResult.removed, HostUpdateResult.added, HostUpdateResult.mixed])
def test_all_are_interrupted_at_the_same_place(pair: World, update_res: HostUpdateResult) -> None:
    removed = update_res == HostUpdateResult.removed
    assert pair.run(_interrupted, update_res) == [(3, removed, 0), (3, removed, 1)]


def test_run_before_init() -> None:
    import horovod.torch as hvd

    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState(batch=0))
