"""What programs of torch.distributed see over our backend when ranks differ, leave, fork or are interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import _error_of, _in_default_group
from worlds import Keeper

from horovod.base.errors import EngineCode, OperationCode, code_of


@pytest.fixture(scope="module", params=["shm", "tcp"])
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(2, request.param) as keeper:
        yield keeper


@pytest.fixture
def two(keeper: Keeper, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a function on each rank between the begin and the end of a default group."""

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return keeper.get().run(_in_default_group, function, str(tmp_path / "store"), *arguments)

    return run


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _destroyed(ran_before: bool) -> BaseException | None:
    group = dist.new_group()
    if ran_before:  # then the operation has an id, and no rank asks the coordinator
        dist.all_reduce(torch.zeros(1), group=group)
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        _store().set("destroyed", "")
        return None
    _store().wait(["destroyed"])
    error = _error_of(lambda: dist.all_reduce(torch.zeros(1), group=group))
    dist.destroy_process_group(group)
    return error


@pytest.mark.parametrize("ran_before", [False, True], ids=["new", "used"])
def test_an_operation_of_a_group_that_another_rank_destroyed_names_that_rank(
    two: Callable[..., Any], ran_before: bool
) -> None:
    _, error = two(_destroyed, ran_before)
    assert isinstance(error, dist.DistBackendError)
    assert "all_reduce in the group of ranks 0, 1" in str(error)
    assert "ank 0 " in str(error)
    assert code_of(error) is OperationCode.NO_SUCH_SET


def _destroys_under_way() -> BaseException | None:
    group = dist.new_group()
    if dist.get_rank() == 1:
        _store().wait(["destroyed"])
        error = _error_of(lambda: dist.broadcast(torch.zeros(1), 0, group=group))
    else:
        work = dist.broadcast(torch.zeros(1), 0, group=group, async_op=True)
        assert work is not None
        dist.destroy_process_group(group)
        _store().set("destroyed", "")
        error = _error_of(work.wait)
    dist.all_reduce(total := torch.ones(1))  # the default group has nothing to do with it
    assert total.item() == 2
    return error


def test_a_group_may_be_destroyed_while_an_operation_runs_in_it(two: Callable[..., Any]) -> None:
    for error in two(_destroys_under_way):
        assert isinstance(error, dist.DistBackendError)
        assert "broadcast in the group of ranks 0, 1" in str(error)
        assert code_of(error) is OperationCode.NO_SUCH_SET


def _differ() -> list[BaseException | None]:
    rank, group = dist.get_rank(), dist.new_group()
    operation = _error_of(
        lambda: (
            dist.all_reduce(torch.zeros(2), group=group) if rank else dist.broadcast(torch.zeros(2), src=0, group=group)
        )
    )
    dtype = _error_of(lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int32 if rank else torch.int64)))
    root = _error_of(lambda: dist.broadcast(torch.zeros(2), src=rank))
    return [operation, dtype, root]


def test_ranks_that_differ_are_told_in_what_and_in_which_group(two: Callable[..., Any]) -> None:
    for rank, (operation, dtype, root) in enumerate(two(_differ)):
        for error in (operation, dtype, root):
            assert isinstance(error, dist.DistBackendError)
            assert code_of(error) is OperationCode.MISMATCHED
            assert "rank 0" in str(error)
            assert "rank 1" in str(error)
        assert f"{'all_reduce' if rank else 'broadcast'} in the group of ranks 0, 1" in str(operation)
        assert "all_reduce in the default group" in str(dtype)
        assert "broadcast in the default group" in str(root)


def _forks() -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # which is no rank
        try:
            os.write(write, str(_error_of(lambda: dist.all_reduce(torch.zeros(1)))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == 2
    return said


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_goes_on(two: Callable[..., Any]) -> None:
    for said in two(_forks):
        assert code_of(said) is EngineCode.FORKED_CHILD


def _interrupted() -> str:
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())

    def wait_for_rank_0() -> None:
        _store().set("waits", "")
        dist.all_reduce(torch.zeros(1))

    if dist.get_rank() == 0:
        _store().wait(["waits"])
        os.kill(pids[1], signal.SIGINT)
        _store().wait(["interrupted"])
    elif isinstance(error := _error_of(wait_for_rank_0), KeyboardInterrupt):
        _store().set("interrupted", "")
        return "interrupted"
    else:
        return str(error)
    return ""


def test_an_interrupt_ends_a_rank_that_waits_for_another(two: Callable[..., Any]) -> None:
    assert two(_interrupted) == ["", "interrupted"]


def _with_details() -> list[torch.Tensor]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
        wrapped(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finally:
        dist.set_debug_level(level)


def test_training_with_torch_s_debug_level(two: Callable[..., Any]) -> None:
    first, second = two(_with_details)
    assert len(first) == 4
    torch.testing.assert_close(first, second, rtol=0, atol=0)
