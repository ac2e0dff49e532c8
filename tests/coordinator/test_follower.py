"""Followers of a job: what ends their streams."""

from horovod.coordinator.services.follower import MOST_AHEAD_BYTES, OUTPUT_COST, WINDOW_BYTES, Follower, JobOutbox
from horovod.coordinator.services.outbox import Outbox
from horovod.protos.v1 import jobs_pb2 as pb


def test_the_last_record_comes_before_the_end() -> None:
    """A job is over in memory before its record is stored, and the last output may arrive between the two."""
    events: JobOutbox = Outbox(10)
    follower = Follower(pb.Open(job="train", output=True), events)
    record = pb.JobRecord(id="train", state=pb.JOB_STATE_RUNNING)
    record.shares.add(agent="h1", slots=[0], started=True)
    follower.changed(record)
    record.state = pb.JOB_STATE_SUCCEEDED
    follower.read_all("h1")
    follower.end_if_complete(record, {"h1"})
    assert not follower.ended
    follower.changed(record)
    follower.end_if_complete(record, {"h1"})
    assert follower.ended


def test_output_that_is_still_to_come_is_waited_for() -> None:
    events: JobOutbox = Outbox(10)
    follower = Follower(pb.Open(job="train", output=True), events)
    record = pb.JobRecord(id="train", state=pb.JOB_STATE_SUCCEEDED)
    record.shares.add(agent="h1", slots=[0], started=True)
    follower.changed(record)
    follower.end_if_complete(record, {"h1"})
    assert not follower.ended
    follower.end_if_complete(record, set())  # that host is lost, and its output with it
    assert follower.ended


def test_no_more_output_is_passed_on_than_the_reader_has_room_for() -> None:
    events: JobOutbox = Outbox(1000)
    follower = Follower(pb.Open(job="train", output=True), events)
    share = pb.Share(agent="h1", slots=[0], started=True)
    follower.open_on(share, 1)
    piece = pb.Output(data=bytes(MOST_AHEAD_BYTES // 4))
    assert [follower.output("h1", piece) for _ in range(4)] == [True, True, True, False]
    assert follower.output("h2", piece)  # another one's windows are its own
    follower.taken("h1", pb.Taken(ranks=[pb.TakenOutput(cost=len(piece.data) + OUTPUT_COST)]))
    assert [follower.output("h1", piece) for _ in range(2)] == [True, False]


def test_an_agent_that_comes_again_waits_for_the_reader_to_take_what_it_has_sent() -> None:
    """Else each of its streams would put a window of output into the coordinator's memory."""
    events: JobOutbox = Outbox(1000)
    follower = Follower(pb.Open(job="train", output=True), events)
    record = pb.JobRecord(id="train", state=pb.JOB_STATE_RUNNING)
    share = record.shares.add(agent="h1", slots=[0], started=True)
    follower.open_on(share, 1)
    piece = pb.Output(data=bytes(WINDOW_BYTES // 4), position=7)
    assert all(follower.output("h1", piece) for _ in range(3))
    follower.readers.clear()  # its stream is over
    assert not list(follower.wanted(record))
    follower.taken("h1", pb.Taken(ranks=[pb.TakenOutput(cost=2 * (len(piece.data) + OUTPUT_COST))]))
    assert [one.agent for one in follower.wanted(record)] == ["h1"]
    assert getattr(follower.open_on(share, 2), "from")[0].position == 7
