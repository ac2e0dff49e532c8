"""Where jobs go: a table of clusters, wishes and answers."""

from __future__ import annotations

import pytest

from horovod.coordinator.core.cluster.placement import Capacity, Part, Resources, natural, place

GIB = 1 << 30
TWO = [Capacity("h1", 2), Capacity("h2", 4)]


@pytest.mark.parametrize(
    ("wanted", "hosts", "expected"),
    [
        (Resources(2), TWO, [("h1", 0, 2)]),  # the fullest host that holds it all
        (Resources(3), TWO, [("h2", 0, 3)]),
        (Resources(5), TWO, [("h1", 0, 1), ("h2", 1, 4)]),  # the largest first, ranks by the names of the hosts
        (
            Resources(6),
            [Capacity("node10", 2), Capacity("node9", 2), Capacity("b", 2)],
            [("b", 0, 2), ("node9", 2, 2), ("node10", 4, 2)],
        ),
        (
            Resources(3, hosts=(("h2", 1), ("h1", 2))),
            TWO,
            [("h2", 0, 1), ("h1", 1, 2)],
        ),  # in the order that was asked for
        (Resources(1, hosts=(("h2", 1), ("h1", 2))), TWO, [("h2", 0, 1)]),
        (
            Resources(2, labels={"disk": "ssd"}),
            [Capacity("h1", 8), Capacity("h2", 2, labels={"disk": "ssd"})],
            [("h2", 0, 2)],
        ),
        (
            Resources(3, cpus=2),
            [Capacity("h1", 8, cpus=4), Capacity("h2", 8, cpus=2)],
            [("h1", 0, 2), ("h2", 2, 1)],
        ),
        (Resources(2, memory_bytes=3 * GIB), [Capacity("h1", 8, memory_bytes=8 * GIB)], [("h1", 0, 2)]),
        (Resources(3, cpus=0.1), [Capacity("h1", 3, cpus=0.3)], [("h1", 0, 3)]),  # 0.3 / 0.1 is less than 3
    ],
)
def test_a_job_that_fits(wanted: Resources, hosts: list[Capacity], expected: list[tuple[str, int, int]]) -> None:
    placed = place(wanted, hosts)
    assert not isinstance(placed, str)
    assert [(part.host, part.first_rank, part.count) for part in placed] == expected


def test_gpus_are_dealt_out_by_name() -> None:
    hosts = [Capacity("h1", 8, gpus=("0", "2", "3")), Capacity("h2", 8, gpus=("GPU-a", "GPU-b"))]
    assert place(Resources(2, gpus=2), hosts) == (
        Part("h1", 0, 1, ("0", "2")),
        Part("h2", 1, 1, ("GPU-a", "GPU-b")),
    )


@pytest.mark.parametrize(
    ("wanted", "hosts", "sentence"),
    [
        (Resources(7), TWO, "it asks for 7 slots, and there is room for 6 on 2 hosts (h1:2 and h2:4)."),
        (Resources(1), [], "it asks for 1 slot, and there is room for 0 on 0 hosts."),
        (
            Resources(2, gpus=1, memory_bytes=2 * GIB, labels={"a": "b"}),
            [Capacity("h1", 9, gpus=("0",), labels={"a": "b"})],
            (
                "it asks for 2 slots with 1 GPU, 2 GiB of memory each on hosts with a=b, and there is room for 1 on 1 "
                "host (h1:1)."
            ),
        ),
        (Resources(2, hosts=(("h3", 2),)), TWO, "it is to run on host h3, whose agent is not there."),
        (Resources(2, hosts=(("h1", 1), ("h2", 1))), [Capacity("h1", 0), Capacity("h2", 4)], None),
    ],
)
def test_a_job_that_does_not_fit(wanted: Resources, hosts: list[Capacity], sentence: str | None) -> None:
    answer = place(wanted, hosts)
    assert isinstance(answer, str)
    assert sentence is None or answer == sentence


def test_names_sort_as_people_count() -> None:
    assert sorted(["n10", "n9", "a", "n9x2", "n9x10"], key=natural) == ["a", "n9", "n9x2", "n9x10", "n10"]
