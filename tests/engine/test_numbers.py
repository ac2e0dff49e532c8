"""The engine's enums and limits are those of the contract, which the coordinator reads from the protos."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
from error_codes import ends_with
from world import ALLREDUCE, SUM, EngineWorld

from horovod import _core
from horovod._core import OpSpec
from horovod.base.errors import EngineCode
from horovod.coordinator.core.agreement.ids import MAX_IDS
from horovod.coordinator.core.agreement.operations import MAX_DIMENSIONS, MAX_NAME_LENGTH, MAX_TENSORS
from horovod.protos.v1 import negotiation_pb2, types_pb2


@pytest.mark.parametrize(
    ("engine", "proto", "prefix"),
    [
        (_core.OpType, types_pb2.OperationType, "OPERATION_TYPE_"),
        (_core.ReduceOp, types_pb2.ReduceOp, "REDUCE_OP_"),
        (_core.DType, types_pb2.DataType, "DATA_TYPE_"),
        (_core.DeviceKind, types_pb2.DeviceKind, "DEVICE_KIND_"),
        (_core.JoinPhase, negotiation_pb2.JoinPhase, "JOIN_PHASE_"),
    ],
)
def test_enums_are_those_of_the_protos(engine: type[IntEnum], proto, prefix: str) -> None:
    assert {prefix + one.name: one.value for one in engine} == dict(proto.items())


def test_limits_are_those_of_the_coordinator() -> None:
    assert (_core.MAX_IDS, _core.MAX_NAME_LENGTH) == (MAX_IDS, MAX_NAME_LENGTH)
    assert (_core.MAX_TENSORS, _core.MAX_DIMENSIONS) == (MAX_TENSORS, MAX_DIMENSIONS)


def test_a_spec_says_what_it_is() -> None:
    spec = OpSpec(ALLREDUCE, op=SUM, prescale=0.5, process_set=3)
    assert (spec.type, spec.op, spec.prescale, spec.postscale, spec.root, spec.process_set) == (0, 1, 0.5, 1.0, 0, 3)
    assert repr(spec) == "OpSpec(ALLREDUCE, op=1, prescale=0.5, postscale=1.0, root=0, process_set=3)"


class Silent:
    """Nobody agrees on anything."""

    def join(self) -> None:
        """There is nothing to end."""


class Alone(EngineWorld):
    def _negotiator(self) -> Silent:
        return Silent()


@pytest.mark.parametrize("told", ["plan", "recall"])
def test_an_id_that_there_is_not_ends_the_epoch_on_all_ranks(told: str) -> None:
    with Alone(2) as world:
        handles = [member.allreduce_async(np.ones(1, np.float32), "allreduce.x") for member in world.members]
        if told == "plan":
            world.engines[0].apply_plan(0, "allreduce.x", _core.MAX_IDS)
        else:
            world.engines[0].apply_recall(0, [_core.MAX_IDS])
        for handle in handles:
            with pytest.raises(RuntimeError, match=ends_with(EngineCode.UNEXPECTED_DATA, MAX_IDS, MAX_IDS - 1)):
                handle.result()
