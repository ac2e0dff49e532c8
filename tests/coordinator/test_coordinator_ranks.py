"""Ranks are host-major, stable, and complete."""

import re

import pytest
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.errors import WorldCode
from horovod.coordinator.core.ranks import Place, Seat, assign


def places(text: str) -> tuple[Place, ...]:
    """Assigns "member@host member@host=requested ..."."""
    seats = []
    for word in text.split():
        member, _, rest = word.partition("@")
        host, _, rank = rest.partition("=")
        seats.append(Seat(member, host, int(rank) if rank else None))
    result = assign(seats)
    assert isinstance(result, tuple), result
    return result


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        ("x@a", "x"),
        ("x@a y@a", "x y"),
        ("x@b y@a z@b", "x z y"),  # host b came first and keeps its members together
        ("x@a y@b z@c w@a", "x w y z"),
        ("x@a=1 y@a=0", "y x"),
        ("x@a=0 y@b=1 z@a=2", "x y z"),  # a launcher's choice stands even when it is not host-major
    ],
)
def test_order(joined: str, expected: str) -> None:
    result = places(joined)
    assert " ".join(place.member_id for place in result) == expected
    assert [place.rank for place in result] == list(range(len(result)))


def test_local_and_cross_numbers_of_uneven_hosts() -> None:
    # host a has 3 members, b has 1, c has 2
    result = places("x@a y@b z@c p@a q@a r@c")
    assert [(p.member_id, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in result] == [
        ("x", 0, 3, 0, 3),
        ("p", 1, 3, 0, 2),
        ("q", 2, 3, 0, 1),
        ("y", 0, 1, 1, 3),
        ("z", 0, 2, 2, 3),
        ("r", 1, 2, 1, 2),
    ]


def test_a_host_keeps_its_cross_rank_when_ranks_are_dealt_out_host_by_host() -> None:
    result = places("w@a=0 x@b=1 y@b=2 z@a=3")
    assert {p.member_id: p.cross_rank for p in result} == {"w": 0, "z": 0, "x": 1, "y": 1}


@pytest.mark.parametrize(
    ("seats", "facts"),
    [
        ([Seat("x", "a", 0), Seat("y", "a")], ("1 of 2 members",)),
        ([Seat("x", "a", 0), Seat("y", "a", 0)], ("rank 0", "rank 1")),
        ([Seat("x", "a", 0), Seat("y", "a", 5)], ("ranks 0 and 5", "rank 1")),
    ],
)
def test_refusals(seats: list[Seat], facts: tuple[str, ...]) -> None:
    result = assign(seats)
    assert isinstance(result, str)
    assert re.search(ends_with(WorldCode.INVALID_RANK, *facts), result)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_every_number_is_consistent(hosts: list[str]) -> None:
    result = assign([Seat(str(index), host) for index, host in enumerate(hosts)])
    assert isinstance(result, tuple)
    host_of = dict(enumerate(hosts))
    assert sorted(int(place.member_id) for place in result) == list(range(len(hosts)))
    seen: list[str] = []
    for place in result:
        host = host_of[int(place.member_id)]
        assert host == (seen[-1] if seen else host) or host not in seen, "members of a host are neighbours"
        assert place.local_rank == seen.count(host)
        seen.append(host)
        assert place.local_size == hosts.count(host)
        assert place.cross_size == sum(hosts.count(other) > place.local_rank for other in set(hosts))
        assert 0 <= place.cross_rank < place.cross_size
    assert len({(p.local_rank, p.cross_rank) for p in result}) == len(hosts)
