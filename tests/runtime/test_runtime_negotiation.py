"""The negotiation stream: everything announced is sent once, batches form by themselves, a broken stream is resumed."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from error_codes import ends_with
from runtime_harness import threads_of_streams

from horovod.base.errors import EngineCode, WorldCode, coded
from horovod.protos.v1 import negotiation_pb2, negotiation_pb2_grpc, types_pb2
from horovod.worker.runtime.membership_stream import GrpcThreads
from horovod.worker.runtime.negotiator import CoordinatorLink, Negotiator, to_message

EPOCH = 7


def operation(name: str) -> tuple[Any, ...]:
    return (name, 0, [(7, (2, 3))], 1, 1.0, 0.5, 0, 0, 0)


class Outbox:
    """The engine's face towards the negotiator, played by the test."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[tuple[str, object]] | None] = queue.SimpleQueue()
        self.applied: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def next_outbox(self, timeout_ms: int) -> list[tuple[str, object]] | None:
        return self.items.get(timeout=timeout_ms / 1000)

    def apply_plan(self, process_set: int, name: str, id: int, operation: tuple[object, ...] | None) -> None:  # noqa: A002
        self.applied.put(("plan", process_set, name, id) if operation is None else ("plan", name, id, operation))

    def apply_failures(self, errors: list[tuple[int, str, str]], recalls: list[tuple[int, list[int]]]) -> None:
        for error in errors:
            self.applied.put(("error", *error))
        for recall in recalls:
            self.applied.put(("recall", *recall))

    def apply_recall(self, process_set: int, ids: list[int]) -> None:
        self.applied.put(("recall", process_set, ids))

    def blocked_report(self) -> SimpleNamespace:
        unfinished = [SimpleNamespace(process_set=0, name="x", awaited=True, number=6)]
        return SimpleNamespace(
            started=7,
            all_threads=True,
            moving=False,
            cut_short=False,
            cpu_us=9,
            executed={0: 5, 3: 1},
            unfinished=unfinished,
            unnamed={(0, "allreduce.noname"): 4, (3, "barrier.noname"): 1},
        )

    def apply_join(self, rounds_over: int, ranks: list[int], phase: int, sentence: str) -> None:
        self.applied.put(("join", rounds_over, ranks, phase))

    def abort(self, sentence: str) -> None:
        self.applied.put(("abort", sentence))


class Stream:
    """One stream as the server sees it."""

    def __init__(self, requests: Any, context: Any) -> None:
        self.requests, self.context = requests, context
        self.answers: queue.SimpleQueue[negotiation_pb2.Decisions | grpc.StatusCode] = queue.SimpleQueue()


class Server(negotiation_pb2_grpc.NegotiationServicer):
    def __init__(self) -> None:
        self.streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.details = "the test says so"  # of a status
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        negotiation_pb2_grpc.add_NegotiationServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Negotiate(self, request_iterator: Any, context: Any) -> Iterator[negotiation_pb2.Decisions]:  # noqa: N802
        stream = Stream(request_iterator, context)
        self.streams.put(stream)
        ended = threading.Event()
        context.add_callback(ended.set)
        while not ended.is_set():
            try:
                answer = stream.answers.get(timeout=0.05)
            except queue.Empty:
                continue
            if isinstance(answer, grpc.StatusCode):
                context.abort(answer, self.details)
            answer.term = answer.term or 1
            yield answer

    def stop(self) -> None:
        self._server.stop(None).wait()


class Session:
    """Stands where the membership is; attached to the server for as long as `term` is above 0."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.trouble = f"the coordinator at {address} is unreachable"
        self.channel = grpc.insecure_channel(address)
        self.term = 1
        self.lost = ""
        self.attached = threading.Event()
        self.attached.set()
        self.missed = threading.Event()  # it was asked for a link when there was none
        self.is_told = False
        self.asked_why = threading.Event()

    def link(self, seconds: float) -> CoordinatorLink | None:
        if not self.attached.is_set():
            self.missed.set()
        if not self.attached.wait(min(seconds, 0.05)):
            return None
        return CoordinatorLink(self.channel, (), self.address, self.term)

    def is_told_why(self, seconds: float) -> bool:
        self.asked_why.set()
        return self.is_told


class Setup:
    def __init__(self, grace_seconds: float = 30.0) -> None:
        self.server = Server()
        self.engine = Outbox()
        self.session = Session(self.server.address)
        self.grpc_threads = GrpcThreads()
        self.negotiator = Negotiator(
            self.session,
            self.grpc_threads,
            self.engine,  # type: ignore[arg-type]
            hello=negotiation_pb2.Hello(job="job", member_id="m0", rank=0),
            epoch=EPOCH,
            grace_seconds=grace_seconds,
        )
        self.negotiator.start()

    def stream(self) -> tuple[Stream, negotiation_pb2.NegotiationMessage]:
        """The next stream that is opened, and its first message."""
        stream = self.server.streams.get(timeout=30)
        return stream, next(stream.requests)

    def announce(self, *names: str) -> None:
        self.engine.items.put([("announce", operation(name)) for name in names])

    def applied(self) -> tuple[Any, ...]:
        return self.engine.applied.get(timeout=30)


@pytest.fixture
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr("horovod.worker.runtime.negotiator.CLOSE_SECONDS", 0.1)  # this server never ends a stream
    made = Setup(**getattr(request, "param", {}))
    yield made
    made.engine.items.put(None)
    made.negotiator.close()
    made.session.channel.close()
    made.grpc_threads.join(30)
    made.server.stop()
    assert not threads_of_streams()
    assert not [t.name for t in threading.enumerate() if t.name in ("horovod-outbox", "horovod-negotiation")]


def names(message: negotiation_pb2.NegotiationMessage) -> list[str]:
    return [operation.name for operation in message.announce]


def test_a_stream_begins_with_a_hello_and_decisions_reach_the_engine(setup):
    stream, hello = setup.stream()
    assert (hello.epoch, hello.hello.job, hello.hello.member_id, hello.hello.rank) == (EPOCH, "job", "m0", 0)
    setup.announce("a", "b")
    message = next(stream.requests)
    assert names(message) == ["a", "b"]
    assert message.epoch == EPOCH
    decisions = negotiation_pb2.Decisions(epoch=EPOCH)
    decisions.plans.add(process_set=0, name="a", id=4)
    decisions.errors.add(process_set=0, name="b", sentence="No.")
    decisions.recalls.add(process_set=0, ids=[1, 2])
    stream.answers.put(negotiation_pb2.Decisions(epoch=EPOCH - 1, plans=decisions.plans))  # stale: ignored
    stream.answers.put(decisions)
    assert setup.applied() == ("plan", 0, "a", 4)
    assert setup.applied() == ("error", 0, "b", "No.")
    assert setup.applied() == ("recall", 0, [1, 2])
    counters = setup.negotiator.counters()
    assert (counters["messages_sent"], counters["operations_announced"]) == (2, 2)
    assert counters["announcement_messages_sent"] == 1


def test_all_kinds_of_items_are_sent(setup):
    stream, _ = setup.stream()
    setup.engine.items.put([("blocked", (*operation("x"), 6, 1.5)), ("recalled", (0, [5, 6]))])
    message = next(stream.requests)
    assert [o.name for o in message.blocked] == ["x"]
    assert (list(message.blocked_numbers), list(message.blocked_seconds)) == ([6], [1.5])
    assert re.search(r"\.py:\d+, in \S+$", message.blocked_report.at), "where the main thread stands"
    message.blocked_report.at = ""
    assert message.blocked_report == negotiation_pb2.BlockedReport(
        started=7,
        all_threads=True,
        cpu_us=9,
        unfinished=[negotiation_pb2.Unfinished(name="x", awaited=True, number=6)],
        executed=[negotiation_pb2.Executed(count=5), negotiation_pb2.Executed(process_set=3, count=1)],
        unnamed=[
            negotiation_pb2.Unnamed(name="allreduce.noname", count=4),
            negotiation_pb2.Unnamed(process_set=3, name="barrier.noname", count=1),
        ],
    )
    assert [(r.process_set, list(r.ids)) for r in message.recalled] == [(0, [5, 6])]


def test_a_note_is_logged_and_not_sent(setup, caplog):
    caplog.set_level("INFO", logger="horovod")  # an earlier test may have set its level
    stream, _ = setup.stream()
    setup.engine.items.put([("note", (True, "The GPU is old.")), ("recalled", (0, [5]))])
    assert len(next(stream.requests).recalled) == 1  # came behind it
    assert "The GPU is old." in [record.getMessage() for record in caplog.records]


def test_a_join_is_told_again_on_a_new_stream_until_its_round_is_over(setup):
    stream, _ = setup.stream()
    setup.engine.items.put([("join", (3, False))])
    assert next(stream.requests).join == negotiation_pb2.Join(round=3)
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    stream, first = setup.stream()
    assert first.join == negotiation_pb2.Join(round=3)
    decisions = negotiation_pb2.Decisions(epoch=EPOCH)
    operation = types_pb2.Operation(
        name="x", tensors=[types_pb2.TensorSpec(dtype=types_pb2.DATA_TYPE_INT8, shape=[2])], prescale_factor=0.5
    )
    decisions.plans.add(name="x", id=7, operation=operation)
    decisions.joins.add(round=3, ranks=[2, 0], phase=negotiation_pb2.JOIN_PHASE_OPEN)
    decisions.joins.add(round=3, ranks=[2, 0, 1], phase=negotiation_pb2.JOIN_PHASE_ENDING)
    stream.answers.put(decisions)
    assert setup.applied() == ("plan", "x", 7, (0, [(1, [2])], 0, 0.5, 0.0, 0))
    assert setup.applied() == ("join", 3, [2, 0], 0)
    assert setup.applied() == ("join", 3, [2, 0, 1], 1)
    setup.engine.items.put([("join", (3, True))])
    assert next(stream.requests).join == negotiation_pb2.Join(round=3, contributes_none=True)
    over = negotiation_pb2.Decisions(epoch=EPOCH)
    over.joins.add(round=3, ranks=[2, 0, 1], phase=negotiation_pb2.JOIN_PHASE_OVER)
    stream.answers.put(over)
    assert setup.applied() == ("join", 3, [2, 0, 1], 2)
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    stream, first = setup.stream()
    assert not first.HasField("join")
    setup.engine.items.put([("join", (4, False))])
    assert next(stream.requests).join == negotiation_pb2.Join(round=4)
    stream.answers.put(over)  # again
    assert setup.applied() == ("join", 3, [2, 0, 1], 2)
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    _, first = setup.stream()
    assert first.join == negotiation_pb2.Join(round=4)


@pytest.mark.parametrize("setup", [{"grace_seconds": 0.2}], indirect=True)
def test_a_coordinator_that_stays_away_ends_a_join_too(setup):
    stream, _ = setup.stream()
    setup.engine.items.put([("join", (0, False))])
    next(stream.requests)
    setup.server.stop()
    kind, sentence = setup.applied()
    assert kind == "abort"
    assert re.search(ends_with(WorldCode.COORDINATOR_UNREACHABLE, "hvd.join()"), sentence)


def test_process_sets_are_told_before_their_operations_and_again_on_a_new_stream(setup):
    stream, _ = setup.stream()
    setup.negotiator.add_process_set(1, [0, 2])
    setup.negotiator.add_process_set(2, [1])
    setup.negotiator.remove_process_set(2)
    setup.negotiator.remove_process_set(9)  # was never added
    setup.announce("a")

    def told(message: negotiation_pb2.NegotiationMessage) -> list[tuple[int, list[int], bool]]:
        return [(one.process_set, list(one.ranks), one.removed) for one in message.process_sets]

    seen = []
    for message in stream.requests:
        seen += told(message)
        if message.announce:
            break
    assert seen == [(1, [0, 2], False), (2, [1], False), (2, [1], True)]
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    _, first = setup.stream()
    assert told(first) == [(1, [0, 2], False)]
    assert names(first) == ["a"]


def test_a_broken_stream_is_opened_again_and_told_what_is_undecided(setup):
    stream, _ = setup.stream()
    setup.announce("decided", "open")
    assert names(next(stream.requests)) == ["decided", "open"]
    decisions = negotiation_pb2.Decisions(epoch=EPOCH)
    decisions.plans.add(name="decided", id=1)
    stream.answers.put(decisions)
    assert setup.applied()[2] == "decided"
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    again, hello = setup.stream()
    assert hello.HasField("hello")
    assert names(hello) == ["open"]
    setup.announce("later")
    assert names(next(again.requests)) == ["later"]
    last = negotiation_pb2.Decisions(epoch=EPOCH)
    last.plans.add(name="open", id=2)
    again.answers.put(last)
    assert setup.applied() == ("plan", 0, "open", 2)


def test_a_final_refusal_ends_the_epoch_only_when_something_is_undecided(setup):
    stream, _ = setup.stream()
    stream.answers.put(grpc.StatusCode.FAILED_PRECONDITION)
    setup.announce("new")  # before or after the refusal is seen, the answer is the same
    kind, sentence = setup.applied()
    assert kind == "abort"
    refused = ends_with(WorldCode.COORDINATOR_REFUSED, "'new'", setup.server.address, "the test says so")
    assert re.search(refused, sentence)


@pytest.mark.parametrize("is_told", [True, False])
def test_the_end_of_the_epoch_leaves_the_last_word_to_the_membership(setup, is_told):
    """Both streams end with the world, in any order; that of the membership says why."""
    setup.session.is_told = is_told
    setup.server.details = coded(WorldCode.EPOCH_OVER, "World 7 is over.")
    stream, _ = setup.stream()
    setup.announce("new")
    assert names(next(stream.requests)) == ["new"]
    stream.answers.put(grpc.StatusCode.FAILED_PRECONDITION)
    assert setup.session.asked_why.wait(30)
    if is_told:
        setup.engine.items.put(None)
        setup.negotiator.close()
        assert setup.engine.applied.empty()
    else:
        kind, sentence = setup.applied()
        assert kind == "abort"
        assert re.search(ends_with(WorldCode.EPOCH_OVER, "'new'", "World 7 is over"), sentence)


@pytest.mark.parametrize("setup", [{"grace_seconds": 0.2}], indirect=True)
def test_a_coordinator_that_stays_away_ends_the_epoch_after_the_grace_period(setup):
    stream, _ = setup.stream()
    setup.announce("one", "two")
    assert names(next(stream.requests)) == ["one", "two"]
    setup.server.stop()
    kind, sentence = setup.applied()
    assert kind == "abort"
    unreachable = ends_with(WorldCode.COORDINATOR_UNREACHABLE, setup.server.address, "'one' and 1 more")
    assert re.search(unreachable, sentence)


class Clock:
    """The time of the negotiator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        monkeypatch.setattr("horovod.worker.runtime.negotiator.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_what_is_announced_late_in_an_outage_waits_as_long_as_anything(setup, monkeypatch):
    clock = Clock(monkeypatch)
    stream, _ = setup.stream()
    setup.session.attached.clear()
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    assert setup.session.missed.wait(30)
    clock.ahead_s += 100.0
    setup.announce("late")
    setup.session.missed.clear()
    assert setup.session.missed.wait(30)
    setup.session.attached.set()
    _, hello = setup.stream()
    assert names(hello) == ["late"]
    assert setup.engine.applied.empty()


def test_a_stream_that_brought_decisions_ends_an_outage(setup, monkeypatch):
    """Streams that are short do not add up to one outage, when the ranks get on in each."""
    clock = Clock(monkeypatch)
    stream, _ = setup.stream()
    setup.announce("one", "other")
    assert names(next(stream.requests)) == ["one", "other"]
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    stream, hello = setup.stream()
    assert names(hello) == ["one", "other"]
    decisions = negotiation_pb2.Decisions(epoch=EPOCH)
    decisions.plans.add(name="one", id=1)
    stream.answers.put(decisions)
    assert setup.applied()[2] == "one"
    clock.ahead_s += 20.0
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    stream, hello = setup.stream()
    clock.ahead_s += 20.0
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    _, hello = setup.stream()
    assert names(hello) == ["other"]
    assert setup.engine.applied.empty()


def test_warnings_are_logged_and_a_shutdown_ends_the_epoch(setup, caplog):
    stream, _ = setup.stream()
    stream.answers.put(negotiation_pb2.Decisions(epoch=EPOCH, warnings=["Rank 1 is late."]))
    stream.answers.put(negotiation_pb2.Decisions(epoch=EPOCH, shutdown="Rank 1 is too late."))
    assert setup.applied() == ("abort", "Rank 1 is too late.")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", "Rank 1 is late.")]


def test_a_decision_that_the_engine_cannot_take_ends_the_epoch(setup, monkeypatch):
    def refuse(*_: object) -> None:
        raise ValueError("id 70000 is too large")

    monkeypatch.setattr(setup.engine, "apply_plan", refuse)
    stream, _ = setup.stream()
    setup.announce("a", "b")
    next(stream.requests)
    decisions = negotiation_pb2.Decisions(epoch=EPOCH)
    decisions.plans.add(name="a", id=70000)
    stream.answers.put(decisions)
    kind, sentence = setup.applied()
    assert kind == "abort"
    assert re.search(ends_with(EngineCode.INTERNAL, "id 70000 is too large"), sentence)


def test_the_protobuf_form_of_an_operation():
    message = to_message(("allreduce.x", 0, [(7, (2, 3)), (4, ())], 1, 2.0, 0.5, 3, 4, 1))
    assert (message.name, message.type, message.reduce_op) == ("allreduce.x", 0, 1)
    assert [(t.dtype, list(t.shape)) for t in message.tensors] == [(7, [2, 3]), (4, [])]
    assert (message.prescale_factor, message.postscale_factor) == (2.0, 0.5)
    assert (message.root_rank, message.process_set, message.device) == (3, 4, 1)


def test_a_report_says_which_decisions_it_is_later_than(setup):
    def heard(stream: Stream) -> int:
        setup.engine.items.put([("blocked", (*operation("x"), 6, 1.5))])
        return next(stream.requests).blocked_report.heard

    stream, _ = setup.stream()
    assert heard(stream) == 0
    for serial in (7, 0):  # 0: a warning, which changes nothing
        error = negotiation_pb2.OperationError(name="b", sentence="No.")
        stream.answers.put(negotiation_pb2.Decisions(epoch=EPOCH, errors=[error], serial=serial))
        assert setup.applied()[0] == "error"
    setup.announce("c")
    next(stream.requests)
    stream.answers.put(negotiation_pb2.Decisions(epoch=EPOCH, plans=[negotiation_pb2.Plan(name="c", id=1)]))
    setup.applied()  # what came before has been heard by now
    assert heard(stream) == 7
    stream.answers.put(grpc.StatusCode.UNAVAILABLE)
    stream, first = setup.stream()
    assert not first.HasField("blocked_report")
    assert heard(stream) == 0, "the numbers are of one stream"
