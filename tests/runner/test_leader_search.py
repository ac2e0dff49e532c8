"""The way to the coordinator that serves agents and jobs, as agents and launchers take it."""

from __future__ import annotations

from horovod.worker.runtime.coordinators import UNREACHABLE, Search


def test_all_are_asked_in_turn() -> None:
    search = Search(["a:1", "b:1", "c:1"])
    asked, rounds = [], []
    for _ in range(6):
        asked.append(search.address)
        rounds.append(search.turn(has_answered=True))
    assert asked == ["a:1", "b:1", "c:1"] * 2
    assert rounds == [False, False, True] * 2


def test_it_goes_where_it_is_sent_and_stays_when_served() -> None:
    search = Search(["a:1", "b:1"])
    assert not search.turn(True, "elsewhere:1")
    assert search.address == "elsewhere:1"
    search.served()
    assert search.address == "elsewhere:1"
    assert search.metadata() == ()


def test_who_sent_it_in_vain_is_told() -> None:
    search = Search(["a:1", "b:1"])
    search.turn(True, "elsewhere:1")
    assert not search.turn(has_answered=False)
    assert search.address == "a:1"
    assert search.metadata() == ((UNREACHABLE, "elsewhere:1"),)
    search.turn(True, "elsewhere:1")  # it insists
    assert search.address == "b:1"
    assert search.metadata() == ((UNREACHABLE, "elsewhere:1"),)
    assert search.turn(True)
    assert search.metadata() == (), "it is tried again when it is named again"
    search.turn(True, "elsewhere:1")
    assert search.address == "elsewhere:1"


def test_one_of_its_own_that_does_not_answer_is_named_until_it_does() -> None:
    search = Search(["a:1", "b:1"])
    search.turn(has_answered=False)
    assert (search.address, search.metadata()) == ("b:1", ((UNREACHABLE, "a:1"),))
    search.turn(True, "a:1")
    assert (search.address, search.metadata()) == ("a:1", ())
    search.turn(has_answered=True)
    assert (search.address, search.metadata()) == ("b:1", ())


def test_it_is_not_sent_around_for_ever() -> None:
    search = Search(["a:1", "b:1"])
    for number in range(100):
        if search.turn(True, f"c{number}:1"):
            return
    raise AssertionError("it never had its turn at all of its own")


def test_nonsense_is_no_address() -> None:
    search = Search(["a:1", "b:1"])
    search.turn(True, "no address")
    assert search.address == "b:1"
