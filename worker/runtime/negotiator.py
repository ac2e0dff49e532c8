"""Sends what the engine announces to the coordinator and brings the coordinator's decisions back.

Three threads: `horovod-outbox` drains the engine, gRPC's own thread sends everything that has come together since the
last message, and `horovod-negotiation` reads decisions. An announcement is remembered until it is decided, so a broken
stream is opened again and told everything once more. When that does not succeed for `grace_seconds` in which something
waits for a decision, the epoch ends with a sentence; while nothing waits, training goes on without the coordinator.

A stream belongs to one coordinator in one term. Its hello holds what another one wants to know that takes over
(known.py): it is made when all decisions of the stream before have been applied, and none of them can come later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc

from horovod.base.errors import EngineCode, OperationCode, WorldCode, code_of, coded, coded_like, without_code
from horovod.base.words import printable, printable_lines
from horovod.protos.v1 import negotiation_pb2, negotiation_pb2_grpc, types_pb2
from horovod.worker.runtime.call_sites import line_of_main_thread
from horovod.worker.runtime.channel import status_of, waiting_helps
from horovod.worker.runtime.known import Known
from horovod.worker.runtime.membership_stream import GrpcThreads
from horovod.worker.runtime.timeline import LOOK_MS, FirstStep

if TYPE_CHECKING:
    from horovod._core import Engine

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
FIRST_RETRY_SECONDS = 0.02  # most streams break because the coordinator ended, and the session knows where to go
MAX_SENTENCE = 1 << 14  # characters
CLOSE_SECONDS = 2.0
WORD_SECONDS = 2.0  # for what the coordinator says on another stream at the same time
OUTBOX_MS = 60_000  # close() of the engine ends the wait
REPORTS_PER_S = 100  # reports of a whole world, at most: in a large world each rank reports less often

Key = tuple[int, str]  # (process set, name)


@dataclass(frozen=True)
class CoordinatorLink:
    """The connection to the coordinator to which this member is attached, with what each call on it needs."""

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]
    address: str
    term: int = 0


class Attached(Protocol):
    """What holds the membership (local_member.py)."""

    lost: str  # why this process is no member any more; empty while it is or may be again

    @property
    def trouble(self) -> str:
        """Why there is no link, as the end of a sentence."""

    def link(self, seconds: float) -> CoordinatorLink | None:
        """Waits so long for one."""

    def is_told_why(self, seconds: float) -> bool:
        """Whether the engine hears from the membership why the world is over. Waits so long for the coordinator's word
        about it.
        """


class Negotiator:
    """Runs from `start` until `close`; the engine must be closed before `close`."""

    def __init__(
        self,
        session: Attached,
        grpc_threads: GrpcThreads,
        engine: Engine,
        *,
        hello: negotiation_pb2.Hello,
        epoch: int,
        report_lost: Callable[[int, bool], None] = lambda rank, process_ended: None,
        grace_seconds: float = 10.0,
        report_seconds: float = 0.0,
        first_step: FirstStep | None = None,
    ) -> None:
        """hello: who this member is. report_lost: hears of a peer that the data plane found to be lost, and whether its
        process has ended. report_seconds: how often the coordinator is told this rank's counters; 0: never.
        first_step: where a trace is asked for.
        """
        self._session = session
        self._grpc_threads = grpc_threads  # who closes the channel waits for these threads
        self._engine = engine
        self._hello = hello
        self._epoch = epoch
        self._report_lost = report_lost
        self._grace_seconds = grace_seconds
        self._report_seconds = report_seconds
        self._first_step = first_step
        self._reported = negotiation_pb2.RankReport()
        self._changed = threading.Condition()
        self._undecided: dict[Key, types_pb2.Operation] = {}
        self._process_sets: dict[int, negotiation_pb2.ProcessSetChange] = {}  # sets that are registered, by number
        self._to_send = negotiation_pb2.NegotiationMessage(epoch=epoch)
        self._stream = 0  # number of the stream that may send
        self._join: negotiation_pb2.Join | None = None  # this rank is in hvd.join()
        self._known = Known(hello.rank)
        self._waits_since = 0.0  # since when something is undecided
        self._decided_at = 0.0  # when the last decisions came
        self._heard = 0  # serial of the latest decisions of this stream that the engine has applied
        self._refused = ""
        self._closing = threading.Event()
        self._call: Any = None
        self._counters = {"messages_sent": 0, "announcement_messages_sent": 0, "operations_announced": 0}
        self._threads = [
            threading.Thread(target=self._drain, name="horovod-outbox", daemon=True),
            threading.Thread(target=self._run, name="horovod-negotiation", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def counters(self) -> dict[str, int]:
        """Monotonic counts of what went to the coordinator; the hello of each stream counts as a message."""
        with self._changed:
            return dict(self._counters)

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """The coordinator hears of the set before it hears of any operation in it."""
        change = negotiation_pb2.ProcessSetChange(process_set=number, ranks=ranks)
        with self._changed:
            self._process_sets[number] = change
            self._to_send.process_sets.append(change)
            self._changed.notify_all()

    def remove_process_set(self, number: int) -> None:
        """The coordinator hears that the set is gone; nothing happens when it was not added."""
        with self._changed:
            change = self._process_sets.pop(number, None)
            if change is None:
                return
            self._to_send.process_sets.add(process_set=number, ranks=change.ranks, removed=True)
            self._known.forget_set(number)
            for key in [key for key in self._undecided if key[0] == number]:
                del self._undecided[key]
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the stream in order, else by force. Idempotent; never raises."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        call = self._call
        if call is not None:
            call.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_SECONDS)
        self._call = (
            None  # it refers back to this object, and the engine is to go away now, not with the next collection
        )

    # -- towards the coordinator -------------------------------------------------------------------------------------
    def _drain(self) -> None:
        report_at = time.monotonic() + self._report_seconds
        wait_ms = min(OUTBOX_MS, max(1, int(self._report_seconds * 1000))) if self._report_seconds else OUTBOX_MS
        while True:
            looks = self._first_step is not None and self._first_step.runs
            items = self._engine.next_outbox(LOOK_MS if looks else wait_ms)
            if looks or items is None:
                self._look_at_first_step(ends=items is None)
            if items is None:
                return
            if items:
                self._add(items)
            if self._report_seconds and time.monotonic() >= report_at:
                self._report()
                report_at = time.monotonic() + self._report_seconds

    def _look_at_first_step(self, ends: bool) -> None:
        if self._first_step is not None:
            operations_run = self._engine.counters()["agreed"]
            with self._changed:
                self._first_step.look(operations_run)
                if ends:
                    self._first_step.end("the world ended before")

    def _report(self) -> None:
        """Tells the coordinator this rank's counters, when they have changed."""
        counts = self._engine.counters()
        report = negotiation_pb2.RankReport(
            operations=counts["agreed"], bytes=counts["bytes"], waited_us=counts["waited_us"]
        )
        with self._changed:
            if report != self._reported:
                self._reported = report
                self._to_send.report.CopyFrom(report)
                self._changed.notify_all()

    def _add(self, items: Sequence[tuple[str, object]]) -> None:
        refused = ""
        blocked_report = self._blocked_report() if any(kind == "blocked" for kind, _ in items) else None
        with self._changed:
            if blocked_report is not None:
                self._to_send.blocked_report.CopyFrom(blocked_report)
            for kind, item in items:
                parts = cast("tuple[Any, ...]", item)
                if kind == "recalled":
                    process_set, ids = parts
                    self._to_send.recalled.add(process_set=process_set, ids=ids)
                    self._known.freed(process_set, ids)
                elif kind == "join":
                    self._begin_to_wait()
                    round_, contributes_none = parts
                    self._join = negotiation_pb2.Join(round=round_, contributes_none=contributes_none)
                    self._to_send.join.CopyFrom(self._join)
                    refused = self._refused
                elif kind == "lost":
                    self._report_lost(*parts)
                elif kind == "note":
                    worth_saying, sentence = parts
                    log.log(logging.INFO if worth_saying else logging.DEBUG, "%s", sentence)
                elif kind == "announce":
                    self._begin_to_wait()
                    operation = to_message(parts)
                    self._undecided[operation.process_set, operation.name] = operation
                    self._to_send.announce.append(operation)
                    refused = self._refused
                else:
                    *described, number, waited_seconds = parts
                    self._to_send.blocked.append(to_message(described))
                    self._to_send.blocked_numbers.append(number)
                    self._to_send.blocked_seconds.append(waited_seconds)
            if self._first_step is not None:
                self._first_step.announced(sum(kind == "announce" for kind, _ in items))
            self._changed.notify_all()
        if refused:
            self._give_up(refused)

    def _begin_to_wait(self) -> None:
        if not self._undecided and self._join is None:
            self._waits_since = time.monotonic()

    def _blocked_report(self) -> negotiation_pb2.BlockedReport:
        with self._changed:
            heard = self._heard  # read first: what the engine says then is later than these decisions
        found = self._engine.blocked_report()
        return negotiation_pb2.BlockedReport(
            started=found.started,
            all_threads=found.all_threads,
            moving=found.moving,
            cut_short=found.cut_short,
            unfinished=[
                negotiation_pb2.Unfinished(
                    process_set=one.process_set, name=one.name, awaited=one.awaited, number=one.number
                )
                for one in found.unfinished
            ],
            executed=[
                negotiation_pb2.Executed(process_set=number, count=count) for number, count in found.executed.items()
            ],
            heard=heard,
            cpu_us=found.cpu_us,
            unnamed=[
                negotiation_pb2.Unnamed(process_set=number, name=name, count=count)
                for (number, name), count in found.unnamed.items()
            ],
            at=line_of_main_thread(),
        )

    def _requests(self, stream: int, term: int) -> Iterator[negotiation_pb2.NegotiationMessage]:
        with self._changed:
            # The first message tells a coordinator that never heard of us, or forgot, all that is undecided. What does
            # not get on is told again each second anyway, and then by what was heard on this stream.
            self._heard = 0
            hello = self._known.hello(self._hello)
            hello.term = term
            if self._join is not None:
                self._known.place(self._join)
            message = negotiation_pb2.NegotiationMessage(
                epoch=self._epoch,
                hello=hello,
                announce=self._undecided.values(),
                recalled=self._to_send.recalled,
                join=self._join,
                process_sets=[
                    *self._process_sets.values(),
                    *(change for change in self._to_send.process_sets if change.removed),
                ],
            )
            self._to_send = negotiation_pb2.NegotiationMessage(epoch=self._epoch)
            self._count(message)
        yield message
        while True:
            with self._changed:
                self._changed.wait_for(lambda: stream != self._stream or self._closing.is_set() or self._has_news())
                if stream != self._stream or (self._closing.is_set() and not self._has_news()):
                    return
                message, self._to_send = self._to_send, negotiation_pb2.NegotiationMessage(epoch=self._epoch)
                self._count(message)
            yield message

    def _has_news(self) -> bool:
        message = self._to_send
        return bool(message.announce or message.blocked or message.recalled or message.process_sets) or (
            message.HasField("join") or message.HasField("report")
        )

    def _count(self, message: negotiation_pb2.NegotiationMessage) -> None:
        self._counters["messages_sent"] += 1
        self._counters["announcement_messages_sent"] += bool(message.announce)
        self._counters["operations_announced"] += len(message.announce)

    # -- from the coordinator ----------------------------------------------------------------------------------------
    def _run(self) -> None:
        broken_since = None
        while True:
            link = self._link(broken_since)
            if link is None:
                return
            with self._changed:
                self._stream += 1
                stream = self._stream
            began = time.monotonic()
            code, cause = self._read(stream, link)
            now = time.monotonic()
            with self._changed:
                self._stream += 1  # ends the thread that sends on the broken stream
                self._changed.notify_all()
                if self._closing.is_set():
                    return
            if broken_since is None or self._decided_at > began or now - began > self._grace_seconds:
                broken_since = now
                why = without_code(cause)
                log.info("The negotiation stream to the coordinator at %s is broken: %s.", link.address, why)
            said = without_code(cause)
            if not waiting_helps(code):
                # The world's end is told on both streams, its cause on that of the membership alone.
                if code_of(cause) is WorldCode.EPOCH_OVER and self._session.is_told_why(WORD_SECONDS):
                    return
                why = f"the coordinator at {link.address} ended the negotiation: {said}"
                self._refuse(coded(code_of(cause) or WorldCode.COORDINATOR_REFUSED, why))
                return
            if self._is_overdue(broken_since):
                self._give_up(f"the coordinator at {link.address} is unreachable ({said})")
                return
            with self._changed:
                seconds = RETRY_SECONDS if now - began < RETRY_SECONDS else FIRST_RETRY_SECONDS
                self._changed.wait_for(self._closing.is_set, seconds)

    def _link(self, broken_since: float | None) -> CoordinatorLink | None:
        """The way to the coordinator, as soon as there is one; None when this is over."""
        while not self._closing.is_set():
            if (link := self._session.link(RETRY_SECONDS)) is not None:
                return link
            if self._session.lost:
                lost = self._session.lost
                why = f"this process is no member any more: {without_code(lost).rstrip('.')}"
                self._refuse(coded_like(lost, why))
                return None
            broken_since = broken_since or time.monotonic()
            if self._is_overdue(broken_since):
                self._give_up(self._session.trouble)
                return None
        return None

    def _is_overdue(self, broken_since: float) -> bool:
        with self._changed:
            if not self._undecided and self._join is None:
                return False
            return time.monotonic() - max(broken_since, self._waits_since) >= self._grace_seconds

    def _read(self, stream: int, link: CoordinatorLink) -> tuple[grpc.StatusCode, str]:
        """Runs one stream until it ends and says why it did."""
        stub = negotiation_pb2_grpc.NegotiationStub(link.channel)
        try:
            requests = self._requests(stream, link.term)
            self._call = self._grpc_threads.start(stub.Negotiate, requests, link.metadata)
        except ValueError as error:  # the channel is closed
            return grpc.StatusCode.UNAVAILABLE, str(error)
        if self._closing.is_set():  # close() may have missed the call
            self._call.cancel()
        try:
            for decisions in self._call:
                if decisions.term == link.term:
                    self._apply(decisions)
                else:
                    log.info("Decisions for term %d were ignored; this is term %d.", decisions.term, link.term)
        except grpc.RpcError as error:
            code, details = status_of(error)
            return code, coded_like(details, without_code(details).strip().rstrip(".") or code.name)
        except Exception as error:
            # The ranks would no longer hold the same decisions.
            log.exception("Applying a decision failed.")
            self._call.cancel()
            said = without_code(error).rstrip(".")
            cause = f"a decision of the coordinator at {link.address} cannot be applied: {said}"
            sentence = f"The ranks cannot agree any more, because {cause}."
            self._engine.abort(coded(EngineCode.INTERNAL, sentence))
            return grpc.StatusCode.INTERNAL, coded(EngineCode.INTERNAL, cause)
        return grpc.StatusCode.UNAVAILABLE, "it ended the negotiation stream"

    def _apply(self, decisions: negotiation_pb2.Decisions) -> None:
        if decisions.epoch != self._epoch:
            log.info("Decisions for world %d were ignored; this is world %d.", decisions.epoch, self._epoch)
            return
        with self._changed:
            self._decided_at = time.monotonic()
            self._known.heard(decisions)
            for plan in decisions.plans:
                self._undecided.pop((plan.process_set, plan.name), None)
            for error in decisions.errors:
                self._undecided.pop((error.process_set, error.name), None)
            for join in decisions.joins:
                # The end of a round may be told twice, and this rank be in the next one by then.
                if join.phase == negotiation_pb2.JOIN_PHASE_OVER and self._join and join.round == self._join.round:
                    self._join = None
            if self._first_step is not None and not self._undecided:
                self._first_step.decided()
        for plan in decisions.plans:
            self._engine.apply_plan(plan.process_set, plan.name, plan.id, _operation_of(plan))
        recalls = [(recall.process_set, list(recall.ids)) for recall in decisions.recalls]
        if decisions.errors:
            self._engine.apply_failures([_in_words(error) for error in decisions.errors], recalls)
        else:
            for process_set, ids in recalls:
                self._engine.apply_recall(process_set, ids)
        for join in decisions.joins:
            self._engine.apply_join(join.round, list(join.ranks), join.phase, printable(join.sentence))
        for warning in decisions.warnings:
            log.warning("%s", printable_lines(warning, MAX_SENTENCE))
        if decisions.shutdown:
            self._engine.abort(printable_lines(decisions.shutdown, MAX_SENTENCE))
        with self._changed:
            self._heard = max(self._heard, decisions.serial)

    def _refuse(self, cause: str) -> None:
        with self._changed:
            self._refused = cause
            waiting = bool(self._undecided or self._join)
        if waiting:
            self._give_up(cause)

    def _give_up(self, cause: str) -> None:
        with self._changed:
            names = [name for _, name in self._undecided] or ["hvd.join()" if self._join else "operations"]
        which = f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        self._engine.abort(
            coded(
                code_of(cause) or WorldCode.COORDINATOR_UNREACHABLE,
                f"The ranks cannot agree on {which}, first used now, because {without_code(cause)}. Start the job "
                "again when the coordinator runs.",
            )
        )


def _in_words(error: negotiation_pb2.OperationError) -> tuple[int, str, str]:
    unsaid = f"The coordinator refuses {error.name!r} and does not say why."
    sentence = error.sentence or coded(OperationCode.MISMATCHED, unsaid)
    return error.process_set, error.name, printable_lines(sentence, MAX_SENTENCE)


def _operation_of(plan: negotiation_pb2.Plan) -> tuple[object, ...] | None:
    """What the engine of a rank that has joined is told of an operation of the others."""
    if not plan.HasField("operation"):
        return None
    operation = plan.operation
    tensors = [(tensor.dtype, list(tensor.shape)) for tensor in operation.tensors]
    return (
        operation.type,
        tensors,
        operation.reduce_op,
        operation.prescale_factor,
        operation.postscale_factor,
        operation.device,
    )


def to_message(operation: Sequence[Any]) -> types_pb2.Operation:
    """The protobuf form of an operation as the engine's outbox gives it."""
    name, kind, tensors, reduce_op, prescale, postscale, root, process_set, device = operation
    return types_pb2.Operation(
        name=name,
        type=kind,
        tensors=[types_pb2.TensorSpec(dtype=dtype, shape=shape) for dtype, shape in tensors],
        reduce_op=reduce_op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        root_rank=root,
        process_set=process_set,
        device=device,
    )
