"""Followers of a job: what ends their streams."""

from horovod.coordinator.services.follower import MOST_AHEAD_BYTES, OUTPUT_COST, WINDOW_BYTES, Follower, JobOutbox
from horovod.coordinator.services.sending import Outbox
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


def test_each_share_has_a_log_of_its_own_for_a_rank() -> None:
    """Its process may go to another host, or a host that was lost may come back and be used again."""
    record = pb.JobRecord(id="train", state=pb.JOB_STATE_RUNNING)
    first = record.shares.add(agent="h1", slots=[0], left=[1], started=True)
    second = record.shares.add(agent="h2", slots=[1], generation=3, started=True)
    asked = pb.Open(job="train", output=True)
    getattr(asked, "from").add(rank=1, share=0, position=50)  # what another coordinator has sent
    follower = Follower(asked, Outbox(1000))
    assert [(one.rank, one.position) for one in getattr(follower.open_on(first, 1), "from")] == [(0, 0), (1, 50)]
    assert [(one.rank, one.position) for one in getattr(follower.open_on(second, 2), "from")] == [(1, 0)]
    output = pb.Output(rank=1, data=b"x", position=7)
    assert follower.output("h2", output)
    assert output.share == 3
    assert (follower.agent_of(1, 0), follower.agent_of(1, 3)) == ("h1", "h2")
    second.generation = 5  # the host was lost, and is used again
    assert follower.moved(record) == [2]
    assert [one.agent for one in follower.wanted(record)] == ["h2"]
    assert getattr(follower.open_on(second, 3), "from")[0].position == 0


def test_further_ranks_of_a_host_are_read_from_where_the_others_are() -> None:
    record = pb.JobRecord(id="train", state=pb.JOB_STATE_RUNNING)
    share = record.shares.add(agent="h1", slots=[0], started=True)
    follower = Follower(pb.Open(job="train", output=True), Outbox(1000))
    follower.open_on(share, 1)
    assert follower.output("h1", pb.Output(rank=0, data=b"x", position=7))
    assert not list(follower.wanted(record))
    share.slots.append(2)
    assert list(follower.wanted(record)) == [share]
    assert [(one.rank, one.position) for one in getattr(follower.open_on(share, 2), "from")] == [(0, 7), (2, 0)]
    assert not list(follower.wanted(record))
