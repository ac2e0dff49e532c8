"""Whatever a coordinator decides, an engine takes it or refuses it in words: what runs ends, and so does the engine.

The messages reach the engine as they do in a session; what it refuses ends the epoch, as there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from messages import messages
from world import EngineWorld

from horovod.protos.v1 import negotiation_pb2, types_pb2
from horovod.worker.runtime.membership_stream import GrpcThreads
from horovod.worker.runtime.negotiator import Negotiator
from horovod.worker.runtime.session import Session

FUZZ = settings(
    deadline=None, max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
)


def apply(engine: Any, talk: list[negotiation_pb2.Decisions]) -> None:
    """As Negotiator does in its thread."""
    session = Session("127.0.0.1:1")  # never used
    negotiator = Negotiator(session, GrpcThreads(), engine, hello=negotiation_pb2.Hello(), epoch=1)
    for decisions in talk:
        try:
            negotiator._apply(decisions)
        except (TypeError, ValueError, RuntimeError) as error:
            engine.abort(f"It can't be applied: {error}")
    session.close()


def sane(decisions: negotiation_pb2.Decisions, name: str) -> None:
    """Makes a message one that is used: for this epoch and the global set, and of an operation that may be there."""
    decisions.epoch = 1
    for part in (*decisions.plans, *decisions.errors, *decisions.recalls):
        part.process_set = 0
    for plan in decisions.plans:
        plan.id %= 3
        plan.operation.type %= 2
        plan.operation.reduce_op %= 6
        for tensor in plan.operation.tensors:
            tensor.dtype %= 16
    for error in decisions.errors:
        error.name = name
    for recall in decisions.recalls:
        recall.ids[:] = [one % 3 for one in recall.ids]
    for join in decisions.joins:
        join.round %= 2
        join.phase %= 4


def new_operation(*shapes: list[int]) -> negotiation_pb2.Decisions:
    tensors = [types_pb2.TensorSpec(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape) for shape in shapes]
    plan = negotiation_pb2.Plan(name="allreduce.new", id=1, operation=types_pb2.Operation(tensors=tensors))
    return negotiation_pb2.Decisions(epoch=1, plans=[plan])


@example(talk=[new_operation()], usable=True, joined=True, transport="in_process")
@example(talk=[new_operation([2, -3])], usable=True, joined=True, transport="in_process")
@example(talk=[new_operation([2**40, 2**40])], usable=True, joined=True, transport="in_process")
@FUZZ
@given(
    talk=st.lists(messages(negotiation_pb2.Decisions), min_size=1, max_size=4),
    usable=st.booleans(),
    joined=st.booleans(),
    transport=st.sampled_from(["in_process", "tcp"]),
)
def test_anything_that_a_coordinator_decides(
    talk: list[negotiation_pb2.Decisions], usable: bool, joined: bool, transport: str
) -> None:
    for decisions in talk:
        if usable:
            sane(decisions, "allreduce.pending")
        # A sentence ends at a NUL, so that one may be left without a word.
        decisions.shutdown = decisions.shutdown.replace("\0", "")
        for part in (*decisions.errors, *decisions.joins):
            part.sentence = part.sentence.replace("\0", "")

    with EngineWorld(2, transport, progress_timeout_ms=2000) as world:
        world.run(lambda one: one.allreduce(np.ones(3, np.float32), "allreduce.known"))
        rank0 = world.members[0]  # and rank 1 starts nothing, so that what rank 0 has started stays
        if joined:
            # It is told of operations that it never heard of.
            talk.insert(0, negotiation_pb2.Decisions(epoch=1, joins=[negotiation_pb2.JoinState(ranks=[0])]))
            calls = [rank0.engine.join]
        else:
            names = ("allreduce.known", "allreduce.pending")
            calls = [rank0.allreduce_async(np.ones(3, np.float32), name).result for name in names]
        with ThreadPoolExecutor(len(calls)) as pool:
            ends = [pool.submit(call) for call in calls]
            assert not joined or world.negotiator.joined.wait(60)
            apply(rank0.engine, talk)
            rank0.engine.abort("The test is over.")
            for end in ends:
                error = end.exception(60)
                assert (joined and error is None) or (isinstance(error, RuntimeError) and str(error))
