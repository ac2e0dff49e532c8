"""The backend of torch.distributed: what its operations give is what gloo gives, on three ranks that share a world."""

from __future__ import annotations

import itertools
import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Keeper, World

import horovod.torch as hvd
from horovod.base.errors import EngineCode, OperationCode, code_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

REDUCTIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.fixture(scope="module", params=["shm", "tcp"])
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(3, request.param) as keeper:
        yield keeper


@pytest.fixture
def three(keeper: Keeper, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a function on each rank between the begin and the end of a default group."""

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return keeper.get().run(_in_default_group, function, str(tmp_path / "store"), *arguments)

    return run


def _in_default_group(function: Callable[..., Any], path: str, *arguments: Any) -> Any:
    import horovod.torch.distributed  # noqa: F401  (registers the backend)

    dist.init_process_group("horovod", store=dist.FileStore(path, hvd.size()), rank=hvd.rank(), world_size=hvd.size())
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _tensor(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, shape, generator=made).to(dtype)  # sums of such numbers are exact in every type


# -- equal to gloo -----------------------------------------------------------------------------------------------------
def _every_operation(group: Any, dtype: torch.dtype, *, is_async: bool) -> dict[str, Any]:
    """What all collectives but reductions give."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}

    def done(work: Any) -> None:
        if is_async:
            assert work.wait()
            assert work.is_completed()

    one = _tensor(rank, dtype, 2, 3)
    found["broadcast"] = one.clone()
    done(dist.broadcast(found["broadcast"], src=1, group=group, async_op=is_async))
    found["all_gather"] = [torch.zeros_like(one) for _ in range(size)]
    done(dist.all_gather(found["all_gather"], one, group=group, async_op=is_async))
    found["all_gather_into_tensor"] = one.new_zeros(2 * size, 3)
    done(dist.all_gather_into_tensor(found["all_gather_into_tensor"], one, group=group, async_op=is_async))
    found["gather"] = [torch.zeros_like(one) for _ in range(size)] if rank == 2 else None
    done(dist.gather(one, found["gather"], dst=2, group=group, async_op=is_async))
    found["scatter"] = torch.zeros_like(one)
    parts = [_tensor(10 + other, dtype, 2, 3) for other in range(size)] if rank == 1 else None
    done(dist.scatter(found["scatter"], parts, src=1, group=group, async_op=is_async))
    everything = _tensor(20 + rank, dtype, 2 * size, 2)
    found["all_to_all_single"] = torch.zeros_like(everything)
    done(dist.all_to_all_single(found["all_to_all_single"], everything, group=group, async_op=is_async))
    given, taken = [rank + 1 + other for other in range(size)], [other + 1 + rank for other in range(size)]
    found["uneven"] = one.new_zeros(sum(taken), 2)
    uneven = _tensor(30 + rank, dtype, sum(given), 2)
    done(dist.all_to_all_single(found["uneven"], uneven, taken, given, group=group, async_op=is_async))
    done(dist.barrier(group=group, async_op=is_async))
    return found


def _as_gloo_does(dtype: torch.dtype, is_async: bool) -> None:
    gloo = dist.new_group(backend="gloo")
    ours, theirs = (_every_operation(group, dtype, is_async=is_async) for group in (None, gloo))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_give_what_gloo_gives(three: Callable[..., Any], dtype: torch.dtype, is_async: bool) -> None:
    three(_as_gloo_does, dtype, is_async)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def _reductions(names: list[str], dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        op = getattr(dist.ReduceOp, name)
        given = [_tensor(rank, dtype, 6) for rank in range(size)]
        expected = given[0]
        for one in given[1:]:
            expected = _COMBINE[name](expected, one)
        if name == "AVG":
            expected = expected / size
        reduced = given[rank].clone()
        dist.all_reduce(reduced, op=op)
        torch.testing.assert_close(reduced, expected.to(dtype), msg=lambda text, name=name: f"{name}: {text}")
        work = dist.all_reduce(again := given[rank].clone(), op=op, async_op=True)
        assert work is not None
        work.wait()
        torch.testing.assert_close(again, reduced)
        to_one = given[rank].clone()
        dist.reduce(to_one, dst=1, op=op)
        torch.testing.assert_close(to_one, reduced if rank == 1 else given[rank])
        part = torch.zeros(2, dtype=dtype)
        dist.reduce_scatter_tensor(part, given[rank], op=op)
        torch.testing.assert_close(part, reduced[2 * rank : 2 * rank + 2])
        dist.reduce_scatter(part.zero_(), list(given[rank].chunk(size)), op=op)
        torch.testing.assert_close(part, reduced[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_reductions(three: Callable[..., Any], dtype: torch.dtype) -> None:
    names = [name for name in REDUCTIONS if not name.startswith("B") or dtype is torch.int32]
    three(_reductions, [name for name in names if name != "AVG" or dtype.is_floating_point], dtype)


def _odd_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == sum(range(size))
    dist.all_reduce(torch.empty(0))
    table = torch.arange(6.0).view(2, 3) * (rank + 1)
    dist.all_reduce(table.t()[1])  # in steps of three numbers
    assert table[:, 1].tolist() == [6.0, 24.0]
    number = torch.tensor([1j * (rank + 1), 2.0])
    dist.all_reduce(number)
    assert number.tolist() == [6j, 6 + 0j]
    numbers = [torch.zeros(1, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(numbers, torch.tensor([complex(rank, 1)], dtype=torch.complex64))
    assert [one.item() for one in numbers] == [complex(other, 1) for other in range(size)]
    uneven = [torch.zeros(other + 1) for other in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [one.tolist() for one in uneven] == [[float(other)] * (other + 1) for other in range(size)]
    lists = [torch.zeros(other + 1) for other in range(size)]
    dist.all_to_all(lists, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert [one.tolist() for one in lists] == [[float(other)] * (other + 1) for other in range(size)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, src=2)
    assert said == ["from 2"]


def test_scalars_empty_tensors_views_complex_numbers_and_objects(three: Callable[..., Any]) -> None:
    three(_odd_tensors)


# -- groups ------------------------------------------------------------------------------------------------------------
def _groups() -> None:
    rank = dist.get_rank()
    for members in ([0, 2], [1], [2, 1], [0, 1, 2], [0, 2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)
        assert dist.get_process_group_ranks(group) == sorted(members)
        dist.broadcast(tensor.fill_(rank), src=max(members), group=group)
        assert tensor.item() == max(members)
        dist.destroy_process_group(group)


def test_groups_that_overlap_and_come_again(three: Callable[..., Any]) -> None:
    three(_groups)


def _by_members_alone() -> None:
    rank = dist.get_rank()
    works = []
    for members in ([0, 1], [1, 2]):
        mine = members if rank in members else [rank]
        group = dist.new_group(mine, use_local_synchronization=True, timeout=timedelta(seconds=30))
        tensor = torch.tensor([10.0**rank])
        works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(10.0**one for one in mine)))
    for work, tensor, expected in reversed(works):
        assert work is not None
        work.wait()
        assert tensor.item() == expected


def test_members_alone_form_groups_and_operations_of_one_wait_for_no_other(three: Callable[..., Any]) -> None:
    three(_by_members_alone)


def _not_in_order() -> None:
    rank = dist.get_rank()
    group = dist.new_group([2, 0, 1], sort_ranks=False) if "sort_ranks" in dist.new_group.__code__.co_varnames else None
    if group is None:
        return
    assert dist.get_group_rank(group, 2) == 0
    gathered = torch.zeros(3)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == [2.0, 0.0, 1.0]
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.tensor([1.0, 10.0, 100.0]), group=group)
    assert part.item() == 3 * 10.0 ** dist.get_group_rank(group, rank)
    swapped = torch.zeros(3)
    dist.all_to_all_single(swapped, torch.arange(3.0) + 10 * rank, group=group)
    assert swapped.tolist() == [10.0 * other + dist.get_group_rank(group, rank) for other in (2, 0, 1)]


def test_a_group_in_another_order_than_its_ranks(three: Callable[..., Any]) -> None:
    three(_not_in_order)


# -- works and futures -------------------------------------------------------------------------------------------------
def _futures() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.all_reduce(tensor := torch.tensor([float(rank)]), async_op=True)
    assert work is not None
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().item() == 2 * sum(range(size))
    assert work.wait()
    assert work.is_success()
    assert work.result() == [tensor]
    assert work.get_future().done()


def test_futures(three: Callable[..., Any]) -> None:
    three(_futures)


def _waits_in_vain() -> str:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        store.wait(["rank 0 has waited"])
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    assert work is not None
    said = str(_error_of(lambda: work.wait(timedelta(seconds=0.05)))) if dist.get_rank() == 0 else ""
    store.set("rank 0 has waited", "")
    assert work.wait()
    return said


def test_a_wait_that_is_too_long_says_what_it_waited_for(three: Callable[..., Any]) -> None:
    said, *_ = three(_waits_in_vain)
    assert code_of(said) is OperationCode.STALLED
    assert "all_reduce in the default group" in said


# -- training ----------------------------------------------------------------------------------------------------------
def _gradients(backend: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=backend, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _ddp() -> None:
    pair = dist.new_group([0, 1])
    gloo = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() < 2:
        for ours, theirs in zip(_gradients(pair), _gradients(gloo), strict=True):
            assert torch.equal(ours, theirs)


def test_distributed_data_parallel_is_bit_equal_to_gloo_on_two_ranks(three: Callable[..., Any]) -> None:
    three(_ddp)


# -- errors ------------------------------------------------------------------------------------------------------------
def _error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _refused() -> list[BaseException | None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [
        _error_of(lambda: dist.all_reduce(torch.zeros(2 + (rank == 1)))),
        _error_of(lambda: dist.all_gather_into_tensor(torch.zeros(size * 2 + 1), torch.zeros(2))),
        _error_of(lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(size * 2 + 1))),
        _error_of(lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4))),
        _error_of(lambda: dist.send(torch.zeros(1), (rank + 1) % size)),
        _error_of(lambda: dist.all_reduce(torch.zeros(1))),
    ]


def test_errors_name_operation_and_group(three: Callable[..., Any]) -> None:
    for mismatch, gathered, scattered, exchanged, sent, after in three(_refused):
        assert isinstance(mismatch, dist.DistBackendError)
        assert code_of(mismatch) is OperationCode.MISMATCHED
        assert "all_reduce in the default group" in str(mismatch)
        for refused in (gathered, scattered, exchanged):
            assert isinstance(refused, ValueError)
            assert "the default group" in str(refused)
        assert isinstance(sent, NotImplementedError)
        assert after is None


def test_a_lost_rank_is_torch_s_backend_error_with_our_text(tmp_path: Path) -> None:
    with World(2, "shm") as world:
        outcomes = world.outcomes(_in_default_group, _loses_rank_1, str(tmp_path / "store"))
    error = outcomes[0].error
    assert isinstance(error, dist.DistBackendError)
    assert code_of(error) in {OperationCode.PEER_LOST, OperationCode.SHUT_DOWN}
    assert "ank 1" in str(error)


def _loses_rank_1() -> None:
    import os

    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    for _ in itertools.count():
        dist.all_reduce(torch.zeros(1))


def _late(timeout: timedelta) -> str:
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timeout)
    if dist.get_rank() == 0:
        said = str(_error_of(lambda: dist.all_reduce(torch.zeros(1), group=group)))
        store.set("rank 0 was told", "")
        return said
    store.wait(["rank 0 was told"])
    return str(_error_of(lambda: dist.all_reduce(torch.zeros(1))))


def test_the_timeout_of_a_group_ends_what_takes_longer(tmp_path: Path) -> None:
    with World(2, "shm") as world:
        first, second = world.run(_in_default_group, _late, str(tmp_path / "store"), timedelta(seconds=0.5))
    for said in (first, second):
        assert code_of(said) is OperationCode.STALLED
        assert "Rank 0 (pid " in said
        assert "all_reduce in the group of ranks 0, 1 for more than 0.5 s" in said


# -- how a world starts ------------------------------------------------------------------------------------------------
SCRIPT = """
import sys, torch, torch.distributed as dist
import horovod.torch as hvd, horovod.torch.distributed
rank = int(sys.argv[1])
for turn in range(2):
    dist.init_process_group("horovod", init_method="file://" + sys.argv[2] + str(turn), rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == 3 and (hvd.rank(), hvd.size()) == (rank, 2)
    dist.destroy_process_group()
    assert not hvd.is_initialized()
print("done")
"""


def test_processes_that_know_each_other_by_a_file_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            said, complained = process.communicate(timeout=120)
            assert said.endswith("done\n"), complained
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _another_size(path: str) -> str:
    import horovod.torch.distributed  # noqa: F401

    store = dist.FileStore(path, 1)
    error = _error_of(lambda: dist.init_process_group("horovod", store=store, rank=0, world_size=1))
    assert not dist.is_initialized()
    return str(error)


def test_a_default_group_of_some_ranks_of_a_world_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    for rank, said in enumerate(keeper.get().outcomes(_own_store, str(tmp_path))):
        assert said.error is None, (rank, said.text)


def _own_store(folder: str) -> None:
    said = _another_size(f"{folder}/store-{hvd.rank()}")
    assert f"ranks [{hvd.rank()}] of a world of 3" in said
    assert code_of(said) is not EngineCode.INTERNAL
