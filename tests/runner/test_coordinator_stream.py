"""An agent and its stream when coordinators come and go: a scripted coordinator, to which a real agent talks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from agents import AGENT, DEADLINE_S

from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.coordinator_stream import CoordinatorStream
from horovod.worker.runtime.errors import StartError


class Stream:
    """One stream of an agent, in the hands of a test."""

    def __init__(self, requests: AsyncIterator[pb.AgentMessage], context: Any) -> None:
        self.over = asyncio.Event()
        self._requests = requests
        self._context = context

    async def hear(self) -> pb.AgentMessage:
        return await anext(self._requests)

    async def accept(self) -> None:
        await self.say(registered=pb.Registered(probe_secret=b"secret"))

    async def say(self, **command: Any) -> None:
        await self._context.write(pb.AgentCommand(**command))


Body = Callable[[str, Callable[[], Awaitable[Stream]]], Awaitable[None]]


def scripted(body: Body) -> None:
    """Calls body(address, next_stream)."""

    async def main() -> None:
        streams: asyncio.Queue[Stream] = asyncio.Queue()

        async def attach(requests: AsyncIterator[pb.AgentMessage], context: Any) -> None:
            stream = Stream(requests, context)
            streams.put_nowait(stream)
            await stream.over.wait()

        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            attach, pb.AgentMessage.FromString, pb.AgentCommand.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("horovod.v1.Agents", {"Attach": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await asyncio.wait_for(body(f"127.0.0.1:{port}", streams.get), DEADLINE_S)
        finally:
            await server.stop(0)

    asyncio.run(main())


class Agent:
    """`async with Agent(address, tmp_path):`, a process."""

    def __init__(self, address: str, folder: Path) -> None:
        self._command = [*AGENT, "--coordinator", address, "--name", "h1", "--slots", "1", "--gpus", ""]
        self._command += ["--state-dir", str(folder / "state")]

    async def __aenter__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_TOKEN")}
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=subprocess.DEVNULL, env=environ)

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await asyncio.wait_for(self._process.wait(), DEADLINE_S)


def test_what_happens_between_registration_and_answer_is_told() -> None:
    """The registration does not hold it, and no later message would."""

    async def body(address: str, next_stream: Callable[[], Awaitable[Stream]]) -> None:
        connection = contextlib.nullcontext(grpc.aio.insecure_channel(address))
        register = pb.Register(name="h1")
        to_coordinator = CoordinatorStream(
            [address], None, lambda _: register, lambda command: None, lambda: None, lambda _: connection
        )
        work = asyncio.create_task(to_coordinator.run())
        stream = await next_stream()
        assert (await stream.hear()).HasField("register")
        to_coordinator.send(report=pb.JobReport(job="j", over=True))
        await stream.accept()
        assert (await stream.hear()).report.job == "j"
        stream.over.set()
        stream = await next_stream()
        to_coordinator.send(report=pb.JobReport(job="k", over=True))  # the last stream's messages are not this one's
        assert (await stream.hear()).HasField("register")
        await stream.accept()
        assert (await stream.hear()).report.job == "k"
        work.cancel()
        await connection.enter_result.close()

    scripted(body)


def test_output_may_be_asked_for_while_a_job_starts(tmp_path: Path) -> None:
    """The job is known by then: "that was all" would be wrong."""

    async def body(address: str, next_stream: Callable[[], Awaitable[Stream]]) -> None:
        async with Agent(address, tmp_path):
            stream = await next_stream()
            assert (await stream.hear()).HasField("register")
            await stream.accept()
            rank = pb.PlacedRank(rank=0, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
            command = [sys.executable, "-c", "print('all of it')"]
            await stream.say(start=pb.StartShare(job="j", command=command, ranks=[rank], size=1))
            position = jobs_pb2.Position(rank=0)
            await stream.say(read=pb.ReadLog(reader=1, job="j", window_bytes=1 << 20, **{"from": [position]}))
            output = b""
            while not (message := await stream.hear()).HasField("log_end"):
                output += message.output.output.data
            assert output == b"all of it\n"
            await stream.say(forget=pb.ForgetShare(job="j"))

    scripted(body)


def test_an_answer_to_the_last_coordinators_probe_is_not_the_next_ones(tmp_path: Path) -> None:
    async def body(address: str, next_stream: Callable[[], Awaitable[Stream]]) -> None:
        asked = asyncio.Event()
        reset = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reset.wait()
            writer.close()

        target = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = target.sockets[0].getsockname()[1]
        probe = pb.ProbeTargets(
            probe=1, timeout_seconds=DEADLINE_S, targets=[pb.Target(agent="h2", address="127.0.0.1", port=port)]
        )
        async with Agent(address, tmp_path):
            stream = await next_stream()
            assert (await stream.hear()).HasField("register")
            await stream.accept()
            await stream.say(probe=probe)
            await asked.wait()
            stream.over.set()
            stream = await next_stream()
            assert (await stream.hear()).HasField("register")
            await stream.accept()
            asked.clear()
            probe.probe = 2
            await stream.say(probe=probe)
            await asked.wait()
            reset.set()
            assert (await stream.hear()).reached.probe == 2
            target.close()

    scripted(body)


def test_reasons_that_alternate_between_two_coordinators_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        attempts = asyncio.Semaphore(0)
        to_coordinator = CoordinatorStream(
            ["127.0.0.1:1", "127.0.0.1:2"],
            None,
            register=lambda address: pb.Register(name="h1"),
            received=lambda command: None,
            lost=lambda: None,
            connection=counted(attempts),
        )
        running = asyncio.create_task(to_coordinator.run())
        for _ in range(7):
            await asyncio.wait_for(attempts.acquire(), DEADLINE_S)
        running.cancel()

    def counted(attempts: asyncio.Semaphore) -> Callable[[str], Any]:
        @contextlib.contextmanager
        def connection(address: str) -> Iterator[grpc.aio.Channel]:
            attempts.release()
            raise StartError(f"There is nothing at {address}.")
            yield

        return connection

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if "There is nothing" in record.getMessage()] == [
        f"There is nothing at 127.0.0.1:{port}. Trying again." for port in (1, 2)
    ]
