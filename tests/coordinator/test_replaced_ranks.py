"""A job whose failed processes are replaced: agents, records and worlds tell the processes of a rank apart."""

from __future__ import annotations

import re

from coordinator_builders import request
from error_codes import ends_with
from event_words import REPLACED, REPLACED_BY_ANOTHER, tells
from membership_story import SECRET
from membership_story import Story as Worlds
from test_cluster import RUNNING, Story, report

from horovod.base.errors import ClusterCode, LaunchCode, WorldCode, code_of
from horovod.coordinator.core.cluster.job import rank_ends, refusal_of
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2, membership_pb2

KILLED = -9


def policy(most: int | None = None) -> jobs_pb2.Policy:
    return jobs_pb2.Policy(replaces_failed=True, most_replacements=most)


def statuses(*ranks: tuple[int, int, int | None]) -> pb.JobReport:
    """A report of these ranks, incarnations and exit codes; None while one runs."""
    found = report("j", {})
    for rank, incarnation, code in ranks:
        found.ranks.add(rank=rank, pid=1000 * incarnation + rank, incarnation=incarnation, ended=code is not None)
        if code is not None:
            found.ranks[-1].code, found.ranks[-1].stopped = code, code == -15
    return found


class Replaced(Story):
    def hears(self, *ranks: tuple[int, int, int | None], over: bool = False) -> None:
        told = statuses(*ranks)
        told.over = over
        self.do(self.cluster.report("h1", told, self.now_s, self.wall_s))

    def starts(self) -> list[list[tuple[int, int]]]:
        """What agents were told to start since the last call: ranks and incarnations."""
        sent, self.sent = self.sent, []
        return [[(one.rank, one.incarnation) for one in what.ranks] for _, kind, what in sent if kind == "start"]


def running(most: int | None = None) -> Replaced:
    story = Replaced()
    story.agent("h1")
    story.submit("j", 2, policy=policy(most))
    story.hears((0, 1, None), (1, 1, None))
    assert story.starts() == [[(0, 1), (1, 1)]]
    return story


def test_a_failed_process_is_replaced_and_the_others_run_on() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    assert story.starts() == [[(0, 1), (1, 2)]]
    assert story.state("j") == RUNNING
    assert tells(story.sentence("j"), "Slot 1 on host h1", "SIGKILL", REPLACED)
    story.hears((1, 1, KILLED), (0, 1, None), (1, 2, None))
    assert story.told() == []


def test_a_second_process_that_fails_is_replaced_too() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    story.starts()
    story.hears((1, 1, KILLED), (1, 2, KILLED), (0, 1, None))
    assert story.starts() == []  # it has failed soon after its start, as the one before
    story.tick(1.0)
    assert story.starts() == [[(0, 1), (1, 4)]]
    record = story.saved["j"]
    assert [(one.rank, one.incarnation) for one in record.outcomes] == [(1, 2)]  # the one before is forgotten
    assert record.replacements == 2


def test_when_one_has_ended_well_the_others_may_end_and_none_is_replaced() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    story.told()
    story.hears((1, 1, KILLED), (0, 1, 0), (1, 2, None))
    assert story.told() == [("h1", "finish")]
    story.hears((1, 1, KILLED), (0, 1, 0), (1, 2, 0), over=True)
    assert story.state("j") == jobs_pb2.JOB_STATE_SUCCEEDED
    assert story.sentence("j") == ""


def test_so_many_may_be_replaced_and_no_more() -> None:
    story = running(most=1)
    story.hears((1, 1, KILLED), (0, 1, None))
    story.told()
    story.hears((1, 1, KILLED), (1, 2, 3), (0, 1, None))
    assert story.told() == [("h1", "end")]
    story.hears((1, 1, KILLED), (1, 2, 3), (0, 1, -15), over=True)
    assert story.state("j") == jobs_pb2.JOB_STATE_FAILED
    assert story.cluster.jobs["j"].record.exit_code == 3
    assert re.search(ends_with(LaunchCode.RESET_LIMIT, "Slot 1", "h1", "exit code 3", "limit: 1"), story.sentence("j"))


def test_a_replacement_that_can_not_be_started_ends_the_job() -> None:
    """The job is not begun once more: its first process has run."""
    story = Replaced()
    story.agent("h1")
    story.submit("j", 1, policy=policy())
    story.hears((0, 1, None))
    story.hears((0, 1, KILLED))
    story.told()
    told = statuses((0, 1, KILLED))
    told.over, told.host_fault, told.error = True, True, "rank 0 cannot be started: no more processes"
    story.do(story.cluster.report("h1", told, story.now_s, story.wall_s))
    assert story.state("j") == jobs_pb2.JOB_STATE_FAILED
    assert re.search(ends_with(ClusterCode.TOO_FEW_PROCESSES, "h1", "no more processes"), story.sentence("j"))


def test_a_failure_after_a_good_end_ends_the_others() -> None:
    story = running()
    story.hears((0, 1, 0), (1, 1, None))
    story.told()
    story.hears((0, 1, 0), (1, 1, 7), over=True)
    assert story.state("j") == jobs_pb2.JOB_STATE_FAILED
    assert story.cluster.jobs["j"].record.exit_code == 7


def test_what_was_said_of_a_failure_stays_until_the_next_decision() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    said = story.sentence("j")
    story.hears((1, 1, KILLED), (0, 1, None), (1, 2, None))
    assert story.sentence("j") == said != ""


def test_a_host_that_is_lost_ends_the_job() -> None:
    story = running()
    story.away("h1")
    story.tick(11.0)
    assert story.state("j") == jobs_pb2.JOB_STATE_FAILED
    assert re.search(ends_with(ClusterCode.TOO_FEW_PROCESSES, "host h1", "10 s"), story.sentence("j"))


def test_another_coordinator_starts_what_the_first_had_decided() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    other = Replaced()
    other.cluster.load([story.saved["j"]], other.now_s)
    other.agent("h1", jobs=(statuses((1, 1, KILLED), (0, 1, None)),))
    assert other.starts() == [[(0, 1), (1, 2)]]
    assert other.state("j") == RUNNING


def test_an_agent_that_comes_back_hears_that_no_process_follows() -> None:
    story = running()
    story.hears((0, 1, 0), (1, 1, None))
    story.away("h1")
    story.told()
    story.agent("h1", jobs=(statuses((0, 1, 0), (1, 1, None)),))
    assert story.told() == [("h1", "finish")]


def test_an_end_is_told_to_the_world_with_its_incarnation() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    assert [(one.rank, one.incarnation) for one in rank_ends(story.saved["j"])] == [(1, 1)]


def test_what_an_earlier_process_did_says_nothing_of_the_later_one() -> None:
    worlds = Worlds()
    for rank in range(2):
        joins(worlds, f"m{rank}", rank, incarnation=1 + rank)
    worlds.disconnect("m1")
    seen = "its agent saw its process end: signal 9"
    worlds.take(worlds.membership.rank_ended(RankEnded("digits", 1, "node-a", 4711, seen, incarnation=1), worlds.now_s))
    assert worlds.goodbyes("m0") == []
    worlds.take(worlds.membership.rank_ended(RankEnded("digits", 1, "node-a", 4711, seen, incarnation=2), worlds.now_s))
    assert [one.rank for one in worlds.goodbyes("m0")] == [1]


def test_a_coordinator_that_takes_over_knows_which_processes_are_meant() -> None:
    """The record of the job tells it again how the replaced process ended."""
    worlds = Worlds()
    for rank in range(2):
        joins(worlds, f"m{rank}", rank, incarnation=1 + rank)
    record = worlds.formations[-1].record(1, SECRET)
    other = Worlds()
    other.membership.restore(record, membership_pb2.GoneRecord(epoch=1), other.now_s)
    seen = "its agent saw its process end: signal 9"
    other.take(other.membership.rank_ended(RankEnded("digits", 1, "node-a", 4711, seen, incarnation=1), other.now_s))
    assert other.gone == []
    assert code_of(joins(other, "late", 1, incarnation=1)) is WorldCode.REPLACED
    other.take(other.membership.rank_ended(RankEnded("digits", 1, "node-a", 4711, seen, incarnation=2), other.now_s))
    assert other.gone == [(1, 1)]


def test_a_process_that_was_replaced_joins_no_world() -> None:
    worlds = Worlds()
    joins(worlds, "m1", 1, incarnation=2)
    refusal = joins(worlds, "late", 1, incarnation=1)
    assert re.search(ends_with(WorldCode.REPLACED, "Rank 1 (pid ", ": rank 1 (pid "), refusal)
    joins(worlds, "m0", 0, incarnation=1)
    assert worlds.has_world("m1")
    assert code_of(joins(worlds, "later", 1, incarnation=1)) is WorldCode.REPLACED


def test_who_was_started_in_the_place_of_a_member_shows_that_it_is_gone() -> None:
    """A world may be served by a coordinator to which the agent does not report."""
    worlds = Worlds()
    for rank in range(2):
        joins(worlds, f"m{rank}", rank, incarnation=1)
    assert joins(worlds, "n1", 1, incarnation=2) == ""
    assert [REPLACED_BY_ANOTHER in one.sentence for one in worlds.goodbyes("m0")] == [True]


def joins(worlds: Worlds, member_id: str, rank: int, incarnation: int) -> str:
    asked = request(member_id, rank=rank)
    asked.incarnation = incarnation
    refusal, effects = worlds.membership.join(asked, worlds.now_s)
    worlds.take(effects)
    return refusal


def test_a_run_list_and_replacements_exclude_each_other() -> None:
    lines = [jobs_pb2.Line(command=["x"]), jobs_pb2.Line(command=["x"], distributed=True)]
    refused = refusal_of(jobs_pb2.JobSpec(processes=1, lines=lines, policy=policy()))
    assert re.search(ends_with(ClusterCode.INVALID_JOB, "run list"), refused)
