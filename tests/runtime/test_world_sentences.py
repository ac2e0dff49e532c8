"""The sentences of worlds that don't form, whole, with their codes. Other tests name the code and the facts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from membership_story import Story
from test_runtime_session import request as join_request
from test_world import message

from horovod.base.protocol import __version__
from horovod.base.settings import resolve
from horovod.common.process_sets import ProcessSet, remove_process_set
from horovod.protos.v1 import membership_pb2 as pb
from horovod.worker.runtime.channel import explain
from horovod.worker.runtime.context import current
from horovod.worker.runtime.departures import NOT_CONNECTED, Departures
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import Interface, choose_interfaces
from horovod.worker.runtime.plan import choose_transport
from horovod.worker.runtime.probe import judge, probe
from horovod.worker.runtime.process_sets import problem_of, read_answers
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.world import World

HERE = socket.gethostname()


def text_of(act: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        act()
    return str(caught.value)


# -- what a coordinator refuses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"version": 2},
            (
                "The process with pid 7 on host node-a has a Horovod before 1.0.0 (protocol 2), but the coordinator "
                f"has Horovod {__version__} (protocol 3), and these do not understand each other. Install releases "
                "with the same first number on both. [other-version]"
            ),
        ),
        (
            {"release": "1.0.1"},
            (
                "The members of job 'digits' must have the same release of Horovod, but the process with pid 6 on "
                "host node-a has a Horovod before 1.0.0 and the process with pid 7 on host node-a has Horovod 1.0.1. "
                "Install the same on every host, for the Python that runs the script. [other-version]"
            ),
        ),
        (
            {"job": ""},
            "The job in a join request must be 1 to 256 printable characters, but it is ''. [invalid-join-request]",
        ),
        (
            {"size": 0},
            (
                "The size of a world must be 1 to 65536, but the process with pid 7 on host node-a asks for 0; see "
                "HOROVOD_SIZE. [invalid-world-size]"
            ),
        ),
        (
            {"rank": 2},
            (
                "Rank 2 (pid 7) on host node-a asks for a rank outside 0 to 1, the ranks of a world of size 2; see "
                "HOROVOD_RANK and HOROVOD_SIZE. [invalid-rank]"
            ),
        ),
        (
            {"size": 3},
            (
                "The process with pid 7 on host node-a expects 3 members in job 'digits', but the process with pid 6 "
                "on host node-a expects 2; start every process with the same HOROVOD_SIZE. [members-disagree]"
            ),
        ),
        (
            {"options": {"wire": "sealed"}},
            (
                "The members of job 'digits' must agree on wire, but the process with pid 6 on host node-a has no "
                "value for it and the process with pid 7 on host node-a has 'sealed'. [members-disagree]"
            ),
        ),
        (
            {"rank": 1},
            (
                "Rank 1 (pid 7) on host node-a asks for a rank, but the process with pid 6 on host node-a does not; "
                "either all members of a job do (HOROVOD_RANK, set by a launcher) or none. [invalid-rank]"
            ),
        ),
        (
            {"member_id": "first"},
            (
                "The member id 'first' of the process with pid 7 on host node-a is already in use; every process and "
                "every attempt to join needs its own id. [member-id-in-use]"
            ),
        ),
    ],
)
def test_of_a_second_process_that_may_not_join(fields: dict[str, Any], sentence: str) -> None:
    story = Story()
    assert story.join("first", pid=6) == ""
    assert story.join(**{"member_id": "second", "pid": 7, **fields}) == sentence


def test_of_a_job_that_has_its_members() -> None:
    story = Story()
    story.hold = True
    for name, pid in (("first", 6), ("second", 7)):
        story.join(name, pid=pid)
    who = "the process with pid 6 on host node-a and the process with pid 7 on host node-a"
    assert story.join("third", pid=8) == (
        f"Job 'digits' already has its 2 members: {who}. Start no more processes than HOROVOD_SIZE says, or give this "
        "job another name (HOROVOD_JOB). [too-many-members]"
    )
    story.form()
    assert story.join("third", pid=8) == (
        "Job 'digits' already runs with 2 members in world 1: rank 0 (pid 6) on host node-a and rank 1 (pid 7) on host "
        "node-a. Wait until it has ended, or give this job another name (HOROVOD_JOB). [job-runs-already]"
    )


def test_of_a_member_without_which_its_world_went_on() -> None:
    story = Story()
    for name, pid in (("first", 6), ("second", 7)):
        story.join(name, pid=pid)
    story.lose("second", "its host is gone")
    refused = story.attach("second")
    assert refused is not None
    assert refused.sentence == ("Rank 1 (pid 7) on host node-a was declared lost: its host is gone. [declared-lost]")
    assert story.membership.stranger("digits", 2, "first", 0) == (
        "World 2 of job 'digits' is over; it is in world 1 now. [epoch-over]"
    )
    assert story.membership.stranger("digits", 1, "first", 1) == (
        "Member 'first' of job 'digits' is rank 0, not rank 1. [unproven-member]"
    )


def test_of_a_member_that_leaves_because_it_could_not_connect() -> None:
    """Its goodbye is one in order, and yet ends the start of the others."""
    story = Story()
    for name, pid in (("first", 6), ("second", 7)):
        story.join(name, pid=pid)
    story.leave("second", NOT_CONNECTED)
    departures = Departures()
    departures.hear([story.told["first"][-1].gone], 1)
    assert departures.needed() == (
        "Rank 1 (pid 7) on host node-a left: it could not connect to the other members. [not-connected]"
    )


# -- what a process finds ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (
            grpc.StatusCode.UNIMPLEMENTED,
            (
                "The gRPC server at h:1 is not a Horovod coordinator (Method not found!). Check the host and the port "
                "in HOROVOD_COORDINATOR. [not-a-coordinator]"
            ),
        ),
        (
            grpc.StatusCode.INTERNAL,
            (
                "The server at h:1 sent an answer that this process does not understand (Method not found!). "
                "Check that it is a Horovod coordinator of this version. [not-a-coordinator]"
            ),
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "The coordinator at h:1 ended the call: Method not found! [coordinator-unreachable]",
        ),
        (grpc.StatusCode.ABORTED, "The coordinator at h:1 ended the call: Method not found! [coordinator-refused]"),
    ],
)
def test_of_statuses(status: grpc.StatusCode, sentence: str) -> None:
    assert explain(status, "Method not found!", "h:1", with_token=False) == sentence


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached: Connection refused"),
        (TimeoutError(), "does not answer"),
        (socket.gaierror(-2, "Name or service not known"), "cannot be found: Name or service not known"),
    ],
)
def test_of_a_coordinator_that_is_not_there(error: OSError, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe("h", 1, 1.0).sentence("h:1") == (
        f"The coordinator at h:1 {words}. Check HOROVOD_COORDINATOR (or the address given to hvd.init()) and that the "
        "coordinator runs there. [coordinator-unreachable]"
    )


def test_of_something_else_on_the_port() -> None:
    assert judge(b"SSH-2.0-O").sentence("h:1") == (
        "The coordinator at h:1 is not a Horovod coordinator: it answered b'SSH-2.0-O'. Check HOROVOD_COORDINATOR (or "
        "the address given to hvd.init()) and that the coordinator runs there. [not-a-coordinator]"
    )


def test_of_a_world_that_is_not_complete_in_time() -> None:
    session = Session("127.0.0.1:1")
    assert session._too_late(join_request()(), 30.0) == (
        "The world of job 'job' was not complete after 30 s; the coordinator at 127.0.0.1:1 says: it did not say what "
        "it waits for. Start the missing processes with the same job, size and coordinator, or give them more time "
        "with HOROVOD_START_TIMEOUT. [incomplete-world]"
    )
    session.close()


def test_of_a_world_that_makes_no_sense() -> None:
    assert text_of(lambda: World.from_message(message("a", "b"), "m9")) == (
        "The coordinator sent a world (job 'job', number 7) that is not usable: this process is in it 0 times. This is "
        "a bug of the coordinator; please report it. [internal]"
    )


def test_of_members_that_are_gone() -> None:
    gone = Departures().hear([pb.MemberGone(epoch=7, rank=rank, orderly=rank == 1) for rank in (1, 2)], 7)
    assert [one.sentence for one in gone] == [
        "Rank 1 is gone, without a reason. [shut-down]",
        "Rank 2 is gone, without a reason. [peer-lost]",
    ]


def test_of_memory_that_is_not_shared() -> None:
    world = World.from_message(message("a", "b"), "m0")
    assert text_of(lambda: choose_transport(resolve({}, {"transport": "shm"}), world)) == (
        "HOROVOD_TRANSPORT=shm is not possible: rank 1 (pid 101) on host b is on another host than rank 0 (pid 100) on "
        "host a. Use HOROVOD_TRANSPORT=auto or tcp. [no-shared-memory]"
    )


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (
            ["eth9"],
            (
                f"HOROVOD_NETWORK_INTERFACES names 'eth9', which does not exist on host {HERE}; usable are: none. "
                "[no-network-interface]"
            ),
        ),
        (
            ["eth0"],
            (
                f"HOROVOD_NETWORK_INTERFACES names 'eth0', which is down or has no address on host {HERE}; usable are: "
                "none. [no-network-interface]"
            ),
        ),
        (
            [],
            (
                f"Host {HERE} has no network interface that is up and has an address, so its ranks cannot connect over "
                "TCP. Bring one up (at least lo), or name one with HOROVOD_NETWORK_INTERFACES. [no-network-interface]"
            ),
        ),
    ],
)
def test_of_interfaces(wanted: list[str], sentence: str) -> None:
    with pytest.raises(StartError) as caught:
        choose_interfaces((Interface("eth0", (), is_up=True),), wanted)
    assert str(caught.value) == sentence


# -- process sets ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ([], "A process set needs at least one rank, but it was given none. [invalid-process-set]"),
        (
            [0, 0],
            "A process set has each rank once, but it was given the ranks [0, 0]. [invalid-process-set]",
        ),
        (
            [2],
            (
                "A process set was given the ranks [2], but the ranks of this world are 0 to 1. Choose among those, or "
                "start more processes. [invalid-process-set]"
            ),
        ),
        (
            [0, 1],
            (
                "Attempted to add a duplicate process set: the global process set has the same ranks [0, 1] already. "
                "[duplicate-process-set]"
            ),
        ),
        (
            [1],
            (
                "Attempted to add a duplicate process set: another process set has the same ranks [1] already. "
                "[duplicate-process-set]"
            ),
        ),
    ],
)
def test_of_process_sets(ranks: list[int], sentence: str) -> None:
    assert problem_of([ranks], 2, [[0, 1], [1]]) == sentence


def test_of_calls_about_process_sets() -> None:
    assert text_of(lambda: ProcessSet("01")) == (  # type: ignore[arg-type]
        "ProcessSet('01') is not usable: expected ranks as integers. [invalid-process-set]"
    )
    assert text_of(lambda: remove_process_set([0])) == (  # type: ignore[arg-type]
        "hvd.remove_process_set([0]) is not usable: expected an hvd.ProcessSet. [invalid-process-set]"
    )
    assert text_of(lambda: read_answers(memoryview(b""), 2, ())) == (
        "0 of 2 ranks spoke about process sets. Start all ranks with the same version of Horovod. [other-version]"
    )
    assert text_of(current) == "Horovod has not been initialized; use hvd.init(). [not-initialized]"
