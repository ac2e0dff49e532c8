"""First-time agreement: ids, errors, repeated announcements, recalls. No clock, no socket."""

import re
from collections.abc import Sequence

import pytest
from coordinator_builders import ALLGATHER, FLOAT64, MIN, message, op
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement import negotiation as module
from horovod.coordinator.core.agreement.budget import Answers, TooMuchError
from horovod.coordinator.core.agreement.negotiation import MAX_REMOVED, Negotiation
from horovod.coordinator.core.agreement.takeover import ContradictionError
from horovod.protos.v1 import negotiation_pb2
from horovod.protos.v1 import types_pb2 as pb


class Ranks:
    """The ranks of one world, and what each of them was told."""

    def __init__(self, size: int, id_capacity: int = 1 << 14) -> None:
        self.negotiation = Negotiation(1, size, id_capacity)
        self.plans: list[dict[str, int]] = [{} for _ in range(size)]
        self.errors: list[dict[str, str]] = [{} for _ in range(size)]
        self.recalls: list[list[int]] = [[] for _ in range(size)]
        self.messages = [0] * size
        self.heard = [0] * size  # the latest decisions
        self._numbers: dict[tuple[int, bytes], int] = {}

    def say(
        self,
        rank: int,
        *announce: pb.Operation,
        blocked: Sequence[pb.Operation] = (),
        recalled: Sequence[int] = (),
        waited_s: Sequence[float] = (),
        now_s: float = 0.0,
        resumed: bool = False,
        also: Sequence[pb.Operation] = (),
        executed: int = 0,
        all_threads: bool = True,
    ) -> None:
        """blocked: threads wait for these, and all that is in flight are these and `also`. executed: how many
        operations the rank has run, in each process set.
        """
        said = message(announce, blocked, recalled, waited_s=waited_s)
        if blocked:
            said.blocked_numbers.extend(self._number(rank, one) for one in blocked)
            report = said.blocked_report
            report.all_threads, report.heard = all_threads, self.heard[rank]
            for number in range(4):
                report.executed.add(process_set=number, count=executed)
            for one in (*blocked, *also):
                report.unfinished.add(
                    process_set=one.process_set, name=one.name, awaited=one in blocked, number=self._number(rank, one)
                )
        self.take(self.negotiation.receive(rank, said, now_s, resumed))

    def _number(self, rank: int, one: pb.Operation) -> int:
        """Of the submission; equal ones are one."""
        return self._numbers.setdefault((rank, one.SerializeToString()), len(self._numbers))

    def take(self, answers: Answers) -> None:
        for ranks, decisions in answers:
            assert decisions.epoch == 1
            for rank in ranks:
                self.messages[rank] += 1
                self.heard[rank] = decisions.serial
                for plan in decisions.plans:
                    self.plans[rank][plan.name] = plan.id
                for error in decisions.errors:
                    self.errors[rank][error.name] = error.sentence
                for recall in decisions.recalls:
                    self.recalls[rank].extend(recall.ids)


# -- agreeing --------------------------------------------------------------------------------------------------------


def test_an_id_when_the_last_rank_announces() -> None:
    ranks = Ranks(3)
    ranks.say(2, op())
    ranks.say(0, op())
    assert ranks.plans == [{}, {}, {}]
    ranks.say(1, op())
    assert ranks.plans == [{"allreduce.x": 1}] * 3
    assert ranks.errors == [{}, {}, {}]


def test_a_world_of_one_agrees_with_itself() -> None:
    ranks = Ranks(1)
    ranks.say(0, op(), op("allreduce.y"))
    assert ranks.plans == [{"allreduce.x": 1, "allreduce.y": 2}]


def test_a_first_step_costs_one_message_for_each_rank() -> None:
    ranks = Ranks(2)
    step = [op(f"allreduce.grad{index}", shape=[index]) for index in range(161)]
    ranks.say(0, *step)
    ranks.say(1, *reversed(step))
    assert ranks.messages == [1, 1]
    assert ranks.plans[0] == ranks.plans[1]
    assert sorted(ranks.plans[0].values()) == list(range(1, 162))


def test_every_rank_gets_the_same_error_and_may_go_on() -> None:
    ranks = Ranks(2)
    ranks.say(0, op(), op("allreduce.y"))
    ranks.say(1, op(dtype=FLOAT64), op("allreduce.y"))
    assert ranks.errors[0] == ranks.errors[1]
    assert re.search(ends_with(OperationCode.MISMATCHED, "float32", "float64"), ranks.errors[0]["allreduce.x"])
    assert ranks.plans == [{"allreduce.y": 1}] * 2
    ranks.say(0, op())
    ranks.say(1, op())
    assert ranks.plans[0]["allreduce.x"] == ranks.plans[1]["allreduce.x"] == 2


def test_uneven_rows_agree() -> None:
    ranks = Ranks(2)
    ranks.say(0, op("allgather.x", ALLGATHER, shape=[1, 4]))
    ranks.say(1, op("allgather.x", ALLGATHER, shape=[9, 4]))
    assert ranks.plans == [{"allgather.x": 1}] * 2


NAMES = ("a", "b", "c")
VARIANTS = st.sampled_from([op("?"), op("?", dtype=FLOAT64), op("?", shape=[7]), op("?", reduce_op=MIN)])


def named(name: str, variant: pb.Operation) -> pb.Operation:
    copy = pb.Operation()
    copy.CopyFrom(variant)
    copy.name = name
    return copy


@given(st.data())
def test_decisions_do_not_depend_on_the_interleaving(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    said = {(rank, name): named(name, data.draw(VARIANTS)) for rank in range(size) for name in NAMES}
    outcomes = []
    for _ in range(2):
        ranks = Ranks(size)
        for rank, name in data.draw(st.permutations(sorted(said))):
            ranks.say(rank, said[rank, name])
            if data.draw(st.booleans()) and name not in {**ranks.plans[rank], **ranks.errors[rank]}:
                ranks.say(rank, said[rank, name])  # an undecided announcement said twice changes nothing
        for rank in range(size):
            assert ranks.plans[rank] == ranks.plans[0]
            assert set(ranks.plans[rank]) | set(ranks.errors[rank]) == set(NAMES)
        assert len(set(ranks.plans[0].values())) == len(ranks.plans[0]), "ids are unique"
        outcomes.append((set(ranks.plans[0]), ranks.errors))
    assert outcomes[0] == outcomes[1]


# -- saying it again -------------------------------------------------------------------------------------------------


def test_another_announcement_of_a_rank_replaces_its_undecided_one() -> None:
    ranks = Ranks(2)
    ranks.say(0, op(shape=[1]))
    ranks.say(0, op(shape=[2]))
    ranks.say(1, op(shape=[2]))
    assert ranks.plans == [{"allreduce.x": 1}] * 2


def test_a_name_with_another_signature_gets_an_id_of_its_own() -> None:
    ranks = Ranks(2)
    for shape in ([1], [2]):
        ranks.say(0, op(shape=shape))
        ranks.say(1, op(shape=shape))
    assert ranks.plans == [{"allreduce.x": 2}] * 2
    ranks.say(0, op(shape=[1]))
    ranks.say(1, op(shape=[1]))
    assert ranks.plans == [{"allreduce.x": 1}] * 2, "the old id stayed valid"


def test_what_has_an_id_is_answered_at_once_and_to_the_asking_rank_only() -> None:
    ranks = Ranks(2)
    ranks.say(0, op())
    ranks.say(1, op())
    ranks.plans = [{}, {}]
    ranks.say(1, op(), resumed=True)  # its stream broke before the plan came
    assert ranks.plans == [{}, {"allreduce.x": 1}]


def test_an_error_that_got_lost_with_its_stream_is_given_again_and_only_then() -> None:
    ranks = Ranks(2)
    ranks.say(0, op())
    ranks.say(1, op(shape=[9]))
    lost = dict(ranks.errors[1])
    ranks.errors = [{}, {}]
    ranks.say(1, op(shape=[9]), resumed=True)
    assert ranks.errors == [{}, lost]
    ranks.say(1, op(shape=[9]))
    ranks.say(0, op(shape=[9]))
    assert ranks.plans == [{"allreduce.x": 1}] * 2


def test_unnamed_operations_are_names_of_their_own() -> None:
    ranks = Ranks(2)
    for number in (0, 1):
        ranks.say(0, op(f"allreduce.noname.{number}"))
        ranks.say(1, op(f"allreduce.noname.{number}"))
    assert ranks.plans == [{"allreduce.noname.0": 1, "allreduce.noname.1": 2}] * 2


# -- recalls ---------------------------------------------------------------------------------------------------------


def fill(ranks: Ranks, count: int) -> None:
    for index in range(count):
        for rank in range(len(ranks.plans)):
            ranks.say(rank, op(f"allreduce.{index}"))


def test_a_full_table_recalls_its_oldest_quarter_and_waits_for_every_answer() -> None:
    ranks = Ranks(2, id_capacity=9)  # ids 1 to 8
    fill(ranks, 8)
    for rank in (0, 1):
        ranks.say(rank, op("allreduce.new"), op("allreduce.newer"))
    assert ranks.recalls == [[1, 2], [1, 2]]
    assert "allreduce.new" not in ranks.plans[0]
    ranks.say(0, recalled=[1, 2])
    assert "allreduce.new" not in ranks.plans[0]
    ranks.say(0, recalled=[1, 2, 77])  # said twice, and an id that nobody recalled
    ranks.say(1, recalled=[2])
    assert ranks.plans[0]["allreduce.new"] == ranks.plans[1]["allreduce.new"] == 2
    ranks.say(1, recalled=[1])
    assert ranks.plans[0]["allreduce.newer"] == ranks.plans[1]["allreduce.newer"] == 1


def test_what_was_recalled_is_negotiated_anew() -> None:
    ranks = Ranks(2, id_capacity=5)  # ids 1 to 4; one is recalled at a time
    fill(ranks, 4)
    ranks.say(0, op("allreduce.new"))
    ranks.say(1, op("allreduce.new"))
    assert ranks.recalls == [[1], [1]]
    ranks.plans = [{}, {}]
    ranks.say(0, op("allreduce.0"), recalled=[1])  # pending under the recalled id, so announced again
    ranks.say(0, op("allreduce.0"))
    assert ranks.plans == [{}, {}]
    ranks.say(1, op("allreduce.0"), recalled=[1])
    assert ranks.plans == [{"allreduce.new": 1}] * 2
    assert ranks.recalls == [[1, 2], [1, 2]], "the next one waits for the next id"
    ranks.say(0, op("allreduce.0"), recalled=[2])
    ranks.say(1, recalled=[2])
    assert ranks.plans == [{"allreduce.new": 1, "allreduce.0": 2}] * 2


def test_a_rank_that_comes_back_hears_of_recalls_that_it_owes() -> None:
    ranks = Ranks(2, id_capacity=5)
    fill(ranks, 4)
    ranks.say(0, op("allreduce.new"))
    ranks.say(1, op("allreduce.new"))
    ranks.say(0, recalled=[1])
    ranks.recalls = [[], []]
    ranks.say(0, resumed=True)
    ranks.say(1, resumed=True)
    assert ranks.recalls == [[], [1]]


def test_a_recall_that_is_answered_as_the_rank_comes_back_is_not_repeated() -> None:
    """In the same decisions its id may mean something else already, and ranks apply plans before recalls."""
    ranks = Ranks(2, id_capacity=5)
    fill(ranks, 4)
    ranks.say(0, op("allreduce.new"))
    ranks.say(1, op("allreduce.new"))
    ranks.say(1, recalled=[1])
    ranks.recalls = [[], []]
    ranks.say(0, resumed=True, recalled=[1])
    assert [plans["allreduce.new"] for plans in ranks.plans] == [1, 1]
    assert ranks.recalls == [[], []]


def test_a_rank_that_is_gone_owes_no_answers_and_leaves_nothing_behind() -> None:
    ranks = Ranks(2, id_capacity=5)
    fill(ranks, 4)
    ranks.say(0, op("allreduce.new"), op("allreduce.alone"))
    ranks.say(1, op("allreduce.new"))
    ranks.say(0, recalled=[1])
    ranks.take(ranks.negotiation.forget(1))
    assert ranks.plans[0]["allreduce.new"] == 1
    ranks.take(ranks.negotiation.forget(0))
    assert not ranks.negotiation._sets[0].pending
    assert not ranks.negotiation._failures.bytes_of(0)


class HonestRank:
    """What an engine keeps: the meaning of ids, and what it waits for, announced or running under an id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id_of: dict[str, int] = {}
        self.announced: set[str] = set()
        self.running: dict[str, int] = {}

    def submit(self, name: str, ranks: Ranks) -> None:
        if name in self.id_of:
            self.running[name] = self.id_of[name]
        else:
            self.announced.add(name)
            ranks.say(self.number, op(name))

    def hear_plans(self, ranks: Ranks) -> None:
        for name, number in ranks.plans[self.number].items():
            assert number not in self.id_of.values(), "an id must not mean two things"
            assert 0 < number < 5
            self.id_of[name] = number
            self.announced.discard(name)
            self.running[name] = number
        ranks.plans[self.number] = {}

    def answer_recalls(self, ranks: Ranks) -> None:
        ids, ranks.recalls[self.number] = ranks.recalls[self.number], []
        if ids:
            names = [name for name, number in self.id_of.items() if number in ids]
            again = [name for name in names if self.running.pop(name, None)]
            for name in names:
                del self.id_of[name]
            self.announced.update(again)
            ranks.say(self.number, *(op(name) for name in again), recalled=ids)


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60))
def test_an_id_never_means_two_things_and_nobody_waits_for_ever(steps: list[tuple[int, bool]]) -> None:
    """Two honest ranks with a tiny table; the second one answers recalls late."""
    ranks = Ranks(2, id_capacity=5)
    both = [HonestRank(0), HonestRank(1)]

    def settle(late_one_answers: bool) -> None:
        for rank in both:
            rank.hear_plans(ranks)
        for name in set(both[0].running) & set(both[1].running):
            assert both[0].running.pop(name) == both[1].running.pop(name)
        both[0].answer_recalls(ranks)
        if late_one_answers:
            both[1].answer_recalls(ranks)

    for index, late_one_answers in steps:
        name = f"allreduce.{index}"
        if not any(name in rank.announced or name in rank.running for rank in both):
            for rank in both:
                rank.submit(name, ranks)
        settle(late_one_answers)
    for _ in range(40):
        settle(True)
    for rank in both:
        assert (rank.announced, rank.running) == (set(), {})
    assert both[0].id_of == both[1].id_of


# -- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "pattern"),
    [
        (op(process_set=3), ends_with(OperationCode.NO_SUCH_SET, "set 3", "allreduce.x", "world 1")),
        (op(dtype=99), ends_with(OperationCode.INVALID, "allreduce.x")),  # type: ignore[arg-type]
        (op(shape=[-1]), ends_with(OperationCode.INVALID, "allreduce.x")),
    ],
)
def test_nonsense_is_an_error_for_its_sender_only(broken: pb.Operation, pattern: str) -> None:
    ranks = Ranks(2)
    ranks.say(0, broken, op("allreduce.good"))
    ranks.say(1, op("allreduce.good"))
    assert re.search(pattern, ranks.errors[0]["allreduce.x"])
    assert ranks.errors[1] == {}
    assert ranks.plans == [{"allreduce.good": 1}] * 2


def test_process_sets_have_members_and_ids_of_their_own() -> None:
    ranks = Ranks(3)
    ranks.negotiation.add_process_set(1, [2, 0])
    ranks.say(1, op(process_set=1))
    expected = ends_with(OperationCode.NOT_IN_SET, "Rank 1", "0 and 2")
    assert re.search(expected, ranks.errors[1]["allreduce.x"])
    ranks.say(0, op(process_set=1))
    ranks.say(2, op(process_set=1))
    assert ranks.plans == [{"allreduce.x": 1}, {}, {"allreduce.x": 1}]


def change(number: int, *ranks: int, removed: bool = False) -> negotiation_pb2.ProcessSetChange:
    return negotiation_pb2.ProcessSetChange(process_set=number, ranks=ranks, removed=removed)


def tell(
    ranks: Ranks, rank: int, *changes: negotiation_pb2.ProcessSetChange, announce: Sequence[pb.Operation] = ()
) -> None:
    ranks.take(
        ranks.negotiation.receive(
            rank, negotiation_pb2.NegotiationMessage(epoch=1, process_sets=changes, announce=announce), 0.0
        )
    )


def test_a_set_that_ranks_register_works_from_the_first_one_on() -> None:
    ranks = Ranks(3)
    tell(ranks, 2, change(1, 0, 2), announce=[op(process_set=1)])
    tell(ranks, 1, change(1, 0, 2))
    tell(ranks, 0, change(1, 0, 2))
    tell(ranks, 0, change(1, 0, 2), announce=[op(process_set=1)])  # once more, as after a broken stream
    assert ranks.plans == [{"allreduce.x": 1}, {}, {"allreduce.x": 1}]
    assert ranks.errors == [{}, {}, {}]


def test_a_removed_set_is_gone_whatever_the_order_of_the_ranks() -> None:
    ranks = Ranks(3)
    for rank in (0, 1):
        tell(ranks, rank, change(1, 0, 1))
    tell(ranks, 0, change(1, 0, 1, removed=True), change(2, 1, 2))
    tell(ranks, 2, change(1, 0, 1))  # rank 2 is late with everything
    tell(ranks, 1, change(1, 0, 1, removed=True), change(2, 1, 2))
    tell(ranks, 2, change(1, 0, 1, removed=True), change(2, 1, 2))
    assert sorted(ranks.negotiation._sets) == [0, 2]
    ranks.say(1, op(process_set=1))
    assert re.search(ends_with(OperationCode.NO_SUCH_SET, "Rank 0", "0 and 1"), ranks.errors[1]["allreduce.x"])


def test_a_rank_that_adds_a_set_after_another_has_removed_it_is_told_who_did() -> None:
    ranks = Ranks(2)
    tell(ranks, 0, change(1, 0, 1), change(1, 0, 1, removed=True))
    tell(ranks, 1, change(1, 0, 1), announce=[op(process_set=1)])
    assert re.search(ends_with(OperationCode.NO_SUCH_SET, "Rank 0", "0 and 1"), ranks.errors[1]["allreduce.x"])


def test_of_few_removed_sets_it_is_known_who_removed_them() -> None:
    ranks = Ranks(2)
    for number in range(1, MAX_REMOVED + 2):
        tell(ranks, 0, change(number, 0, 1), change(number, 0, 1, removed=True))
    assert len(ranks.negotiation._removed) == MAX_REMOVED
    ranks.say(1, op(process_set=1))
    assert re.search(ends_with(OperationCode.NO_SUCH_SET, "set 1"), ranks.errors[1]["allreduce.x"])


def test_who_waits_in_a_set_when_it_is_removed_is_told() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        tell(ranks, rank, change(1, 0, 1))
    ranks.say(1, op(process_set=1))
    tell(ranks, 0, change(1, 0, 1, removed=True))
    assert [errors.keys() for errors in ranks.errors] == [set(), {"allreduce.x"}, set()]
    pattern = ends_with(OperationCode.NO_SUCH_SET, "0 and 1", "allreduce.x")
    assert re.search(pattern, ranks.errors[1]["allreduce.x"])


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ([change(1, 0, 1), change(1, 0, 2)], ("set 1", "ranks 0 and 2", "ranks 0 and 1")),
        ([change(1)], ("set 1", "[]", "world of 3")),
        ([change(1, 0, 3)], ("set 1", "[0, 3]", "world of 3")),
        ([change(1, 1, 0)], ("set 1", "[1, 0]", "world of 3")),
        ([change(1, 1, 1)], ("set 1", "[1, 1]", "world of 3")),
        ([change(0, 0, 1, 2)], ("set 0",)),
        ([change(-1, 0)], ("set -1",)),
    ],
)
def test_contradictions_end_the_stream(
    changes: Sequence[negotiation_pb2.ProcessSetChange], facts: Sequence[str]
) -> None:
    with pytest.raises(ContradictionError, match=ends_with(OperationCode.CONTRADICTION, "Rank 0", *facts)):
        tell(Ranks(3), 0, *changes)


def test_a_flood_of_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROCESS_SETS", 2)
    ranks = Ranks(3)
    tell(ranks, 0, change(1, 0), change(2, 1))
    with pytest.raises(TooMuchError, match=ends_with(OperationCode.TOO_MANY, "2 process sets")):
        tell(ranks, 0, change(3, 2))


def test_a_flood_is_refused_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    ranks = Ranks(2)
    with pytest.raises(TooMuchError, match=ends_with(OperationCode.TOO_MANY, "Rank 0", 11, 10)):
        ranks.say(0, *(op(f"allreduce.{index}") for index in range(11)))
    ranks.say(1, op("allreduce.0"))
    assert ranks.plans == [{}, {}]


@pytest.mark.parametrize(("name", "warned"), [("loss.{}", True), ("weight#{}", False)])
def test_names_that_do_not_repeat(name: str, warned: bool) -> None:
    """The second ones are those of optimizers that are made one after the other."""
    negotiation = Negotiation(1, 1, usual_ids=16)
    warnings = []
    for number in range(100):
        answers = negotiation.receive(0, message([op(f"allreduce.{name.format(number)}")]), 0.0)
        while answers:
            (_, decisions), *answers = answers
            warnings += decisions.warnings
            for recall in decisions.recalls:
                answers += negotiation.receive(0, message([], recalled=recall.ids), 0.0)
    assert bool(warnings) is warned


def test_a_program_with_many_operations_that_repeat_keeps_their_ids():
    """More than the usual number: a few are recalled, come back, and the table grows to what the program needs."""
    negotiation = Negotiation(1, 1, usual_ids=16)
    ids: dict[str, int] = {}
    recalls = 0
    for step in range(20):
        before = recalls
        for number in range(100):
            if (name := f"allreduce.{number // 10}.{'abcdefghij'[number % 10]}") in ids:
                continue  # runs under its id, without the coordinator
            answers = negotiation.receive(0, message([op(name)]), 0.0)
            while answers:
                (_, decisions), *answers = answers
                ids.update((plan.name, plan.id) for plan in decisions.plans)
                assert not decisions.warnings
                for recall in decisions.recalls:
                    recalls += len(recall.ids)
                    ids = {known: one for known, one in ids.items() if one not in recall.ids}
                    answers += negotiation.receive(0, message([], recalled=recall.ids), 0.0)
        if step > 8:
            assert recalls == before
            assert len(ids) == 100
