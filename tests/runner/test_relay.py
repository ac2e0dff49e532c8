"""The relay of an agent changes nothing of a call: a gRPC server that answers in every way, called through it."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode, SettingCode, code_of
from horovod.base.protocol import RELAY, RELAY_FRAME
from horovod.protos.v1.relay_pb2 import RelayFrame
from horovod.worker.agent import relay as relay_module
from horovod.worker.agent.relay import MAX_CHANNELS, Relay
from horovod.worker.runtime.channel import open_channel
from horovod.worker.runtime.probe import PINGS, TO, answers, headers
from horovod.worker.runtime.tls import ClientTls

PATIENCE_S = 60
MESSAGE = bytes(1 << 16)
MANY = 2000  # of them: more than all buffers on the way hold


class Upstream(grpc.GenericRpcHandler):
    """Methods are named by what they do."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.written = 0
        self.cancelled = asyncio.Event()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(getattr(self, details.method.rpartition("/")[2]))

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.seen = dict(context.invocation_metadata())
        self.left_s = context.time_remaining()
        await context.send_initial_metadata((("begins", "here"),))
        async for request in requests:
            await context.write(request)
        context.set_trailing_metadata((("ends-bin", b"\0\1"),))

    async def refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "Not you, and not \u00fc.", (("why", "so"),))

    async def repeat(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Each request is a RelayFrame."""
        self.seen = dict(context.invocation_metadata())
        await context.send_initial_metadata(((RELAY, "frames"),))
        async for request in requests:
            await context.write(RELAY_FRAME + request)

    async def pour(self, requests: AsyncIterator[bytes], context: Any) -> None:
        for _ in range(MANY):
            await context.write(MESSAGE)
            self.written += 1

    async def wait(self, requests: AsyncIterator[bytes], context: Any) -> None:
        cancelled = self.cancelled = asyncio.Event()  # of this call
        await context.write(b"begun")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()


class Case:
    """A relay, what it leads to, and a channel through it."""

    def __init__(self, relay: Relay, upstream: Upstream, address: str, channel: grpc.aio.Channel) -> None:
        self.relay, self.upstream, self.address, self.channel = relay, upstream, address, channel

    def call(self, method: str, **more: Any) -> Any:
        metadata = (*headers(self.address, 20.0, 5.0), *more.pop("metadata", ()))
        return self.channel.stream_stream(f"/any.Service/{method}")(metadata=metadata, **more)

    async def echo(self, call: Any, data: bytes) -> None:
        await call.write(data)
        assert await call.read() == data


def played(folder: Path, story: Callable[[Case], Awaitable[None]]) -> None:
    async def play() -> None:
        upstream = Upstream()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((upstream,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        relay = Relay(folder, None)
        await relay.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{relay.path}") as channel:
                await asyncio.wait_for(story(Case(relay, upstream, address, channel)), PATIENCE_S)
        finally:
            await relay.close()
            await server.stop(None)

    folder.chmod(0o700)
    asyncio.run(play())
    assert list(folder.iterdir()) == []


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")  # short: a socket is named in it


def test_messages_metadata_deadline_and_the_end_go_through(folder: Path) -> None:
    async def story(case: Case) -> None:
        call = case.call("echo", metadata=(("authorization", "Bearer x"), ("more-bin", b"\0")), timeout=50.0)
        for data in (b"", b"one", bytes(range(256)) * 1000):
            await case.echo(call, data)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert dict(tuple(await call.initial_metadata())) == {"begins": "here"}
        assert dict(tuple(await call.trailing_metadata())) == {"ends-bin": b"\0\1"}
        seen = case.upstream.seen
        assert (seen["authorization"], seen["more-bin"]) == ("Bearer x", b"\0")
        assert TO not in seen
        assert PINGS not in seen
        assert 0 < case.upstream.left_s <= 51.0  # gRPC rounds up to three digits

    played(folder, story)


def test_a_call_of_one_message_each_way_goes_through(folder: Path) -> None:
    async def story(case: Case) -> None:
        answer = await case.channel.unary_unary("/any.Service/echo")(b"?", metadata=headers(case.address, 20.0, 5.0))
        assert answer == b"?"

    played(folder, story)


def test_a_refusal_keeps_its_status_and_its_words(folder: Path) -> None:
    async def story(case: Case) -> None:
        call = case.call("refuse")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert raised.value.details() == "Not you, and not \u00fc."
        assert dict(tuple(raised.value.trailing_metadata() or ())) == {"why": "so"}

    played(folder, story)


async def begun(case: Case, limit_s: float | None) -> Any:
    """A call that waits. A busy machine may reach the limit before the call has begun: then one with a longer limit."""
    while True:
        call = case.call("wait", timeout=limit_s)
        try:
            assert await call.read() == b"begun"
            return call
        except grpc.aio.AioRpcError as error:
            if limit_s is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            limit_s *= 4


@pytest.mark.parametrize("by", ["cancel", "connection", "deadline"])
def test_who_goes_away_is_gone_there_too(folder: Path, by: str) -> None:
    async def story(case: Case) -> None:
        call = await begun(case, 1.0 if by == "deadline" else None)
        if by == "cancel":
            call.cancel()
        elif by == "connection":
            await case.channel.close()
        await case.upstream.cancelled.wait()

    played(folder, story)


def test_a_slow_reader_holds_the_writer_back_and_nobody_else(folder: Path) -> None:
    async def story(case: Case) -> None:
        slow, other = case.call("pour"), case.call("echo")
        assert await slow.read() == MESSAGE
        unchanged, before = 0, -1
        while unchanged < 50:  # round trips of the other in which nothing more was written
            await case.echo(other, b"?")
            unchanged = unchanged + 1 if case.upstream.written == before else 0
            before = case.upstream.written
        assert case.upstream.written < MANY / 2
        for _ in range(MANY - 1):
            assert await slow.read() == MESSAGE
        assert await slow.read() is grpc.aio.EOF

    played(folder, story)


def test_all_calls_share_one_connection(folder: Path) -> None:
    async def story(case: Case) -> None:
        calls = [case.call("echo") for _ in range(8)]
        for call in calls:
            await case.echo(call, b"?")
        assert len(case.relay._upstreams) == 1
        assert next(iter(case.relay._upstreams.values())).calls == 8

    played(folder, story)


def framed(key: int, message: bytes = b"") -> bytes:
    return RelayFrame(key=key, message=message).SerializeToString()


def test_a_message_is_repeated_for_other_ranks(folder: Path) -> None:
    async def story(case: Case) -> None:
        first, second = case.call("repeat"), case.call("repeat")
        for key, message in ((1, b"one"), (2, b"two")):
            await first.write(framed(key, message))
            assert await first.read() == message
        ids = {case.upstream.seen[RELAY]}
        for key, message in ((2, b"two"), (1, b"one")):
            await second.write(framed(key))
            assert await second.read() == message
        ids.add(case.upstream.seen[RELAY])
        assert len(ids) == 1

    played(folder, story)


@pytest.mark.parametrize("frame", [framed(3), b"\xff"])
def test_what_can_not_be_repeated_ends_the_call_with_a_sentence(folder: Path, frame: bytes) -> None:
    async def story(case: Case) -> None:
        call = case.call("repeat")
        await call.write(frame)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert code_of(await call.details()) is ClusterCode.RELAY_REFUSED
        await case.echo(case.call("echo"), b"the others go on")

    played(folder, story)


def test_what_is_kept_is_bounded_in_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "KEPT_BYTES", 25)

    async def story() -> None:
        kept = relay_module.Repeated()
        for key in range(1, 4):
            assert kept.passing(RELAY_FRAME + framed(key, b"x" * 10)) == b"x" * 10
        assert kept.passing(RELAY_FRAME + framed(2)) == b"x" * 10
        with pytest.raises(ValueError, match=ends_with(ClusterCode.RELAY_REFUSED)):
            kept.passing(RELAY_FRAME + framed(1))
        monkeypatch.setattr(relay_module, "KEPT_S", 0.0)
        assert kept.passing(RELAY_FRAME + framed(4, b"y")) == b"y"
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match=ends_with(ClusterCode.RELAY_REFUSED)):
            kept.passing(RELAY_FRAME + framed(4))

    asyncio.run(story())


def test_its_socket_is_for_this_user_only(folder: Path) -> None:
    async def story(case: Case) -> None:
        assert stat.S_IMODE(os.stat(case.relay.path).st_mode) == 0o600
        assert await asyncio.to_thread(answers, case.relay.path)

    played(folder, story)
    assert not answers(str(folder / "relay.sock")), "it is closed"


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        ((), ends_with(SettingCode.INVALID_SETTING, f"{TO}=''")),
        (((TO, "a:1"),), ends_with(ClusterCode.RELAY_REFUSED, PINGS, "''")),
        (((TO, "a:1"), (PINGS, "nan 1")), ends_with(ClusterCode.RELAY_REFUSED, PINGS, "nan and 1 s")),
        (((TO, "a:1"), (PINGS, "1 0")), ends_with(ClusterCode.RELAY_REFUSED, PINGS, "1 and 0 s")),
    ],
)
def test_a_call_that_says_not_where_to_is_refused(folder: Path, metadata: Any, pattern: str) -> None:
    async def story(case: Case) -> None:
        call = case.channel.stream_stream("/any.Service/echo")(metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(pattern, raised.value.details() or "")

    played(folder, story)


def test_nobody_behind_it_is_unavailable_and_connections_are_bounded(folder: Path) -> None:
    async def story(case: Case) -> None:
        case.address = "127.0.0.1:1"
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect to all addresses") as raised:
            await case.call("echo").read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        for port in range(2, MAX_CHANNELS + 2):
            case.address = f"127.0.0.1:{port}"
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await case.call("echo").read()
        assert re.search(ends_with(ClusterCode.RELAY_REFUSED, "64 coordinators"), raised.value.details() or "")

    played(folder, story)


def test_a_long_path_is_no_socket(tmp_path: Path) -> None:
    async def story() -> None:
        relay = Relay(tmp_path / ("x" * 100), None)
        await relay.start()
        assert relay.path == ""
        await relay.close()

    asyncio.run(story())


def test_it_serves_who_believes_the_same() -> None:
    own = ClientTls("ca.pem")
    assert Relay(Path("/x"), own).serves(ClientTls("ca.pem"))
    assert not Relay(Path("/x"), own).serves(None)
    assert not Relay(Path("/x"), own).serves(ClientTls("ca.pem", "mine.pem", "mine.key"))


def test_a_blocking_channel_goes_through_it(folder: Path) -> None:
    """As members open theirs."""

    async def story(case: Case) -> None:
        def ask() -> bytes:
            with open_channel(case.address, None, relay=case.relay.path) as channel:
                call = channel.stream_stream("/any.Service/echo")
                return next(call(iter([b"?"]), metadata=headers(case.address, 20.0, 5.0)))

        assert await asyncio.to_thread(ask) == b"?"

    played(folder, story)
