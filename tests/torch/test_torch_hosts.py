"""Several hosts with several ranks each: memory within a host and TCP between them, in one operation."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
import tiers
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode

SIZES = (1, 700, 5_000, 20_000, 300_000)


@pytest.fixture(scope="module", params=[3, 4], ids=["2+1", "2+2"])
def hosts(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, "hosts") as world:
        yield world


def _place() -> tuple[str, int, int, int, int]:
    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    return current().transport, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def test_ranks_of_a_host_share_memory(hosts: World) -> None:
    places = hosts.run(_place)
    assert {place[0] for place in places} == {"tcp+shm"}
    expected = [(rank % 2, min(2, hosts.size - rank // 2 * 2), rank // 2) for rank in range(hosts.size)]
    assert [place[1:4] for place in places] == expected


def _in_order_of_the_hosts(parts: list) -> object:
    sums = [sum(parts[first + 1 : first + 2], parts[first]) for first in range(0, len(parts), 2)]
    return sum(sums[1:], sums[0])


def _sums(transport: str) -> None:
    """Every size gives the bits that follow from the world; alone, grouped, and as a part of something large."""
    import torch

    import horovod.torch as hvd

    def inputs(rank: int, size: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * size + rank)
        return torch.randn(size, generator=random) * 10.0 ** torch.randint(-4, 5, (size,), generator=random)

    wanted = {
        size: _in_order_of_the_hosts([inputs(rank, size) for rank in range(hvd.size())])
        if transport == "hosts"
        else sum((inputs(rank, size) for rank in range(1, hvd.size())), inputs(0, size))
        for size in SIZES
    }
    for turn in range(2):
        for size in SIZES:
            got = hvd.allreduce(inputs(hvd.rank(), size), op=hvd.Sum, name=f"sum.{size}")
            assert got.equal(wanted[size]), (size, turn)
        group = hvd.grouped_allreduce([inputs(hvd.rank(), size) for size in SIZES], op=hvd.Sum, name="sum.group")
        assert all(got.equal(want) for got, want in zip(group, wanted.values(), strict=True))
        joint = hvd.allreduce(torch.cat([inputs(hvd.rank(), size) for size in SIZES]), op=hvd.Sum, name="sum.joint")
        assert joint.equal(torch.cat(list(wanted.values())))
        for size in SIZES:
            got = hvd.reducescatter(inputs(hvd.rank(), size), op=hvd.Sum, name=f"scattered.{size}")
            assert hvd.allgather(got, name=f"gathered.{size}").equal(wanted[size])


def test_the_order_of_summation_follows_from_the_world(hosts: World) -> None:
    hosts.run(_sums, "hosts")


def test_it_can_be_turned_off() -> None:
    with World(3, "hosts", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}) as world:
        assert {place[0] for place in world.run(_place)} == {"tcp"}
        world.run(_sums, "tcp")


def _sets() -> None:
    import torch

    import horovod.torch as hvd

    across = hvd.add_process_set([0, hvd.size() - 1])
    together = hvd.add_process_set([0, 1])
    uneven = hvd.add_process_set([0, 1, 2])
    for each in (across, together, uneven):
        if each.included():
            for size in SIZES:
                got = hvd.allreduce(torch.full((size,), hvd.rank() + 1.0), op=hvd.Sum, process_set=each)
                assert got.eq(float(sum(rank + 1 for rank in each.ranks))).all()
    for each in (across, together, uneven):
        hvd.remove_process_set(each)


def test_process_sets_across_within_and_of_uneven_hosts() -> None:
    with World(4, "hosts", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as world:
        world.run(_sets)


def _leaked(warm_up: int, cycles: int) -> dict[str, tuple[int, int]]:
    import torch
    from resources import held, leaks

    import horovod.torch as hvd

    before: dict[str, int] = {}
    for cycle in range(warm_up + cycles):
        hvd.shutdown()
        hvd.init()
        assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).eq(float(hvd.size())).all()
        if cycle < warm_up:
            before = {name: max(count, before.get(name, 0)) for name, count in held().items()}
    return leaks(before)


def test_worlds_leave_nothing_behind(hosts: World) -> None:
    assert hosts.run(_leaked, 5, 15) == [{}] * hosts.size


def _with_a_forked_child() -> int:
    import torch

    import horovod.torch as hvd

    if hvd.rank() == 1:
        child = os.fork()
        if child == 0:
            os._exit(0 if hvd.is_initialized() and hvd.rank() == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
    return int(hvd.allreduce(torch.ones(100_000), op=hvd.Sum)[-1])


def test_a_forked_child_disturbs_nobody(hosts: World) -> None:
    assert hosts.run(_with_a_forked_child) == [hosts.size] * hosts.size


def _reduce_until_it_fails(victim: int, elements: int) -> None:
    import torch

    import horovod.torch as hvd

    tensor = torch.ones(elements)
    for step in range(10**6):
        handle = hvd.allreduce_async_(tensor, op=hvd.Max, name="again")
        if step == 5 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.synchronize(handle)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("victim", "elements"), tiers.some([(victim, size) for victim in range(4) for size in (10, 4_000_000)], 3)
)
def test_a_killed_rank_is_named_on_all_others(victim: int, elements: int) -> None:
    from horovod.common.exceptions import HorovodInternalError

    with World(4, "hosts") as world:
        outcomes = world.outcomes(_reduce_until_it_fails, victim, elements)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert isinstance(outcome.error, HorovodInternalError), outcome
        lost = ends_with(OperationCode.PEER_LOST, f"ank {victim} (pid ", f"host-{victim // 2}")
        assert re.search(lost, str(outcome.error))
