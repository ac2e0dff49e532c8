"""To whom a rank of a world over sockets needs connections: to all, or to some 2 log2 n where there are many."""

from __future__ import annotations

import math

import pytest
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod._core import partners
from horovod.base.errors import EngineCode

SPARSE = {"full_mesh_members": 1}


def all_partners(size: int, hosts: list[int]) -> list[set[int]]:
    return [set(partners(rank, size, hosts=hosts, options=SPARSE)) for rank in range(size)]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=70))
def test_two_ranks_are_partners_of_each_other(hosts: list[int]) -> None:
    found = all_partners(len(hosts), hosts)
    for rank, others in enumerate(found):
        assert rank not in others
        assert all(rank in found[other] for other in others)


@pytest.mark.parametrize("size", [*range(2, 18), 63, 64, 65, 1000, 4096])
def test_each_on_a_host_of_its_own(size: int) -> None:
    """Recursive halving, trees from any root and chains: all go between partners, of whom there are few."""
    power = 1 << (size.bit_length() - 1)
    for rank in {0, 1, size // 3, size // 2, size - 2, size - 1}:
        mine = set(partners(rank, size, options=SPARSE))
        assert len(mine) <= 2 * math.ceil(math.log2(size))
        distances = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
        assert mine >= {(rank + distance) % size for distance in distances} - {rank}
        assert mine >= {(rank - distance) % size for distance in distances} - {rank}
        if rank < power:
            assert mine >= {rank ^ distance for distance in distances if distance < power}
        assert power == size or (rank - power if rank >= power else (rank + power) % size) in mine


def test_ranks_that_share_hosts() -> None:
    """Hosts of ranks 0 to 5 and 6 to 10: rank 1 needs its counterpart 7, and 5, which has none, its leader 0."""
    found = all_partners(11, [0] * 6 + [1] * 5)
    assert found[1] == {0, 2, 3, 4, 5, 7, 8, 9, 10}
    assert found[5] == {0, 1, 2, 3, 4, 6, 7, 8, 9}
    assert {1, 2, 3, 4, 5, 6} <= found[0]


def test_the_first_ranks_of_machines_whose_ranks_share_no_memory() -> None:
    """Machines of ranks 0 to 5, 6 to 10 and 11 to 16: 6 and 0 are at a distance of 6."""
    placement = [0] * 6 + [1] * 5 + [2] * 6
    assert 6 not in partners(0, 17, options=SPARSE)
    assert {6, 11} <= set(partners(0, 17, placement=placement, options=SPARSE))
    assert {0, 11} <= set(partners(6, 17, placement=placement, options=SPARSE))
    assert partners(7, 17, placement=placement, options=SPARSE) == partners(7, 17, options=SPARSE)


def test_a_full_mesh_up_to_the_limit_and_with_gloo() -> None:
    assert partners(2, 5) == [0, 1, 3, 4]
    assert partners(2, 8, options={"full_mesh_members": 8}) == [0, 1, 3, 4, 5, 6, 7]
    assert 6 in partners(2, 8, options={"full_mesh_members": 7})
    assert 7 not in partners(2, 8, options={"full_mesh_members": 7})
    assert partners(2, 8, options={"full_mesh_members": 7, "gloo": 1}) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("rank", "size", "hosts"), [(3, 3, []), (-1, 3, []), (0, 3, [0, 1])])
def test_numbers_that_fit_to_no_world(rank: int, size: int, hosts: list[int]) -> None:
    with pytest.raises(ValueError, match=ends_with(EngineCode.INTERNAL)):
        partners(rank, size, hosts=hosts)
