"""The coordinator as a program and as a part of others: starting, stopping, and what people do wrong."""

import asyncio
import configparser
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from coordinator_builders import op
from coordinator_client import Crew
from error_codes import ends_with
from event_words import LISTENING, tells

from horovod.base.errors import AccessCode, ClusterCode, SettingCode, code_of
from horovod.coordinator.__main__ import main
from horovod.coordinator.address import ListenAddress, is_free
from horovod.coordinator.config import CoordinatorConfig
from horovod.coordinator.core.agreement.budget import MAX_WORLD_BYTES
from horovod.coordinator.core.world.checks import MAX_SIZE
from horovod.coordinator.server import CoordinatorServer, EmbeddedCoordinator
from horovod.coordinator.services.serving import Serving
from horovod.coordinator.store import Guard, MemoryStore
from horovod.coordinator.store.jobs import epoch_key, world_key
from horovod.protos.v1 import membership_pb2


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:29400", "127.0.0.1", 29400),
        ("[::1]:0", "::1", 0),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = ListenAddress.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    ["", "29400", "localhost", ":29400", "host:", "host:x", "host:-1", "host:65536", "::1:80", "a b:80", "[]:80"],
)
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, repr(text), "HOST:PORT")):
        ListenAddress.parse(text)


def test_loopback_is_recognised() -> None:
    assert ListenAddress.parse("127.0.0.2:0").is_loopback()
    assert ListenAddress.parse("localhost:0").is_loopback()
    assert not ListenAddress.parse("0.0.0.0:0").is_loopback()
    assert not ListenAddress.parse("[::]:0").is_loopback()


# -- embedded --------------------------------------------------------------------------------------------------------


def test_two_embedded_coordinators_are_independent_and_leave_nothing_behind() -> None:
    before = set(threading.enumerate())
    with EmbeddedCoordinator() as one, EmbeddedCoordinator("localhost:0") as other:
        assert one.address.startswith("127.0.0.1:")
        assert other.address.startswith("localhost:")
        for coordinator in (one, other):
            with Crew(coordinator.address) as crew:
                (member,) = crew.world(1)
                assert member.world.epoch == 1
    one.stop()
    with pytest.raises(RuntimeError, match=ends_with(ClusterCode.NOT_RUNNING)):
        _ = one.address
    assert not [t.name for t in set(threading.enumerate()) - before if t.name == "horovod-coordinator"]


def test_an_embedded_coordinator_starts_again() -> None:
    coordinator = EmbeddedCoordinator()
    for _ in range(3):
        with coordinator, pytest.raises(RuntimeError, match=ends_with(ClusterCode.NOT_RUNNING)):
            coordinator.start()


def test_stopping_ends_streams_in_words_and_blames_nobody() -> None:
    coordinator = EmbeddedCoordinator().start()
    with Crew(coordinator.address) as crew:
        members = crew.world(2)
        for member in members:
            member.negotiate(op())
        for member in members:
            assert member.plans(1)
        coordinator.stop()
        for member in members:
            with pytest.raises(grpc.RpcError):
                member.event("gone")  # skips what comes before the end of the stream
            assert member.membership.call.code() is grpc.StatusCode.UNAVAILABLE
            assert code_of(member.membership.call.details() or "") is ClusterCode.COORDINATOR_ENDS
            assert member.negotiation.failure()[0] is grpc.StatusCode.UNAVAILABLE


def test_a_port_in_use_is_said_and_leaves_no_thread(taken_port: int) -> None:
    before = set(threading.enumerate())
    with pytest.raises(OSError, match=ends_with(ClusterCode.PORT_IN_USE, f"127.0.0.1:{taken_port}")):
        EmbeddedCoordinator(f"127.0.0.1:{taken_port}").start()
    assert not set(threading.enumerate()) - before


def test_a_second_coordinator_does_not_share_the_port_of_the_first() -> None:
    with EmbeddedCoordinator() as coordinator, pytest.raises(OSError, match=ends_with(ClusterCode.PORT_IN_USE)):
        EmbeddedCoordinator(coordinator.address).start()


@pytest.mark.parametrize(
    ("listen", "fact"), [("192.0.2.1:29400", "`ip address`"), ("no-such-host.invalid:1", "'no-such-host.invalid'")]
)
def test_other_bind_errors(listen: str, fact: str) -> None:
    with pytest.raises(OSError, match=ends_with(ClusterCode.CANNOT_LISTEN, listen, fact)):
        EmbeddedCoordinator(listen).start()


def test_a_malformed_address_never_starts_a_thread() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "'nonsense'")):
        EmbeddedCoordinator("nonsense").start()


# -- the store -------------------------------------------------------------------------------------------------------


def test_the_store_holds_the_world_while_it_lives_and_the_epoch_for_ever() -> None:
    async def body() -> None:
        store = MemoryStore()
        await store.put(epoch_key("digits"), b"41")  # what an earlier coordinator left
        changes = store.watch(world_key("digits"), 1)
        server = CoordinatorServer(CoordinatorConfig(open_store=lambda: store))
        port = await server.start()
        with Crew(f"127.0.0.1:{port}") as crew:
            members = await asyncio.to_thread(crew.world, 2)
            published = await asyncio.wait_for(anext(changes), 20)
            assert membership_pb2.WorldRecord.FromString(published.value or b"").world == members[0].world
            assert members[0].world.epoch == 42
            for member in members:
                member.leave()
            assert (await asyncio.wait_for(anext(changes), 20)).value is None
        entry = await store.get(epoch_key("digits"))
        assert entry is not None
        assert entry.value == b"42"
        await server.stop()
        await store.close()

    asyncio.run(body())


def test_a_job_that_is_released_while_a_process_comes_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last world has ended just now. A world of this size once waited until its start timeout."""
    serve = Serving.serve
    released: list[Guard | None] = []

    async def nothing(_guard: Guard) -> None:
        pass

    async def then_release(self: Serving, job: str, unreachable: str = "", joins: bool = False) -> str:
        address = await serve(self, job, unreachable, joins)
        if not released:
            await self.release(job, lambda: True, nothing)
            released.append(self.guard(job))
        return address

    monkeypatch.setattr(Serving, "serve", then_release)
    with EmbeddedCoordinator() as coordinator, Crew(coordinator.address) as crew:
        crew.world(1)
    assert released == [None]


class Recording(MemoryStore):
    """Whether the port of members was free each time that the store was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.server = CoordinatorServer()
        self.port_was_free: list[bool] = []

    async def close(self) -> None:
        self.port_was_free.append(is_free("127.0.0.1", self.server.port))
        await super().close()


def test_what_was_opened_first_is_closed_last_also_when_the_last_part_fails(taken_port: int) -> None:
    async def body(web_listen: str) -> None:
        store = Recording()
        server = CoordinatorServer(CoordinatorConfig(open_store=lambda: store, web_listen=web_listen))
        store.server = server
        try:
            await server.start()
            assert store.port_was_free == []
            assert not is_free("127.0.0.1", server.port)
        except OSError as error:
            assert re.search(ends_with(ClusterCode.PORT_IN_USE, f"127.0.0.1:{taken_port}"), str(error))  # noqa: PT017
            assert store.port_was_free == [True]
        for _ in range(2):
            await server.stop()
        assert store.port_was_free == [True]

    asyncio.run(body("127.0.0.1:0"))
    asyncio.run(body(f"127.0.0.1:{taken_port}"))


# -- the program -----------------------------------------------------------------------------------------------------


def coordinator_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "horovod.coordinator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with coordinator_process("--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"horovod-coordinator {LISTENING} 127.0.0.1:")
        with Crew(line.split()[-1]) as crew:
            crew.world(2)
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")


def test_the_program_takes_as_many_connections_as_it_may() -> None:
    command = f"ulimit -Sn 256 && exec {sys.executable} -m horovod.coordinator --listen 127.0.0.1:0"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        process.terminate()
    assert soft == hard


def test_the_unit_of_systemd_has_limits_for_the_largest_world() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(Path(__file__).parents[2] / "deploy" / "horovod-coordinator.service")
    assert int(unit["Service"]["LimitNOFILE"]) > MAX_SIZE
    assert int(unit["Service"]["MemoryMax"].removesuffix("G")) << 30 > 2 * MAX_WORLD_BYTES


def test_the_program_asks_for_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    with coordinator_process("--listen", "127.0.0.1:0", "--token-file", str(token)) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with Crew(address, "secret") as crew:
            crew.world(1)
        with Crew(address) as crew:
            assert crew.member("m0").membership.failure()[0] is grpc.StatusCode.UNAUTHENTICATED
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "code", "pattern"),
    [
        (["--listen", "nonsense"], 2, ends_with(SettingCode.INVALID_SETTING, "'nonsense'", "HOST:PORT")),
        (["--listen", "0.0.0.0:29400", "--token-file", "SHORT"], 2, ends_with(AccessCode.WEAK_TOKEN, "--token-file")),
        (
            ["--listen", "127.0.0.1:0", "--web-listen", "0.0.0.0:0", "--web-token-file", "SHORT"],
            2,
            ends_with(AccessCode.WEAK_TOKEN, "--web-token-file"),
        ),
        (["--listen", "0.0.0.0:29400"], 2, ends_with(AccessCode.EXPOSED, "0.0.0.0:29400", "--token-file")),
        (["--tls-cert", "a.pem"], 2, ends_with(SettingCode.MISSING_SETTING, "--tls-cert", "--tls-key")),
        (["--tls-client-ca", "a.pem"], 2, ends_with(SettingCode.MISSING_SETTING, "--tls-client-ca", "--tls-cert")),
        (["--tls-cert", "/no.pem", "--tls-key", "/no.key"], 1, ends_with(AccessCode.UNUSABLE_CERTIFICATE, "'/no.pem'")),
        (["--listen", "192.0.2.1:29400", "--insecure"], 1, ends_with(ClusterCode.CANNOT_LISTEN, "192.0.2.1:29400")),
        (["--listen", "no-such-host.invalid:1"], 1, ends_with(ClusterCode.CANNOT_LISTEN, "'no-such-host.invalid'")),
        (
            ["--store", "etcd://192.0.2.1:2379"],
            2,
            ends_with(AccessCode.EXPOSED, "192.0.2.1:2379", "TLS", "credentials", "--insecure-store"),
        ),
        (["--token-file", "/no/such/file"], 1, "'/no/such/file': No such file"),
        (["--token-file", "/dev/null"], 1, "'/dev/null'"),
    ],
)
@pytest.mark.parametrize("verbose", [False, True])
def test_one_sentence_for_each_mistake(
    arguments: list[str], code: int, pattern: str, verbose: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    short.write_text("x" * 15)
    short.chmod(0o600)
    arguments = [str(short) if one == "SHORT" else one for one in arguments]
    assert main([*arguments, *(["--verbose"] if verbose else [])]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(pattern, captured.err)
    assert ("Traceback" in captured.err) == verbose
    if not verbose:
        assert captured.err.startswith("horovod-coordinator: ")
        assert captured.err.count("\n") == 1


def test_the_program_says_that_its_port_is_in_use(taken_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", f"127.0.0.1:{taken_port}"]) == 1
    said = capfd.readouterr().err
    assert re.search(ends_with(ClusterCode.PORT_IN_USE, "horovod-coordinator: ", f"127.0.0.1:{taken_port}"), said)
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_token_file_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(stat.S_IWUSR)
    assert main(["--token-file", str(token)]) == 1
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "caf\u00e9"])
def test_tokens_that_no_header_can_carry(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text(content, encoding="utf-8")
    assert main(["--token-file", str(token)]) == 1
    assert tells(capsys.readouterr().err, str(token), f"[{AccessCode.UNUSABLE_TOKEN}]")


def test_unknown_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--lissten", "x"])
    assert exit_info.value.code == 2
    assert "--lissten" in capsys.readouterr().err
