"""What a person sees of a job's worlds: each line of --verbose as it happens, and `horovodrun ps JOB` afterwards."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from agents import Agents
from coordinator_client import Crew
from error_codes import ends_with
from event_words import EPOCH_BEGAN, WAS_LOST
from test_changing_sizes import source

from horovod.base.errors import ClusterCode
from horovod.launch.cluster.job_commands import as_story, as_table
from horovod.launch.console.report import StoryLines
from horovod.protos.v1 import jobs_pb2, story_pb2

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

KILLED = source("os.kill(os.getpid(), signal.SIGKILL)")
AT = r"(?:\d\d:){2}\d\d\.\d{3}"  # of an entry


def story_in(err: str) -> list[str]:
    """The sentences of the entries that a launcher has told."""
    return re.findall(rf"^horovodrun: {AT} (.*)$", err, re.MULTILINE)


def check(told: list[str], host_0: str, host_1: str) -> None:
    """That of a job of two, whose rank 1 was killed and replaced."""
    began = [line for line in told if EPOCH_BEGAN in line]
    assert re.match(rf"World 1 {EPOCH_BEGAN} 2 members", began[0])
    (lost,) = [line for line in told if line.startswith("World 1: ")]
    assert re.match(rf"World 1: rank 1 \(pid \d+\) on host {host_1} {WAS_LOST}: .*SIGKILL", lost)
    assert re.match(
        rf"World 2 began with 1 member on host {host_0}, \d+ .* after rank 1 on host {host_1} was lost: the members of "
        r"world 1 keep their ranks\.$",
        began[1],
    )
    assert re.match(r"World 3 began with 2 members on .*, rank 1 is new\.$", began[2])
    assert told.index(began[0]) < told.index(lost) < told.index(began[1]) < told.index(began[2])


def test_a_job_on_this_host_tells_its_story(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "2", "--min-np", "1", "--verbose", *program(KILLED))
    assert done.returncode == 0, done.stderr
    check(story_in(done.stderr), socket.gethostname(), socket.gethostname())


def test_a_job_on_agents_and_a_world_that_was_started_by_hand(
    tmp_path: Path, horovodrun: Run, program: Program
) -> None:
    with Agents(tmp_path) as agents:
        agents.add("h1", slots=1)
        agents.add("h2", slots=1)

        def run(*arguments: str) -> CompletedProcess[str]:
            return horovodrun(*arguments, environ=agents.environ)

        done = run(*agents.options, "-np", "2", "--min-np", "1", "--verbose", *program(KILLED))
        assert done.returncode == 0, done.stderr
        check(story_in(done.stderr), "h1", "h2")
        job = re.findall(r"job (program-\w+) runs", done.stderr)[0]
        shown = run("ps", *agents.options, job).stdout
        assert re.search(rf"^{job} +succeeded ", shown, re.MULTILINE)
        check(re.findall(r"^  \d{4}-\d\d-\d\d \S+  (.*)$", shown, re.MULTILINE), "h1", "h2")

        with Crew(agents.coordinator.address, token=agents.coordinator.token) as crew:
            for member in crew.settled_world(2, "digits"):
                assert member.world.epoch == 1
            listing = json.loads(run("ps", *agents.options, "--output-format", "json").stdout)
            world = {"job": "digits", "epoch": 1, "size": 2, "members": 2, "story": []}
            assert listing["worlds"] == [world], "jobs that were submitted are in a list of their own"
            (found,) = json.loads(run("ps", *agents.options, "--output-format", "json", "digits").stdout)["worlds"]
        assert [(one["event"], one["epoch"], one["rank"]) for one in found["story"]] == [("formed", 1, None)]
        table = run("ps", *agents.options).stdout
        assert re.search(r"^digits +1 ", table, re.MULTILINE), "known by its name, so also in the list"
        unknown = run("ps", *agents.options, "no-such")
        assert unknown.returncode == 1
        assert re.search(ends_with(ClusterCode.UNKNOWN_JOB, "'no-such'"), unknown.stderr)


def entry(number: int, epoch: int, event: story_pb2.StoryEvent.ValueType, sentence: str) -> story_pb2.StoryEntry:
    return story_pb2.StoryEntry(number=number, at=1e9, epoch=epoch, event=event, sentence=sentence)


def test_each_entry_is_told_once() -> None:
    said: list[str] = []
    lines = StoryLines(said.append)
    waits, formed = story_pb2.STORY_EVENT_WAITS, story_pb2.STORY_EVENT_FORMED
    entries = [entry(1, 0, waits, "Waits for rank 1."), entry(2, 1, formed, "One.")]
    lines.tell(entries)
    lines.tell(entries)
    entries[1:] = [entry(4, 1, waits, "Replaces one that was never seen.")]
    lines.tell(entries)
    assert [line.partition(" ")[2] for line in said] == ["One.", "Replaces one that was never seen."]
    assert all(re.match(AT, line) for line in said)


def test_the_tables() -> None:
    world = story_pb2.JobStory(job="digits", epoch=3, size=4, members=3)
    listing = jobs_pb2.Listing(worlds=[world, story_pb2.JobStory(job="new")])
    table = "JOB     WORLD  MEMBERS\ndigits  3      3 of 4\nnew     0      waits\n\n"
    assert as_table(listing, now_s=0).startswith(table)
    over = story_pb2.JobStory(job="old", epoch=2, entries=[entry(5, 2, story_pb2.STORY_EVENT_OVER, "All is done.")])
    assert "old  2      over\n" in as_table(jobs_pb2.Listing(worlds=[over]), now_s=0)
    world.entries.append(entry(1, 3, story_pb2.STORY_EVENT_FORMED, "World 3 began."))
    assert re.match(
        r"digits: world 3, 3 of 4 members\.\n  2001-09-0\d \d\d:\d6:40  World 3 began\.\n$",
        as_story(jobs_pb2.Listing(worlds=[world]), now_s=0),
    )
