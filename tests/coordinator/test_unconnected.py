"""Members of a world that can't connect to each other: who is told what, and who goes on. Without clock and socket."""

from __future__ import annotations

import pytest
from test_elastic_worlds import Elastic

from horovod.coordinator.core.world.leavers import GATHER_S, to_go
from horovod.protos.v1 import membership_pb2 as pb


@pytest.mark.parametrize(
    ("pairs", "newcomers", "gone"),
    [
        ([(1, 0)], [], {1}),
        ([(1, 0)], [0], {0}),
        ([(2, 0), (3, 0), (2, 1), (3, 1)], [], {2, 3}),  # two hosts of two
        ([(1, 0), (2, 0), (3, 0)], [], {0}),  # one that nobody reaches
        ([(1, 0), (2, 1), (3, 2)], [2], {1, 2}),
    ],
)
def test_without_whom_all_others_can_connect(
    pairs: list[tuple[int, int]], newcomers: list[int], gone: set[int]
) -> None:
    assert to_go(pairs, newcomers) == gone


def report(story: Elastic, name: str, *ranks: int, epoch: int = 1) -> None:
    told = pb.MemberMessage(unconnected=pb.Unconnected(epoch=epoch, ranks=ranks, tried="10.0.0.1:7: no connection"))
    story.take(story.membership.reported(story.member(name), told, story.now_s))


def told(story: Elastic, names: str) -> list[str]:
    return [
        event.unconnectable.sentence
        for name in names
        for event in story.told[story.member(name)]
        if event.HasField("unconnectable")
    ]


@pytest.mark.parametrize("fewest", [2, 4])
def test_all_pairs_are_in_one_sentence(fewest: int) -> None:
    story = Elastic(fewest, 4)
    story.come_all("abcd")
    report(story, "d", 0, 4711)
    report(story, "c", 2)  # nonsense
    story.pass_time(GATHER_S / 2)
    report(story, "c", 0)
    report(story, "b", 0, epoch=7)  # of another world
    assert told(story, "abcd") == []
    story.pass_time(GATHER_S / 2)
    going = told(story, "abcd")
    assert going == [going[0]] * (1 if fewest == 2 else 4)
    assert told(story, "a") == going[:1]  # the one that two others can't reach
    for name in "cd":
        assert f"rank {'abcd'.index(name)} (pid".casefold() in going[0].casefold()
    if fewest == 2:
        assert [gone.rank for gone in story.goodbyes(story.member("b"))] == [0]


def test_those_that_are_gone_by_then_do_not_count() -> None:
    story = Elastic(1, 3)
    story.come_all("abc")
    report(story, "c", 0)
    story.lose(story.member("a"))
    story.pass_time(GATHER_S)
    assert told(story, "bc") == []
