"""What ranks must agree on, read from the announcements.

`signature` holds exactly what the checks of `agreement` compare: two operations have equal signatures if and only
if no check tells them apart. A long one is a digest, because it is kept for as long as the operation has an id. The
first dimension is left out where it may differ between ranks and steps (`uneven_rows`).
"""

import functools
import hashlib
import re

from horovod.base.errors import OperationCode, coded
from horovod.protos.messages import known_options
from horovod.protos.v1 import types_pb2 as pb

MAX_NAME_LENGTH = 4096
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 64
MAX_SIGNATURE_LENGTH = 64  # values in a signature; a longer signature is kept as its digest
# Remembered operations are charged to no job, so their table is small: 8 MB in all.
MAX_REMEMBERED = 8192
MAX_REMEMBERED_BYTES = 512  # a larger operation is looked at each time

# The traits of each type of operation, as types.proto gives them beside its number.
_TRAITS = {
    value.number: known_options(value.GetOptions()).Extensions[pb.traits]
    for value in pb.OperationType.DESCRIPTOR.values
}
_NO_TRAITS = pb.OperationTraits()  # the traits of a type that this version does not know

# The numbers that this version knows; protobuf passes other numbers on as they are.
_TYPES = frozenset(pb.OperationType.values())
_REDUCE_OPS = frozenset(pb.ReduceOp.values())
_DEVICES = frozenset(pb.DeviceKind.values())
_DTYPES = frozenset(pb.DataType.values())

# A wire name is "<prefix>.<user name>"; these are the prefixes.
_NAMES = [name.removeprefix("OPERATION_TYPE_").lower() for name, _ in pb.OperationType.items()]
_PREFIXES = frozenset(prefix + name for name in _NAMES for prefix in ("", "grouped_"))

_UNNAMED = ".noname"
_OPTIMIZER = re.compile(r"#[0-9]+(?=[.,]|$)")  # clients/horovod/common/optimizer_numbers.py

# A wire name that ends so belongs to a question, for which no rank waits: clients/horovod/common/ops/questions.py.
_QUESTION = ".all_made.question"

Signature = tuple[object, ...]


def signature(op: pb.Operation) -> Signature:
    traits = traits_of(op)
    skip = 1 if traits.uneven_rows else 0
    tensors: list[object] = []
    for tensor in op.tensors:
        shape = tuple(tensor.shape)
        tensors += (tensor.dtype, len(shape), shape[skip:])
    if len(tensors) + sum(len(tensor.shape) for tensor in op.tensors) > MAX_SIGNATURE_LENGTH:
        tensors = [hashlib.sha256(repr(tensors).encode()).digest()]
    arguments: list[object] = []
    if traits.reduces:
        arguments += (op.reduce_op, factors(op))
    if traits.rooted:
        arguments.append(op.root_rank)
    return op.type, op.device, *arguments, *tensors


def nobody_waits_for(name: str) -> bool:
    """Whether an operation of this name is no stall when a rank does not start it, and no cause of a deadlock."""
    return name.endswith(_QUESTION)


def traits_of(op: pb.Operation) -> pb.OperationTraits:
    return _TRAITS.get(op.type, _NO_TRAITS)


class _DefectError(Exception):
    """Says why an operation makes no sense. Raised, so that such operations are not remembered."""


def looked_at(op: pb.Operation) -> tuple[str, Signature]:
    """`defect(op)`, and `signature(op)` if there is none. All ranks announce the same, so that is remembered."""
    data = op.SerializeToString()
    try:
        return "", _signature_of(data) if len(data) <= MAX_REMEMBERED_BYTES else _checked(op)
    except _DefectError as error:
        return str(error), ()


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _signature_of(data: bytes) -> Signature:
    return _checked(pb.Operation.FromString(data))


def _checked(op: pb.Operation) -> Signature:
    if sentence := defect(op):
        raise _DefectError(sentence)
    return signature(op)


def factors(op: pb.Operation) -> tuple[str, str]:
    """Scale factors as text, in which a NaN equals itself."""
    return repr(op.prescale_factor), repr(op.postscale_factor)


def type_name(op: pb.Operation) -> str:
    """`ALLREDUCE`."""
    return pb.OperationType.Name(op.type).removeprefix("OPERATION_TYPE_")


def dtype_name(dtype: pb.DataType.ValueType) -> str:
    """`float32`."""
    return pb.DataType.Name(dtype).removeprefix("DATA_TYPE_").lower()


def reduce_name(reduce_op: pb.ReduceOp.ValueType) -> str:
    """`Average`."""
    return pb.ReduceOp.Name(reduce_op).removeprefix("REDUCE_OP_").capitalize()


def device_name(device: pb.DeviceKind.ValueType) -> str:
    """`CPU`."""
    return pb.DeviceKind.Name(device).removeprefix("DEVICE_KIND_")


def user_name(wire_name: str) -> str:
    """`fc1.weight` of `allreduce.fc1.weight`: the name as the user's script wrote it."""
    prefix, dot, rest = wire_name.partition(".")
    return rest if dot and prefix in _PREFIXES else wire_name


def without_optimizer(wire_name: str) -> str:
    """The name without the number of an optimizer whose parameters have names of another one: weight#2 is of weight."""
    return _OPTIMIZER.sub("", wire_name)


def is_unnamed(wire_name: str) -> bool:
    """Whether the script gave no name: the engine numbers such operations, "allreduce.noname.7".

    What stands before it says more of the operation, as in "allreduce.jit.noname.7".
    """
    kind, _, number = wire_name.rpartition(".")
    return kind.endswith(_UNNAMED) and number.isdecimal()


def defect(op: pb.Operation) -> str:
    """Why `op` makes no sense by itself, whatever the other ranks say; "" if it does."""
    sentence = _defect(op)
    return sentence and coded(OperationCode.INVALID, sentence)


def _defect(op: pb.Operation) -> str:
    if not 0 < len(op.name) <= MAX_NAME_LENGTH:
        return f"An operation needs a name of 1 to {MAX_NAME_LENGTH} characters, but this one has {len(op.name)}."
    if len(op.tensors) > MAX_TENSORS:
        return f"{op.name} has more than {MAX_TENSORS} tensors."
    known = op.type in _TYPES and op.reduce_op in _REDUCE_OPS and op.device in _DEVICES
    for tensor in op.tensors:
        known = known and tensor.dtype in _DTYPES
        if len(tensor.shape) > MAX_DIMENSIONS:
            return f"{op.name} has a tensor with more than {MAX_DIMENSIONS} dimensions."
        if tensor.shape and min(tensor.shape) < 0:
            return f"{op.name} has a tensor with a negative dimension."
    if not known:
        return f"{op.name} has a type, reduce operation, device or dtype that this version does not know."
    if traits_of(op).no_tensors and op.tensors:
        return f"{op.name} is a {type_name(op).lower()}, which has no tensors, but it came with {len(op.tensors)}."
    return ""
