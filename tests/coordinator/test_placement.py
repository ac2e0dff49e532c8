"""Where jobs go: a table of clusters, wishes and answers."""

from __future__ import annotations

import pytest

from horovod.coordinator.core.placement import Part, Room, Wish, natural, place

GIB = 1 << 30
TWO = [Room("h1", 2), Room("h2", 4)]


@pytest.mark.parametrize(
    ("wish", "rooms", "expected"),
    [
        (Wish(2), TWO, [("h1", 0, 2)]),  # the fullest host that holds it all
        (Wish(3), TWO, [("h2", 0, 3)]),
        (Wish(5), TWO, [("h1", 0, 1), ("h2", 1, 4)]),  # the largest first, ranks by the names of the hosts
        (
            Wish(6),
            [Room("node10", 2), Room("node9", 2), Room("b", 2)],
            [("b", 0, 2), ("node9", 2, 2), ("node10", 4, 2)],
        ),
        (Wish(3, hosts=(("h2", 1), ("h1", 2))), TWO, [("h2", 0, 1), ("h1", 1, 2)]),  # in the order that was asked for
        (Wish(1, hosts=(("h2", 1), ("h1", 2))), TWO, [("h2", 0, 1)]),
        (Wish(2, labels={"disk": "ssd"}), [Room("h1", 8), Room("h2", 2, labels={"disk": "ssd"})], [("h2", 0, 2)]),
        (Wish(3, cpus=2), [Room("h1", 8, cpus=4), Room("h2", 8, cpus=2)], [("h1", 0, 2), ("h2", 2, 1)]),
        (Wish(2, memory_bytes=3 * GIB), [Room("h1", 8, memory_bytes=8 * GIB)], [("h1", 0, 2)]),
        (Wish(3, cpus=0.1), [Room("h1", 3, cpus=0.3)], [("h1", 0, 3)]),  # 0.3 / 0.1 is less than 3
    ],
)
def test_a_job_that_fits(wish: Wish, rooms: list[Room], expected: list[tuple[str, int, int]]) -> None:
    placed = place(wish, rooms)
    assert not isinstance(placed, str)
    assert [(part.host, part.first_rank, part.count) for part in placed] == expected


def test_gpus_are_dealt_out_by_name() -> None:
    rooms = [Room("h1", 8, gpus=("0", "2", "3")), Room("h2", 8, gpus=("GPU-a", "GPU-b"))]
    assert place(Wish(2, gpus=2), rooms) == (Part("h1", 0, 1, ("0", "2")), Part("h2", 1, 1, ("GPU-a", "GPU-b")))


@pytest.mark.parametrize(
    ("wish", "rooms", "sentence"),
    [
        (Wish(7), TWO, "it asks for 7 slots, and there is room for 6 on 2 hosts (h1:2 and h2:4)."),
        (Wish(1), [], "it asks for 1 slot, and there is room for 0 on 0 hosts."),
        (
            Wish(2, gpus=1, memory_bytes=2 * GIB, labels={"a": "b"}),
            [Room("h1", 9, gpus=("0",), labels={"a": "b"})],
            (
                "it asks for 2 slots with 1 GPU, 2 GiB of memory each on hosts with a=b, and there is room for 1 on 1 "
                "host (h1:1)."
            ),
        ),
        (Wish(2, hosts=(("h3", 2),)), TWO, "it is to run on host h3, whose agent is not there."),
        (Wish(2, hosts=(("h1", 1), ("h2", 1))), [Room("h1", 0), Room("h2", 4)], None),
    ],
)
def test_a_job_that_does_not_fit(wish: Wish, rooms: list[Room], sentence: str | None) -> None:
    answer = place(wish, rooms)
    assert isinstance(answer, str)
    assert sentence is None or answer == sentence


def test_names_sort_as_people_count() -> None:
    assert sorted(["n10", "n9", "a", "n9x2", "n9x10"], key=natural) == ["a", "n9", "n9x2", "n9x10", "n10"]
