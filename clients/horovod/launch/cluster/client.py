"""What a launcher asks of a coordinator with agents: submit, follow, signal, list; at whichever address answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import grpc

from horovod.base.errors import ClusterCode, code_of, coded, without_code
from horovod.base.protocol import PROTOCOL, PROTOCOL_VERSION, RELEASE, __version__
from horovod.base.setting import split_address
from horovod.base.settings import resolve
from horovod.base.words import printable
from horovod.coordinator.core.cluster.job_record import refusal_of
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.jobs_pb2_grpc import JobsStub
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.worker.agent.feed import OUTPUT_COST
from horovod.worker.agent.log import STREAMS
from horovod.worker.agent.output import Console
from horovod.worker.runtime.channel import broke_in_write, explain, open_aio_channel, waiting_helps
from horovod.worker.runtime.coordinators import Search, leader_in, pings
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token import Credential, given_token

PATIENCE_S = 60.0  # seconds without any coordinator that answers
# Seconds for a client that follows a job, once a coordinator has answered. Ranks go on and end without a coordinator,
# and agents keep how they have ended until the next one asks: then it has the job's exit status.
FOLLOW_S = 600.0
TOLD_S = 10.0  # seconds after which a person is told that the client waits for a coordinator
REFUSED_S = 1.0  # for which a command asks again while no coordinator listens at any address
_RETRY_S = 0.2
_ATTEMPT_S = 10.0
_KEEPALIVE_S = 20.0  # time for the answer to a ping, where there is no other coordinator to ask
_ACK_BYTES = 128 << 10
_VERSIONS = ((PROTOCOL, str(PROTOCOL_VERSION)), (RELEASE, __version__))  # metadata of each call
# Waits for a byte, or for the end of who holds the pipe, and runs its arguments then.
_HEIR = "import os, sys; os.read(0, 1) or os.execv(sys.argv[1], sys.argv[1:])"

_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)

Answer = TypeVar("Answer")


class ClusterError(RuntimeError):
    """The coordinator refuses, or none answers. The text is a sentence for the user."""


class UnansweredError(ClusterError):
    """No coordinator answers; what was asked for may have been done."""


@dataclass(frozen=True)
class Access:
    """Where coordinators are and what to show to them."""

    addresses: Sequence[str]
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None

    @classmethod
    def of(cls, addresses: Sequence[str], environ: Mapping[str, str]) -> Access:
        """Access with the token and files that the environment names. ValueError or StartError with a sentence."""
        settings = resolve(environ)
        return cls(addresses, given_token(settings), ClientTls.of(settings))


class ClusterClient:
    """`async with ClusterClient(access) as cluster:`"""

    def __init__(
        self,
        access: Access,
        patience_s: float = PATIENCE_S,
        refused_s: float | None = None,
        follow_s: float = FOLLOW_S,
        told_s: float = TOLD_S,
    ) -> None:
        """patience_s: for how long a call is repeated. refused_s: for how long if every address refuses connections,
        so that no coordinator listens there, and none has answered before; None: as long. follow_s: for how long a job
        is followed while no coordinator answers, once one has answered. told_s: after which that is told.
        """
        self.addresses = access.addresses
        self._tls = access.tls
        self._search = Search(access.addresses)
        self._token = access.token
        # Address -> the connection, and the credential that is sent over it.
        self._channels: dict[str, tuple[grpc.aio.Channel, Credential]] = {}
        self._refusals: dict[str, str] = {}  # address -> why that coordinator will never serve us; another one may
        self._patience_s = patience_s
        self._refused_s = patience_s if refused_s is None else refused_s
        self._follow_s = follow_s
        self._told_s = told_s
        self._has_answered = False  # whether any coordinator has answered any call
        self._closed: dict[str, float] = {}  # address -> since when it has refused all connections

    async def __aenter__(self) -> ClusterClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel, _ in self._channels.values():
            await channel.close()

    async def submit(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Submits one job, even if the call has to be repeated until an answer comes."""
        _check_size(spec)  # checked before it is sent: a spec that is far too long is refused by gRPC without a message
        named = jobs_pb2.JobSpec()
        named.CopyFrom(spec)
        named.submission = named.submission or secrets.token_hex(16)
        try:
            return await self._ask(lambda stub, more: stub.Submit(named, **more))
        except UnansweredError as error:
            sentence = f"{without_code(error)} The job may have been taken: `horovodrun ps` will show it."
            raise ClusterError(coded(code_of(error) or ClusterCode.CLUSTER_SILENT, sentence)) from None

    def follow_less(self) -> None:
        """A person has asked for the end of the job that is followed: a coordinator that is away gets as long as for a
        call.
        """
        self._follow_s = min(self._follow_s, self._patience_s)

    async def signal(self, job: str, signum: int, stop: bool = True) -> jobs_pb2.JobRecord:
        request = jobs_pb2.SignalRequest(job=job, signal=signum, stop=stop)
        return await self._ask(lambda stub, more: stub.Signal(request, **more))

    async def place(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Where the job would run now."""
        _check_size(spec)
        return await self._ask(lambda stub, more: stub.Place(spec, **more))

    async def find_code(self, code: jobs_pb2.Code) -> jobs_pb2.CodeFound:
        """Which chunks of an archive the coordinator has."""
        return await self._ask(lambda stub, more: stub.FindCode(code, **more))

    async def put_code(self, chunk: jobs_pb2.CodeChunk) -> jobs_pb2.CodeFound:
        """Sends a chunk of an archive; may be repeated."""
        return await self._ask(lambda stub, more: stub.PutCode(chunk, **more))

    async def listing(self, most: int = 0, job: str = "") -> jobs_pb2.Listing:
        """job: this one alone, with its story. ClusterError where it is not known."""
        return await self._ask(lambda stub, more: stub.List(jobs_pb2.ListRequest(most=most, job=job), **more))

    async def story(self, job: str) -> Sequence[StoryEntry]:
        """What has happened to the job's worlds, the oldest first; nothing where that can't be told now."""
        try:
            listing = await self.listing(job=job)
        except ClusterError:
            return ()
        return next((one.entries for one in listing.worlds if one.job == job), ())

    async def follow(
        self,
        request: jobs_pb2.Open,
        changed: Callable[[jobs_pb2.JobRecord], None],
        output: Callable[[jobs_pb2.Output], Awaitable[None]],
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Until the job is over and all its output was taken. Goes on at another coordinator where one is lost, and
        waits for one where there is none.

        output: may take its time; the ranks wait when it is slow. note: shows a person that it waits, and for how long.
        """
        positions = {(one.rank, one.share): one.position for one in getattr(request, "from")}
        loop = asyncio.get_running_loop()
        silent_since_s = loop.time()
        has_told = False
        while True:
            del getattr(request, "from")[:]
            for (rank, share), position in positions.items():
                getattr(request, "from").add(rank=rank, share=share, position=position)
            heard = False
            stub, more = self._stub()
            call: Any = stub.Follow(metadata=more["metadata"])
            try:
                await call.write(jobs_pb2.FollowMessage(open=request))
                owed: dict[tuple[int, int], list[int]] = {}
                while (event := await call.read()) is not grpc.aio.EOF:
                    heard = True
                    if event.HasField("ended"):
                        return
                    if event.HasField("record"):
                        changed(event.record)
                        continue
                    await output(event.output)
                    # The position first, since what follows may find a dead stream.
                    positions[event.output.rank, event.output.share] = event.output.position
                    await self._acknowledge(call, event.output, owed)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # how it ended is asked below
            finally:
                call.cancel()
            code, details = await call.code(), await call.details() or ""
            closed_s = self._closed_for(_is_refused(code, details), loop.time())
            self._turn(code, details, await call.trailing_metadata(), heard)
            if heard:  # the coordinator was there until now, even if it sent nothing for long
                silent_since_s, has_told, self._has_answered = loop.time(), False, True
            if closed_s > self._refused_s and not self._has_answered:
                sentence = f"No coordinator listens at {self._addresses}: the connection is refused."
                raise ClusterError(coded(ClusterCode.CLUSTER_SILENT, sentence))
            silent_s = loop.time() - silent_since_s
            limit_s = self._follow_s if self._has_answered else self._patience_s
            if silent_s > limit_s:
                sentence = (
                    f"No coordinator has answered at {self._addresses} for {limit_s:g} s. The job continues "
                    f"without this launcher. `horovodrun logs -f {request.job}` shows its output when a "
                    "coordinator is back."
                )
                raise ClusterError(coded(ClusterCode.CLUSTER_SILENT, sentence))
            if self._has_answered and silent_s >= self._told_s and not has_told:
                has_told = True
                note(
                    f"no coordinator has answered at {self._addresses} for {self._told_s:g} s. The job "
                    f"continues as far as it can without one. This launcher waits up to {limit_s:g} s for a "
                    "coordinator that reports how the job ends."
                )
            await asyncio.sleep(_RETRY_S)

    @staticmethod
    async def _acknowledge(call: Any, output: jobs_pb2.Output, owed: dict[tuple[int, int], list[int]]) -> None:
        log = output.rank, output.share
        cost, _ = owed.get(log, [0, 0])
        owed[log] = [cost + len(output.data) + OUTPUT_COST, output.position]
        if sum(cost for cost, _ in owed.values()) >= _ACK_BYTES:
            taken = jobs_pb2.Taken()
            for (rank, share), (cost, position) in owed.items():
                taken.ranks.add(rank=rank, share=share, position=position, cost=cost)
            owed.clear()
            await call.write(jobs_pb2.FollowMessage(taken=taken))

    async def _ask(self, call: Callable[[Any, dict[str, Any]], Awaitable[Answer]]) -> Answer:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        was_asked = False
        while True:
            stub, more = self._stub()
            try:
                answer = await call(stub, {**more, "timeout": _ATTEMPT_S})
                self._has_answered = True
                self._search.served()
                return answer
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                closed_s = self._closed_for(_is_refused(error.code(), details), loop.time())
                try:
                    self._turn(error.code(), details, error.trailing_metadata())
                except ClusterError as refused:
                    raise UnansweredError(str(refused)) if was_asked else refused from None
                was_asked = was_asked or waiting_helps(error.code())  # otherwise the call was refused unread
                if loop.time() > give_up_at or closed_s > self._most_refused_s:
                    why = without_code(printable(details))
                    sentence = f"The coordinator at {self._addresses} did not answer: {why}."
                    raise UnansweredError(coded(ClusterCode.CLUSTER_SILENT, sentence)) from None
            await asyncio.sleep(_RETRY_S)

    def _closed_for(self, refused: bool, now_s: float) -> float:
        """How long all addresses have refused connections; 0 if one has not. refused: what the latest one did."""
        address = self._search.address
        if not refused:
            self._closed.pop(address, None)
            return 0.0
        self._closed.setdefault(address, now_s)
        return now_s - max(self._closed.values()) if self._closed.keys() >= set(self._search.addresses) else 0.0

    @property
    def _most_refused_s(self) -> float:
        # A coordinator that is started again gets its time.
        return self._patience_s if self._has_answered else self._refused_s

    @property
    def _addresses(self) -> str:
        return ", ".join(self._search.addresses)

    def _stub(self) -> tuple[Any, dict[str, Any]]:
        address = self._search.address
        if address not in self._channels:
            channel = open_aio_channel(address, self._tls, *pings(len(self._search.addresses), _KEEPALIVE_S))
            self._channels[address] = (channel, Credential(address, self._token, self._tls is not None))
        channel, credential = self._channels[address]
        return JobsStub(channel), {"metadata": (*credential.metadata(), *self._search.metadata(), *_VERSIONS)}

    def _turn(self, code: grpc.StatusCode, details: str, trailing: Any, was_served: bool = False) -> None:
        """After a call that failed: who is asked next. Raises what another attempt would not change."""
        if code is grpc.StatusCode.UNAUTHENTICATED and self._channels[self._search.address][1].is_outdated():
            code = grpc.StatusCode.UNAVAILABLE  # the coordinator began to listen between the look and the call
        text, leader = printable(details), leader_in(trailing)
        broke = broke_in_write(code, details)
        if code in _FINAL:
            raise ClusterError(coded(code_of(text) or ClusterCode.CLUSTER_REFUSES, text))
        if not waiting_helps(code) and not broke:
            self._refusals[self._search.address] = explain(code, text, self._search.address, with_token=True)
            if self._refusals.keys() >= set(self._search.addresses):
                refusals = dict.fromkeys(self._refusals.values())
                sentence = " ".join(without_code(refusal) for refusal in refusals)
                raise ClusterError(coded(code_of(next(iter(refusals))) or ClusterCode.CLUSTER_REFUSES, sentence))
        if was_served:  # a stream may break by itself: the same one is asked once more
            self._search.served()
        else:
            is_silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) or broke
            self._search.turn(leader is not None or not is_silent, printable(leader or ""))


class FollowedJob:
    """A job on a cluster, with the handles of a Supervisor: `stop` and `forward`, for a launcher's signals."""

    def __init__(self, cluster: ClusterClient, console: Console) -> None:
        self.record = jobs_pb2.JobRecord()
        self.changed: Callable[[jobs_pb2.JobRecord], None] = lambda record: None
        self.submit: Callable[[ClusterClient, jobs_pb2.JobSpec], Awaitable[jobs_pb2.JobRecord]] = ClusterClient.submit
        self.ends_if_suspended = False  # if this launcher is killed after Ctrl-Z, which has stopped the ranks
        self._cluster = cluster
        self._console = console
        self._stops = 0
        self._heir: subprocess.Popen[bytes] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_order = asyncio.Lock()  # SIGCONT must not overtake a SIGSTOP that was asked for before it
        self._room = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stops > 0

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """The job is to end; asked twice, at once."""
        self._stops += 1
        self._cluster.follow_less()
        self._signal(signum if self._stops == 1 else signal.SIGKILL, stop=True)

    def forward(self, signum: int) -> asyncio.Future[Any] | None:
        """Passes `signum` on to every rank. The future is done when the coordinator has it, or can't be given it."""
        if signum == signal.SIGSTOP and self.ends_if_suspended and self.record.id:
            self._leave_heir()
        elif signum == signal.SIGCONT:
            self._dismiss_heir()
        return self._signal(signum, stop=False)

    def _leave_heir(self) -> None:
        """Starts a process that ends the job if this one ends before it calls `_dismiss_heir`: nobody else would
        continue the ranks, whose slots would be held for ever.
        """
        if self._heir is None:
            command = [
                sys.executable,
                "-m",
                "horovod.launch",
                "stop",
                "--coordinator",
                ",".join(self._cluster.addresses),
            ]
            self._heir = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _HEIR, *command, self.record.id],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that signals of the terminal do not reach it
            )

    def _dismiss_heir(self) -> None:
        heir, self._heir = self._heir, None
        if heir is not None and heir.stdin is not None:
            with contextlib.suppress(BrokenPipeError), heir.stdin:
                heir.stdin.write(b".")
            heir.wait()

    async def run(self, spec: jobs_pb2.JobSpec) -> jobs_pb2.JobRecord:
        """Submits the job, shows what its ranks print, and returns its record when it is over."""
        self.record = await self.submit(self._cluster, spec)
        if self._stops:
            self._signal(signal.SIGTERM if self._stops == 1 else signal.SIGKILL, stop=True)
        return await self.follow(jobs_pb2.Open(job=self.record.id, output=True, hold=True))

    async def follow(self, request: jobs_pb2.Open) -> jobs_pb2.JobRecord:
        """Shows a job that was submitted before."""
        loop = asyncio.get_running_loop()
        self._console.room = lambda: _call(loop, self._room.set)
        try:
            note = lambda line: self._console.note(f"horovodrun: {line}")  # noqa: E731
            await self._cluster.follow(request, self._on_change, self._on_output, note)
        finally:
            self._dismiss_heir()
        slots = {slot for one in self.record.shares for slot in (*one.slots, *one.left)}
        for rank in {*range(self.record.spec.processes), *slots}:
            self._console.finish(rank, "stdout")
            self._console.finish(rank, "stderr")
        return self.record

    def _on_change(self, record: jobs_pb2.JobRecord) -> None:
        self.record = record
        self.changed(record)

    async def _on_output(self, output: jobs_pb2.Output) -> None:
        if output.skipped_bytes:
            self._console.note(
                f"horovodrun: about {output.skipped_bytes} bytes that rank {output.rank} printed are not kept any more."
            )
        stream = STREAMS[output.stream]
        if output.data and stream != "result":
            self._room.clear()
            if not self._console.feed(output.rank, stream, output.data):  # type: ignore[arg-type]
                await self._room.wait()

    def _signal(self, signum: int, stop: bool) -> asyncio.Future[Any] | None:
        if not self.record.id:
            return None  # `run` handles this end
        task = asyncio.ensure_future(self._deliver(signum, stop))
        self._tasks.add(task)
        task.add_done_callback(self._signalled)
        return task

    async def _deliver(self, signum: int, stop: bool) -> None:
        async with self._in_order:
            await self._cluster.signal(self.record.id, signum, stop)

    def _signalled(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._console.note(f"horovodrun: {error}")


def _is_refused(code: grpc.StatusCode, details: str) -> bool:
    """Whether nobody listens at the address. gRPC has no other sign of it than strerror's text."""
    return code is grpc.StatusCode.UNAVAILABLE and os.strerror(errno.ECONNREFUSED) in details


def _check_size(spec: jobs_pb2.JobSpec) -> None:
    if sentence := refusal_of(spec):
        raise ClusterError(coded(code_of(sentence) or ClusterCode.CLUSTER_REFUSES, sentence))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Called in the writer's thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)


def coordinators_of(text: str, source: str) -> list[str]:
    """The addresses in `a:29400,b:29400`; ValueError naming `source`."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        sentence = f"{source} names no coordinator: expected host:port, or several separated by commas."
        raise ValueError(coded(ClusterCode.NO_COORDINATOR_NAMED, sentence))
    for address in found:
        split_address(address, source)
    return found


# What belongs to the machine or the login where a launcher runs, and would be wrong on another.
_OWN_NAMES = {
    "_", "CUDA_VISIBLE_DEVICES", "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOME", "HOSTNAME", "INVOCATION_ID", "LOGNAME",
    "LS_COLORS", "MAIL", "NOTIFY_SOCKET", "OLDPWD", "PWD", "SHELL", "SHLVL", "TMPDIR", "USER", "WINDOWID", "XAUTHORITY",
    "HOROVOD_TOKEN", "HOROVOD_TOKEN_FILE", "HOROVOD_COORDINATOR", "HOROVOD_HOSTNAME", "HOROVOD_JOB",
    "HOROVOD_TLS_CA", "HOROVOD_TLS_CERT", "HOROVOD_TLS_KEY", "HOROVOD_TLS_SERVER_NAME",
}  # fmt: skip
_OWN_BEGINNINGS = ("SSH_", "XDG_", "SUDO_", "PYTEST_", "BASH_FUNC_")


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment the ranks on other hosts get."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_BEGINNINGS)
    }
