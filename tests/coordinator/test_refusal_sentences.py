"""The sentences with which coordinators refuse, whole, with their codes. Other tests name the code and the facts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cluster import Story

from horovod.base.proofs import job_token
from horovod.coordinator.__main__ import main
from horovod.coordinator.address import ListenAddress
from horovod.coordinator.core.cluster.code import Archives
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.coordinator.core.elastic.decision import Exit, Observed, OnFailure, Rules, Slot, Target, decide
from horovod.coordinator.core.rates import Rate, RateLimits, Rates
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.auth import Access
from horovod.coordinator.services.jobs import unknown
from horovod.coordinator.services.leading import ANOTHER
from horovod.coordinator.services.streams import own_error
from horovod.coordinator.store import StoreError, TooLargeError, open_store
from horovod.coordinator.store.base import check_size
from horovod.coordinator.store.sqlite import SqliteFile
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1 import agents_pb2, jobs_pb2

# -- jobs and agents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"processes": 1, "command": []}, "The job has no command. [invalid-job]"),
        ({"processes": 0}, "A job has from 1 to 65536 processes, not 0. [invalid-job]"),
        (
            {"processes": 3, "processes_per_worker": 2},
            "3 processes can't be dealt out to workers of 2 processes each. [invalid-job]",
        ),
        (
            {"processes": 2, "lines": [jobs_pb2.Line(command=["x"])]},
            "The job has a command and a run list: expected one of them. [invalid-job]",
        ),
        (
            {"processes": 4, "hosts": [jobs_pb2.HostSlots(name="h1", slots=2)]},
            "The job asks for 4 processes on hosts with 2 slots. [invalid-job]",
        ),
        (
            {"processes": 1, "code": jobs_pb2.Code(sha256="0" * 64, size=1 << 30)},
            "The code has 1,073,741,824 bytes: expected from 1 to 64 MiB. [code-too-large]",
        ),
        (
            {"processes": 1, "environment": {"LARGE": "x" * 1_400_000}},
            (
                "The description of the job has 1,400,020 bytes, 1,400,005 of them in its environment: with 1 "
                "process(es) it may have 1,349,964. Remove variables that the job does not need, as in `env "
                "-u LARGE horovodrun ...`. [job-too-large]"
            ),
        ),
    ],
)
def test_of_jobs_that_are_not_taken(fields: dict[str, Any], sentence: str) -> None:
    assert refusal_of(jobs_pb2.JobSpec(**{"command": ["x"], **fields})) == sentence


def test_of_a_job_that_is_not_known() -> None:
    assert unknown("j") == (
        "There is no job 'j' here: `horovodrun ps` lists the known jobs. Of ended jobs, the latest 200 are "
        "kept. [unknown-job]"
    )


def test_of_code_for_which_there_is_no_room() -> None:
    assert Archives(total_bytes=1 << 20).in_the_way(jobs_pb2.Code(sha256="0" * 64, size=2 << 20), ()) == (
        "There is no room for 2,097,152 bytes of code: at most 1 MiB are kept, and unfinished jobs need the "
        "code that is stored now. Submit the job again when some of them have ended. [no-room-for-code]"
    )


def test_of_jobs_that_fail() -> None:
    story = Story()
    story.agent("h1")
    story.submit("exits", 2)
    story.report("h1", "exits", {0: 3, 1: -9}, over=True)
    assert story.sentence("exits") == (
        "Rank 1 on host h1 (pid 1001) ended by signal 9 (SIGKILL); after that rank 0 ended with exit code 3. "
        "[rank-failed]"
    )
    story.agent("h2")
    story.submit("spans", 4)
    for agent, kind, probe in list(story.sent):
        if kind == "probe":
            story.do(story.cluster.reached(agent, probe.probe, (), story.now_s, story.wall_s))
    assert story.sentence("spans") == (
        "The hosts do not reach each other: h2 can't connect to h1 at 10.0.0.1 (eth0); h1 can't connect to h2 at "
        "10.0.0.2 (eth0). Look at routes and firewalls between them, or choose other hosts. [hosts-unreachable]"
    )


def test_of_a_job_that_may_not_replace_what_fails_any_more() -> None:
    rules = Rules(2, 2, OnFailure.REPLACE, most_replacements=0)
    target = Target(rules, (Slot(0, "h1"), Slot(1, "h2")))
    failed = Observed([Exit(1, 1, failed=True, how="ended with exit code 1")])
    assert decide(0.0, target, failed)[1] == (
        "Slot 1 on host h2 ended with exit code 1. Horovod was shutdown because number of resets during elastic job "
        "exceeded limit: 0 (--reset-limit or reset_limit). [reset-limit]"
    )
    lost = Observed([Exit(1, 1, failed=True, how="is lost: its host is down", host_lost=True)])
    assert decide(0.0, Target(Rules(2, 2, OnFailure.REPLACE), target.slots), lost)[1] == (
        "Slot 1 on host h2 is lost: its host is down, and there is no room for another process. Of at least 2 "
        "processes there are 1: the job ends. [too-few-processes]"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"version": "0.9", "protocol_version": 1},
            (
                "The agent of host h1 has Horovod 0.9 (protocol 1), but the coordinator has Horovod 1.0 (protocol 2), "
                "and these do not understand each other. Install releases with the same first number on both. "
                "[agent-version]"
            ),
        ),
        (
            {"instance": "another"},
            (
                "An agent named h1 is registered already, from another process. Give this one another --name, or wait "
                "until the coordinator has seen that the other one is gone. [agent-name-taken]"
            ),
        ),
    ],
)
def test_of_agents_that_are_refused(fields: dict[str, Any], sentence: str) -> None:
    story = Story()
    story.agent("h1")
    usual = {"protocol_version": 2, "version": "1.0", "name": "h1", "instance": "h1"}
    refused = story.cluster.refuses(agents_pb2.Register(**{**usual, **fields}))
    assert refused is not None
    assert refused.sentence == sentence


# -- streams -----------------------------------------------------------------------------------------------------------


TOKEN = "x" * 32


@pytest.mark.parametrize(
    ("shown", "sentence"),
    [
        (
            None,
            (
                "The coordinator asks for a token, but the call carried none. Set HOROVOD_TOKEN to the token that it "
                "was started with, or to that of the job, or HOROVOD_TOKEN_FILE to its file. Started without "
                "--token-file, it serves the processes of its own user only, which find the token by themselves. "
                "[wrong-token]"
            ),
        ),
        (
            job_token(TOKEN, "digits"),
            (
                "/horovod.v1.Jobs/List is not for the holder of the token of one job ('digits'); it asks for the "
                "cluster's. [token-of-another-job]"
            ),
        ),
    ],
)
def test_of_tokens(shown: str | None, sentence: str) -> None:
    authorization = None if shown is None else f"Bearer {shown}".encode()
    assert Access(TOKEN).refusal(authorization, "/horovod.v1.Jobs/List") == sentence


def test_of_what_ends_streams() -> None:
    limits = RateLimits(Rates(messages=Rate(0, 5)))
    assert limits.message("rank 1", 1, 0.0) == (
        "More messages come from rank 1 than any training needs (above 0 at once, 5 each second are served). "
        "Ranks should use the same names for their operations in each step. If they do, please report this. "
        "[too-many-messages]"
    )
    assert own_error(LookupError("x"), "rank 0") == (
        "The coordinator failed at a message of rank 0: LookupError, a bug of the coordinator; its log has the "
        "details. Please report it. [internal]"
    )
    assert ANOTHER == (
        "Another coordinator of this store serves agents and jobs, or did until a moment ago. [not-served-here]"
    )


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "redis://h:1",
            (
                "There is no store 'redis://h:1'; expected 'memory:', 'sqlite:PATH' or something like "
                "'etcd://h1:2379,h2:2379'. [invalid-setting]"
            ),
        ),
        (
            "etcd://",
            (
                "The store 'etcd://' names no host; expected something like 'etcd://h1:2379,h2:2379?ca=ca.pem'. "
                "[invalid-setting]"
            ),
        ),
        (
            "etcd://me@h1:2379",
            (
                "The store 'etcd://me@h1:2379' is no address of etcd; expected something like "
                "'etcd://h1:2379,h2:2379?ca=ca.pem'. [invalid-setting]"
            ),
        ),
        (
            "etcd://h1:2379?user=me",
            (
                "The store 'etcd://h1:2379?user=me' gives 'user' without 'password_file'; each needs the other. "
                "[missing-setting]"
            ),
        ),
    ],
)
def test_of_addresses_of_stores(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        open_store(text)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (Path.mkdir, "it is no regular file. [store-unusable]"),
        (
            lambda path: path.parent.chmod(0o777),
            "other users may change its directory: `chmod go-w {folder}`. [store-unusable]",
        ),
        (
            lambda path: path.write_bytes(b"no database at all" * 100),
            (
                "it is damaged, or is no such store (file is not a database). Restore it from a backup, or move it and "
                "store-wal away to begin with an empty one; jobs that run are not known then, and their agents end "
                "them. [store-damaged]"
            ),
        ),
    ],
)
def test_of_files_of_stores(spoil: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    spoil(path)
    with pytest.raises(OSError) as error:  # noqa: PT011 - the whole text is compared
        SqliteFile(path, 1 << 20)
    assert error.value.strerror == f"The store {path} can't be used: {why.format(folder=tmp_path)}"


def test_of_writes() -> None:
    with pytest.raises(TooLargeError) as error:
        check_size("k", bytes(1_500_000))
    assert str(error.value) == (
        "k and its value have 1,500,001 bytes: a store takes at most 1,500,000. [too-large-for-store]"
    )
    assert str(StoreError("It is silent.")) == "It is silent. [store-failed]"


# -- how a coordinator is started --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--listen", "nonsense"],
            (
                "Can't listen on 'nonsense': expected HOST:PORT with a port from 0 to 65535, for example "
                "127.0.0.1:29400 or [::1]:29400. [invalid-setting]"
            ),
        ),
        (
            ["--listen", "0.0.0.0:29400"],
            (
                "Refusing to listen on 0.0.0.0:29400 without a token, since other hosts could take part in the "
                "training. Give the same secret to the coordinator (--token-file FILE) and to the processes "
                "(HOROVOD_TOKEN_FILE or HOROVOD_TOKEN), ask for certificates (--tls-client-ca FILE), listen on "
                "127.0.0.1, or accept the risk with --insecure. [exposed]"
            ),
        ),
        (
            ["--tls-cert", "a.pem"],
            "--tls-cert and --tls-key belong together; only one of them is given. [missing-setting]",
        ),
        (
            ["--tls-cert", "/no.pem", "--tls-key", "/no.key"],
            "Can't read the certificate '/no.pem': No such file or directory. [unusable-certificate]",
        ),
    ],
)
def test_of_command_lines(arguments: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    assert capsys.readouterr().err == f"horovod-coordinator: {sentence}\n"


def test_of_a_port_in_use() -> None:
    assert ListenAddress("127.0.0.1", 29400).bind_error(errno.EADDRINUSE).strerror == (
        "Can't listen on 127.0.0.1:29400: the port is in use. Stop the program that listens there, or choose another "
        "port. [port-in-use]"
    )


def test_of_what_has_to_come_first() -> None:
    with pytest.raises(RuntimeError) as error:
        _ = EmbeddedCoordinator().address
    assert str(error.value) == ("The embedded coordinator does not run; call start() first. [coordinator-not-running]")
    with pytest.raises(ValueError) as half:  # noqa: PT011 - the whole text is compared
        ServerTls("a.pem", "")
    assert str(half.value) == "TLS needs a certificate and its key; only one of them is given. [missing-setting]"
