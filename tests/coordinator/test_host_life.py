"""When a host is lost whose agent is away, and when one that can't start jobs gets some again, as stories."""

from __future__ import annotations

import re

from error_codes import ends_with
from event_words import SET_ASIDE, tells
from test_cluster import ENDING, FAILED, QUEUED, RUNNING, SUCCEEDED, Story, report

from horovod.base.errors import LaunchCode
from horovod.coordinator.core.cluster.effects import Notice
from horovod.coordinator.core.cluster.execution import MOST_STARTS
from horovod.coordinator.core.cluster.hosts import FIRST_ASIDE_S, Fitness, grace_of, is_aside, readmit, set_aside
from horovod.coordinator.core.ending import Attendance
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

ORPHAN_S = 60.0  # of every agent here; a host that is away is lost after 10 s otherwise
NO_SPACE = "no space left on device"


class LifeStory(Story):
    def agent(self, name: str, slots: int = 2, jobs: tuple[pb.JobReport, ...] = (), instance: str = "") -> None:
        super().agent(name, slots, jobs, instance)
        self.cluster.agents[name].register.orphan_grace_seconds = ORPHAN_S

    def attended(self, job: str, **hosts: list[str]) -> None:
        attendance = Attendance(**{which: frozenset(names) for which, names in hosts.items()})
        self.cluster.attended(job, attendance, self.now_s)

    def fails_to_start(self, agent: str, job: str) -> list[str]:
        """What the log says of it."""
        found = pb.JobReport(job=job, over=True, error=NO_SPACE, host_fault=True)
        found.share = self.share_number(agent, job)
        effects = self.cluster.report(agent, found, self.now_s, self.wall_s)
        self.do(effects)
        return [effect.sentence for effect in effects if isinstance(effect, Notice)]


def running_on_two() -> LifeStory:
    story = LifeStory()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    story.reach()
    story.report("h1", "j", {0: None, 1: None})
    story.report("h2", "j", {2: None, 3: None})
    story.told()
    return story


def test_a_host_lives_for_as_long_as_a_rank_of_it_is_connected() -> None:
    story = running_on_two()
    story.away("h2")
    assert story.cluster.doubtful() == ["j"]
    for _ in range(100):
        story.attended("j", connected=["h1", "h2"])
        story.tick(5)
    assert story.state("j") == RUNNING
    story.agent("h2", jobs=(report("j", {2: 0, 3: 0}, over=True),))
    assert story.cluster.doubtful() == []
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED


def test_no_host_is_lost_to_a_new_leader_whose_ranks_are_connected_elsewhere() -> None:
    story = running_on_two()
    other = LifeStory()
    other.cluster.load(story.saved.values(), other.now_s)
    assert other.cluster.doubtful() == ["j"]
    for _ in range(20):
        other.attended("j", connected=["h1", "h2"])
        other.tick(5)
    assert other.state("j") == RUNNING
    other.agent("h1", jobs=(report("j", {0: None, 1: None}),))
    other.agent("h2", jobs=(report("j", {2: None, 3: None}),))
    assert other.told() == []


def test_a_host_whose_ranks_were_lost_for_their_world_is_lost() -> None:
    story = running_on_two()
    story.away("h2")
    story.attended("j", connected=["h1"], lost=["h2"])
    story.tick(9)
    assert story.state("j") == RUNNING
    story.tick(2)
    assert story.state("j") == ENDING
    assert story.told() == [("h1", "end")]


def test_an_agent_that_is_started_again_in_time_finds_its_job() -> None:
    """Its ranks are in no world, so nothing is known of them for as long as they may run without it."""
    story = running_on_two()
    story.away("h2")
    story.tick(ORPHAN_S - 1)
    assert story.state("j") == RUNNING
    story.agent("h2", jobs=(report("j", {2: None, 3: None}),), instance="another")
    assert story.told() == []
    story.away("h1")
    story.attended("j", away=["h1"], connected=["h2"])
    story.tick(ORPHAN_S - 1)
    assert story.state("j") == RUNNING
    story.tick(2)
    assert story.state("j") == ENDING


def test_the_time_without_evidence_begins_with_the_last() -> None:
    story = running_on_two()
    story.away("h2")
    story.tick(50)
    story.attended("j", connected=["h2"])
    story.cluster.attended("j", None, story.now_s)
    story.tick(50)
    assert story.state("j") == RUNNING
    story.tick(11)
    assert story.state("j") == ENDING


def test_a_host_that_is_gone_after_its_last_process_is_not_waited_for() -> None:
    """Its agent was killed before it could say that its share of the job is over. Nothing runs there unseen."""
    story = running_on_two()
    story.report("h2", "j", {2: 0, 3: None})
    story.away("h2")
    story.tick(11)
    assert story.state("j") == RUNNING, "rank 3 may still run"
    story.agent("h2", jobs=(report("j", {2: 0, 3: None}),))
    story.report("h2", "j", {2: 0, 3: 0})
    story.away("h2")
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    story.tick(9)
    assert story.state("j") == RUNNING, "its agent may come back with the last of what they have printed"
    story.tick(2)
    assert story.state("j") == SUCCEEDED


def test_a_job_that_ends_anyway_does_not_wait_for_a_host_that_is_gone() -> None:
    story = running_on_two()
    story.away("h2")
    story.report("h1", "j", {0: 1, 1: 1}, over=True)
    story.tick(11)
    assert story.state("j") == FAILED


def test_a_host_on_which_nothing_began_is_lost_after_the_grace() -> None:
    story = LifeStory()
    story.agent("h1")
    story.submit("j", 2)
    story.away("h1")
    story.tick(11)
    assert story.state("j") == FAILED
    assert not story.cluster.agents


# -- hosts that can't start jobs ---------------------------------------------------------------------------------------


def test_a_job_goes_to_another_host() -> None:
    story = LifeStory()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 2)
    story.told()
    (aside,) = story.fails_to_start("h1", "j")
    assert tells(aside, "Host h1", "30 s", NO_SPACE)
    assert story.told() == [("h1", "forget"), ("h2", "start")]
    story.submit("k", 2)
    assert story.state("k") == QUEUED
    assert story.sentence("k").endswith(f"{SET_ASIDE}: h1 ({NO_SPACE}).")


def test_a_host_is_tried_again_later_and_later() -> None:
    story = LifeStory()
    story.agent("h1")
    story.submit("j", 2)
    story.fails_to_start("h1", "j")
    assert story.state("j") == QUEUED
    story.tick(FIRST_ASIDE_S - 1)
    assert story.state("j") == QUEUED
    story.tick(2)
    assert story.state("j") == RUNNING
    (aside,) = story.fails_to_start("h1", "j")
    assert tells(aside, "Host h1", "60 s", NO_SPACE)
    story.tick(61)
    story.report("h1", "j", {0: None, 1: None})
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED
    story.submit("k", 2)
    assert "aside for 30 s" in story.fails_to_start("h1", "k")[0]


def test_a_job_that_starts_nowhere_fails_in_the_end() -> None:
    """Else it would set aside every host again and again, and those behind it would never run."""
    story = LifeStory()
    story.agent("h1")
    story.submit("j", 2)
    for _ in range(MOST_STARTS):
        assert story.state("j") == RUNNING
        story.fails_to_start("h1", "j")
        story.tick(1000)
    assert story.state("j") == FAILED
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "h1", NO_SPACE), story.sentence("j"))


def test_a_job_some_of_which_may_run_on_another_host_fails() -> None:
    story = running_on_two()
    story.submit("k", 2)
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    story.report("h2", "j", {2: 0, 3: 0}, over=True)
    story.submit("l", 4)
    assert [story.state("k"), story.state("l")] == [RUNNING, QUEUED]
    story.report("h1", "k", {0: 0, 1: 0}, over=True)
    story.report("h1", "l", {0: None, 1: None})
    story.fails_to_start("h2", "l")
    assert story.state("l") == ENDING
    story.report("h1", "l", {0: -15, 1: -15}, over=True)
    assert story.state("l") == FAILED
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "h2", NO_SPACE), story.sentence("l"))


def test_a_host_that_says_it_is_unfit_gets_nothing_until_it_says_otherwise() -> None:
    story = LifeStory()
    story.agent("h1")
    story.submit("j", 2)
    story.fails_to_start("h1", "j")
    story.do(story.cluster.fitness("h1", "its disk is full", story.now_s, story.wall_s))
    story.tick(100)
    assert story.state("j") == QUEUED
    assert story.sentence("j").endswith(f"{SET_ASIDE}: h1 (its disk is full).")
    story.do(story.cluster.fitness("h1", "", story.now_s, story.wall_s))
    assert story.state("j") == RUNNING


def test_what_a_host_failed_at_before_it_was_fit_again_counts_no_more() -> None:
    story = LifeStory()
    story.agent("h1")
    story.submit("j", 2)
    story.fails_to_start("h1", "j")
    story.do(story.cluster.fitness("h1", "its disk is full", story.now_s, story.wall_s))
    story.do(story.cluster.fitness("h1", "", story.now_s, story.wall_s))
    assert story.state("j") == RUNNING


# -- the parts of the rules --------------------------------------------------------------------------------------------
def test_a_host_that_could_not_start_a_job_is_aside_until_the_time_has_come_or_it_says_that_it_is_well_again() -> None:
    fitness = Fitness()
    fitness.told("")  # as ever, which says nothing new
    fitness.could_not_start(NO_SPACE, 100.0)
    fitness.told("")
    fitness.look(100.0 + FIRST_ASIDE_S - 1)
    assert fitness.aside == NO_SPACE
    fitness.look(100.0 + FIRST_ASIDE_S)
    assert fitness.aside == ""
    fitness.could_not_start(NO_SPACE, 200.0)
    fitness.told("its disk is full")
    assert fitness.aside == "its disk is full"
    fitness.told("")
    assert fitness.aside == ""


def test_nothing_runs_unseen_where_all_processes_of_a_share_have_ended() -> None:
    share = jobs_pb2.Share(agent="h1", started=True, slots=[0, 1], orphan_grace_seconds=ORPHAN_S)
    record = jobs_pb2.JobRecord(state=RUNNING)
    outcomes = [jobs_pb2.RankOutcome(rank=rank, code=0, incarnation=1) for rank in range(3)]
    record.outcomes.extend(outcomes[:1])
    assert grace_of(record, share, None, 10.0) == ORPHAN_S
    record.outcomes.append(outcomes[1])
    assert grace_of(record, share, None, 10.0) == 10.0
    record.outcomes.append(outcomes[2])  # of another host
    assert grace_of(record, share, None, 10.0) == 10.0


def test_a_host_is_readmitted_once_and_only_where_no_time_is_set() -> None:
    record = jobs_pb2.JobRecord(id="j")
    assert not readmit(record, "h1")
    set_aside(record, "h1", "it was lost", 50.0)
    assert [one.reason for one in record.hosts_aside] == ["it was lost"]
    assert is_aside(record, "h1", 1e9)
    assert readmit(record, "h1")
    assert not is_aside(record, "h1", 50.0)
    assert not readmit(record, "h1")
    record.spec.policy.cooldown_least_seconds = record.spec.policy.cooldown_most_seconds = 20.0
    set_aside(record, "h1", "it was lost again", 50.0)
    assert [one.reason for one in record.hosts_aside] == ["it was lost again"]
    assert not readmit(record, "h1")
    assert is_aside(record, "h1", 51.0)
