"""What follows from the words and questions of ranks at the end of a step: tables, without processes."""

from __future__ import annotations

import itertools

import pytest

from horovod.common.ops.step_words import FLAGS, Asked, Digests, Outcome, Past, Word, flags, heard, held_up, numbers

MADE, FINAL, LACKS, AWAY = Word
STEPPED, DROPPED, EMPTY = Past
JOINED = None  # adds zeros


def _sums(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ((MADE, MADE, MADE), Outcome.OVER),
        ((FINAL, FINAL, FINAL), Outcome.OVER),
        ((MADE, JOINED, MADE), Outcome.OVER),
        ((JOINED, FINAL, FINAL), Outcome.OVER),
        ((MADE, FINAL, MADE), Outcome.AVERAGED),
        ((MADE, FINAL, JOINED), Outcome.AVERAGED),
        ((MADE, LACKS, MADE), Outcome.UNMADE),
        ((MADE, LACKS, FINAL), Outcome.UNMADE),
        ((LACKS, LACKS, LACKS), Outcome.UNMADE),
        ((LACKS, AWAY, FINAL), Outcome.UNMADE),
        ((FINAL, AWAY, FINAL), Outcome.RELEASED),
        ((FINAL, AWAY, AWAY), Outcome.RELEASED),
        ((AWAY, FINAL, JOINED), Outcome.RELEASED),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 128.0])
def test_words(words: tuple[Word | None, ...], outcome: Outcome, factor: float) -> None:
    """In every order of the ranks, with every rank's change or none, averaged or summed."""
    for order in itertools.permutations(words):
        for changing in (None, 0, 1, 2):
            rows = [
                [0.0] * len(flags(MADE, False)) if word is JOINED else flags(word, rank == changing)
                for rank, word in enumerate(order)
            ]
            it = heard([factor * one for one in _sums(rows)])
            assert it.outcome is outcome
            assert it.changed == (changing is not None and order[changing] is not JOINED)


@pytest.mark.parametrize(
    ("digests", "answer"),
    [
        ((None, None, None), Digests.NONE),
        ((7, None, None), Digests.WANTED),
        ((None, 7, 7), Digests.WANTED),
        ((7, 7, 7), Digests.EQUAL),
        ((0, 0, 0), Digests.EQUAL),
        ((2**32 - 1,) * 3, Digests.EQUAL),
        ((7, 7, 6), Digests.DIFFERENT),
        ((2**31, 0, 0), Digests.DIFFERENT),
        ((7, 7, "joined"), Digests.LATER),
        ((7, 6, "joined"), Digests.LATER),
        ((None, None, "joined"), Digests.NONE),
    ],
)
@pytest.mark.parametrize("unit", [1.0, 1 / 3, 1 / 3 * 0.9999999])
def test_digests_that_go_along(digests: tuple[object, ...], answer: Digests, unit: float) -> None:
    for order in itertools.permutations(digests):
        rows = []
        for place, digest in enumerate(order):
            rows.append([0.0] * FLAGS if digest == "joined" else flags(MADE, place == 1, digest))  # type: ignore[arg-type]
        assert heard([unit * one for one in _sums(rows)], 3, unit).digests is answer


@pytest.mark.parametrize(
    ("said", "parted", "empty"),
    [
        ([(MADE, STEPPED), (MADE, STEPPED), (MADE, STEPPED)], False, False),
        ([(MADE, DROPPED), (MADE, DROPPED), (FINAL, EMPTY)], False, False),
        ([(MADE, STEPPED), (MADE, DROPPED), (MADE, STEPPED)], True, False),
        ([(FINAL, STEPPED), (MADE, DROPPED), JOINED], True, False),
        ([(FINAL, STEPPED), (FINAL, EMPTY), (FINAL, EMPTY)], True, False),
        ([(FINAL, EMPTY), (FINAL, EMPTY), (FINAL, EMPTY)], False, True),
        ([(FINAL, EMPTY), JOINED, (FINAL, EMPTY)], False, True),
        ([(FINAL, EMPTY), (FINAL, None), (FINAL, EMPTY)], False, False),  # one does not know
        ([(FINAL, None), (FINAL, STEPPED), (MADE, None)], False, False),
        ([(LACKS, None), (MADE, STEPPED), (MADE, DROPPED)], False, False),  # it comes again with FINAL
        ([(FINAL, STEPPED), (AWAY, None), (FINAL, EMPTY)], False, False),  # not all ranks have said what they did
    ],
)
@pytest.mark.parametrize("unit", [1.0, 1 / 3])
def test_what_became_of_averages(
    said: list[tuple[Word, Past | None] | None], parted: bool, empty: bool, unit: float
) -> None:
    for order in itertools.permutations(said):
        rows = [[0.0] * FLAGS if one is JOINED else flags(one[0], False, past=one[1]) for one in order]
        it = heard([unit * one for one in _sums(rows)], 3, unit)
        assert (it.parted, it.empty) == (parted, empty)


OTHER = None  # waits for something else


@pytest.mark.parametrize(
    ("others", "own", "waits"),
    [
        # what the other ranks say, each (waits, round, confirmed); whether this one's wait is confirmed; the answer
        ([(MADE, 5, False)], False, MADE),
        ([(FINAL, 5, False)], False, FINAL),
        ([(MADE, 4, True)], True, None),  # an old question: it has gone on since
        ([(OTHER, 5, True)], True, None),  # nobody waits for this one
        ([(MADE, 5, False), (MADE, 5, False)], False, MADE),
        ([(MADE, 5, False), (FINAL, 5, False)], False, MADE),
        ([(MADE, 5, False), (MADE, 4, False)], True, None),
        ([(MADE, 5, False), (OTHER, 5, False)], True, None),  # the third may go on, and then end this one's wait
        ([(MADE, 5, True), (OTHER, 5, False)], True, None),
        ([(MADE, 5, False), (OTHER, 5, True)], True, None),
        ([(MADE, 5, True), (OTHER, 5, True)], False, None),
        ([(MADE, 5, True), (OTHER, 5, True)], True, MADE),
        ([(FINAL, 5, True), (OTHER, 3, True)], True, FINAL),
        ([(OTHER, 5, True), (OTHER, 5, True)], True, None),
    ],
)
def test_questions(others: list[tuple[Word | None, int, bool]], own: bool, waits: Word | None) -> None:
    asked = Asked(OTHER, 5, own)
    sums = [
        sum(column) for column in zip(*(numbers(one) for one in [asked, *(Asked(*o) for o in others)]), strict=True)
    ]
    assert held_up(sums, len(others) + 1, asked) is waits


@pytest.mark.parametrize("own", [MADE, FINAL])
def test_who_waits_for_the_others_holds_nobody_up(own: Word) -> None:
    asked = Asked(own, 5, True)
    sums = [sum(column) for column in zip(numbers(asked), numbers(Asked(MADE, 5, True)), strict=True)]
    assert held_up(sums, 2, asked) is None


def test_a_rank_that_has_joined_is_held_up_by_nobody() -> None:
    """Its zeros are no rank that waits."""
    asked = Asked(OTHER, 5, True)
    sums = [sum(column) for column in zip(numbers(asked), numbers(Asked(MADE, 5, True)), [0] * 4, strict=True)]
    assert held_up(sums, 3, asked) is None
