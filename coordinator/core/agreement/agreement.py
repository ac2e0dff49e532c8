"""The cross-rank checks, in the order that users know from Horovod; the first that fails is the answer for every rank.

data type; operation; number of tensors of a group; shape; scale factors; reduce operation; what only some operations
ask for (at least one dimension; equal dimensions but the first; of reducescatter: Average or Sum; one root, which is a
member); CPU or GPU. Which of them concern an operation follows from its traits in types.proto.

Sentences begin with a stem that users search for ("Mismatched data types: One rank had type ...") and then name
every rank with its value.
"""

from collections.abc import Callable, Mapping, Sequence

from horovod.base.errors import OperationCode, coded
from horovod.base.words import capitalized, ranks_in_words, values_by_rank
from horovod.protos.v1 import types_pb2 as pb

from .operations import (
    device_name,
    dtype_name,
    factors,
    reduce_name,
    traits_of,
    type_name,
)

Ops = Mapping[int, pb.Operation]  # by global rank
Check = Callable[[Ops, Sequence[int]], str]


def disagreement(ops: Ops, members: Sequence[int]) -> str:
    """The sentence why these operations of one name can't run together, or "".

    `members` are the global ranks of the process set; `ops` has an operation of each rank that takes part.
    """
    for check in _CHECKS:
        sentence = check(ops, members)
        if sentence:
            return sentence
    return ""


def _compare(
    ops: Ops, value_of: Callable[[pb.Operation], str], stem: str, phrase: str, advice: str, where: str = ""
) -> str:
    """`<stem>: One rank <phrase> a, but another rank <phrase> b, in <where>: rank 0 has a; rank 1 has b. <advice>`, and
    the code.
    """
    values = {rank: value_of(op) for rank, op in ops.items()}
    first = values[min(values)]
    other = next((values[rank] for rank in sorted(values) if values[rank] != first), None)
    if other is None:
        return ""
    where = where or _first(ops).name
    return coded(
        OperationCode.MISMATCHED,
        f"{stem}: One rank {phrase} {first}, but another rank {phrase} {other}, in {where}: "
        f"{values_by_rank(values)}. {advice}",
    )


def _compare_tensors(ops: Ops, value_of: Callable[[pb.TensorSpec], str], stem: str, phrase: str, advice: str) -> str:
    """`_compare` for each tensor that all ranks have, saying which one of a group it is."""
    count = min(len(op.tensors) for op in ops.values())
    total = max(len(op.tensors) for op in ops.values())
    for index in range(count):
        where = f"tensor {index + 1} of {total} of {_first(ops).name}" if total > 1 else ""
        sentence = _compare(ops, lambda op, i=index: value_of(op.tensors[i]), stem, phrase, advice, where)  # type: ignore[misc]
        if sentence:
            return sentence
    return ""


def _first(ops: Ops) -> pb.Operation:
    return ops[min(ops)]


def _traits(ops: Ops) -> pb.OperationTraits:
    return traits_of(_first(ops))


def _shape(tensor: pb.TensorSpec) -> str:
    return str(list(tensor.shape))


# -- the checks, in order ----------------------------------------------------------------------------------------------


def _data_types(ops: Ops, _: Sequence[int]) -> str:
    return _compare_tensors(
        ops,
        lambda tensor: dtype_name(tensor.dtype),
        "Mismatched data types",
        "had type",
        "Pass a tensor of the same dtype on every rank.",
    )


def _operations(ops: Ops, _: Sequence[int]) -> str:
    return _compare(
        ops,
        type_name,
        "Mismatched operations",
        "did",
        "Call the same operation under one name on every rank.",
    )


def _tensor_counts(ops: Ops, _: Sequence[int]) -> str:
    return _compare(
        ops,
        lambda op: str(len(op.tensors)),
        f"Mismatched {type_name(_first(ops))} tensor counts",
        "grouped this many tensors:",
        "Pass the same list of tensors on every rank.",
    )


def _shapes(ops: Ops, _: Sequence[int]) -> str:
    if _traits(ops).uneven_rows:
        return ""
    return _compare_tensors(
        ops,
        _shape,
        f"Mismatched {type_name(_first(ops))} tensor shapes",
        "had shape",
        "Pass a tensor of the same shape on every rank.",
    )


def _factors(ops: Ops, _: Sequence[int]) -> str:
    if not _traits(ops).reduces:
        return ""

    def value(op: pb.Operation) -> str:
        prescale, postscale = factors(op)
        return f"prescale_factor={prescale} and postscale_factor={postscale}"

    return _compare(
        ops,
        value,
        "Mismatched prescale and/or postscale factors",
        "had",
        "Pass the same factors on every rank.",
    )


def _reduce_ops(ops: Ops, _: Sequence[int]) -> str:
    if not _traits(ops).reduces:
        return ""
    return _compare(
        ops,
        lambda op: reduce_name(op.reduce_op),
        "Mismatched reduction operation",
        "asked for",
        "Pass the same op= on every rank.",
    )


def _scalars(ops: Ops, _: Sequence[int]) -> str:
    if not _traits(ops).needs_rows:
        return ""
    ranks = [rank for rank, op in ops.items() if any(not tensor.shape for tensor in op.tensors)]
    if not ranks:
        return ""
    return coded(
        OperationCode.NO_ROWS,
        f"{capitalized(ranks_in_words(ranks))} tried to {type_name(_first(ops))} a rank-zero tensor, in "
        f"{_first(ops).name}. The tensor needs at least one dimension; use for example tensor.reshape(1).",
    )


def _trailing_shapes(ops: Ops, _: Sequence[int]) -> str:
    if not _traits(ops).uneven_rows:
        return ""
    stem = f"Mismatched {type_name(_first(ops))} tensor shapes"
    return _compare_tensors(
        ops,
        lambda tensor: f"{len(tensor.shape)}",
        stem,
        "had this many dimensions:",
        "Pass a tensor with the same number of dimensions on every rank.",
    ) or _compare_tensors(
        ops,
        lambda tensor: f"[*, {', '.join(map(str, tensor.shape[1:]))}]" if len(tensor.shape) > 1 else "[*]",
        stem,
        "had shape",
        "All dimensions but the first must be equal on every rank.",
    )


def _reducescatter_ops(ops: Ops, _: Sequence[int]) -> str:
    op = _first(ops)
    if op.type != pb.OPERATION_TYPE_REDUCESCATTER or op.reduce_op in (pb.REDUCE_OP_AVERAGE, pb.REDUCE_OP_SUM):
        return ""
    return coded(
        OperationCode.UNDEFINED_REDUCTION,
        f"REDUCESCATTER supports Average and Sum only, but {ranks_in_words(ops)} asked for "
        f"{reduce_name(op.reduce_op)}, in {op.name}.",
    )


def _roots(ops: Ops, members: Sequence[int]) -> str:
    op = _first(ops)
    if not _traits(ops).rooted:
        return ""
    sentence = _compare(
        ops,
        lambda op: str(op.root_rank),
        f"Mismatched {type_name(op)} root ranks",
        "specified root rank",
        "Pass the same root_rank on every rank.",
    )
    if not sentence and op.root_rank not in members:
        sentence = coded(
            OperationCode.INVALID_ROOT,
            f"The {type_name(op)} root rank {op.root_rank} of {op.name} is not a member of the process set, which has "
            f"{ranks_in_words(members)}.",
        )
    return sentence


def _devices(ops: Ops, _: Sequence[int]) -> str:
    return _compare(
        ops,
        lambda op: device_name(op.device),
        f"Mismatched {type_name(_first(ops))} CPU/GPU device selection",
        "specified device",
        "Pass a tensor on the same kind of device on every rank.",
    )


_CHECKS: tuple[Check, ...] = (
    _data_types,
    _operations,
    _tensor_counts,
    _shapes,
    _factors,
    _reduce_ops,
    _scalars,
    _trailing_shapes,
    _reducescatter_ops,
    _roots,
    _devices,
)
