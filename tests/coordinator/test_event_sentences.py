"""What a coordinator says of members, hosts and jobs when nothing is wrong with a request, whole.

These sentences have no error code. Other tests look for their facts, and for the words in `event_words.py`.
"""

from __future__ import annotations

import pytest
from membership_story import Story as Members
from test_cluster import Story
from test_host_life import NO_SPACE, LifeStory
from test_leavers import Drained
from test_replaced_ranks import KILLED, running
from test_slots_given_back import grown

from horovod.coordinator.core.agreement.stall import Stall, StallTimes, StallWatch, times_of


# -- members -----------------------------------------------------------------------------------------------------------
def test_a_world_that_is_not_complete() -> None:
    story = Members()
    story.join("m0", size=3)
    story.join("m1", size=3)
    assert story.progress("m0") == ["1 of 3 members of job 'digits' joined; waiting for 2 more."]
    ranked = Members()
    ranked.join("m0", size=5, rank=3)
    assert ranked.progress("m0") == ["1 of 5 members of job 'digits' joined; waiting for ranks 0-2 and 4."]


def test_a_world_that_waits_for_the_end_of_the_last_one() -> None:
    story = Members()
    story.join("old0", pid=1)
    story.join("old1", pid=2)
    story.leave("old0")
    story.join("new0", pid=1)
    assert story.progress("new0")[-1].endswith(
        "waiting for 1 more; waiting until world 1 has ended, which still has rank 1 (pid 2) on host node-a."
    )


@pytest.mark.parametrize(
    ("is_lost", "sentence"),
    [
        (True, "Rank 1 (pid 7) on host node-a was lost: it was killed by signal 9."),
        (False, "Rank 1 (pid 7) on host node-a left: the script ended."),
    ],
)
def test_a_member_that_is_gone(is_lost: bool, sentence: str) -> None:
    story = Members()
    story.join("m0", pid=6)
    story.join("m1", pid=7)
    if is_lost:
        story.lose("m1", "it was killed by signal 9")
    else:
        story.leave("m1", "the script ended")
    assert [gone.sentence for gone in story.goodbyes("m0")] == [sentence]


def test_a_member_whose_connection_stays_away() -> None:
    story = Members()
    story.join("m0", pid=1)
    story.join("m1", pid=2)
    story.disconnect("m1")
    story.pass_time(10.5)
    (gone,) = story.goodbyes("m0")
    assert gone.sentence.startswith(
        "Rank 1 (pid 2) on host node-a was lost: its connection to the coordinator broke and has not come back for 10 s"
    )


def test_a_member_that_leaves_at_the_next_commit() -> None:
    story = Drained(most=3)
    story.come_all("abc")
    story.say("a")
    assert story.sentence("b").startswith(
        "Rank 0 (pid 97) on host node-a leaves job 'digits' at the next commit (it got SIGTERM)."
    )
    small = Drained(fewest=2, most=3)
    small.come_all("ab")
    small.pass_time(1.1)
    small.say("b")
    assert "Of at least 2 members 1 will be left, and wait for others." in small.sentence("a")


# -- jobs and hosts ----------------------------------------------------------------------------------------------------
def test_jobs_that_wait() -> None:
    story = Story()
    story.agent("h1", slots=3)
    story.submit("a", 2)
    story.submit("b", 2)
    story.submit("c", 1)
    assert [story.sentence(job) for job in "bc"] == [
        "It waits for room: it asks for 2 slots, and there is room for 1 on 1 host (h1:1).",
        "It waits behind job b.",
    ]
    large = Story()
    large.agent("h1", slots=3)
    large.submit("a", 8)
    assert large.sentence("a").startswith("It waits for more hosts: it asks for 8 slots")


def test_a_process_that_is_replaced() -> None:
    story = running()
    story.hears((1, 1, KILLED), (0, 1, None))
    assert story.sentence("j") == "Slot 1 on host h1 ended by signal 9 (SIGKILL); another process takes its place."


def test_slots_that_are_given_back() -> None:
    story = grown()
    story.submit("other", 2)
    assert story.sentence("other").endswith("Other jobs are giving slots back.")
    assert story.sentence("j") == "Slots 2 and 3 on host h2 are to be given back, since job other waits for room."


def test_a_host_that_is_set_aside() -> None:
    story = LifeStory()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 2)
    assert story.fails_to_start("h1", "j") == [f"Host h1 is set aside for 30 s, since it failed: {NO_SPACE}."]
    story.submit("k", 2)
    assert story.sentence("k").endswith(f"Set aside for now: h1 ({NO_SPACE}).")


# -- stalls ------------------------------------------------------------------------------------------------------------
def test_a_stall() -> None:
    stalls = [Stall(f"allreduce.{index}", 61.0, (2,)) for index in range(7)]
    assert StallWatch(StallTimes(60.0, 0.0)).look([*stalls, Stall("allreduce.x", 61.0, (0,))], 61.0).warning == (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        "for remainder of ranks for more than 60 seconds. The missing ranks are slow or stuck, or do not call the same "
        "operations.\nMissing ranks:\n0: [allreduce.x]\n"
        "2: [allreduce.0, allreduce.1, allreduce.2, allreduce.3, allreduce.4, allreduce.5 ...]"
    )


def test_a_shutdown_time_before_that_of_the_warning() -> None:
    assert times_of({"stall_check_seconds": "60.0", "stall_shutdown_seconds": "30.0"})[1] == (
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30 is ignored: it is less than HOROVOD_STALL_CHECK_TIME_SECONDS=60, the "
        "time of the warning. A stall will not shut the job down."
    )
