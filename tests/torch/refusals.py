"""Wrong use that is refused in the same way in every world and process set, however many ranks it has.

Cases are functions of `hvd`: horovod.torch, or for the members of a process set op_cases.Calls. All ranks that take
part run all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from error_codes import ends_with
from op_cases import Calls

from horovod.base.errors import OperationCode, TrainingCode

X = torch.ones(4)
OTHER = torch.zeros(2, dtype=torch.float8_e4m3fnuz)
SCALAR = torch.tensor(1.0)
SCATTERED = ends_with(OperationCode.UNDEFINED_REDUCTION, "Reducescatter", "hvd.Average", "hvd.Sum")

SUPERSEDES = "The op parameter supersedes average."  # the API promises these words

# A call, and the pattern of its error, which may be made from `hvd`.
Cases: TypeAlias = dict[str, tuple[Callable[[Any], Any], str | Callable[[Any], str]]]

# Refused at the call, before any rank hears of it.
REFUSED: Cases = {
    "expanded": (lambda hvd: hvd.allreduce_(torch.ones(1).expand(4)), ends_with(OperationCode.OVERLAPPING)),
    "unknown dtype": (lambda hvd: hvd.allreduce(OTHER), ends_with(OperationCode.UNSUPPORTED_DTYPE, str(OTHER.dtype))),
    "unknown dtype with a name": (
        lambda hvd: hvd.allreduce_(OTHER, name="eighths"),
        ends_with(OperationCode.UNSUPPORTED_DTYPE, str(OTHER.dtype), "'allreduce.eighths'"),
    ),
    "unknown dtype, broadcast": (
        lambda hvd: hvd.broadcast(OTHER, hvd.global_rank(0), name="eighths"),
        ends_with(OperationCode.UNSUPPORTED_DTYPE, str(OTHER.dtype), "'broadcast.eighths'"),
    ),
    "one of a group": (
        lambda hvd: hvd.grouped_allreduce([X, OTHER], name="eighths"),
        ends_with(OperationCode.UNSUPPORTED_DTYPE, str(OTHER.dtype), "'grouped_allreduce.eighths'"),
    ),
    "another device": (
        lambda hvd: hvd.allreduce(torch.ones(2, device="meta")),
        ends_with(OperationCode.UNSUPPORTED_DEVICE, "device meta", ".to_empty("),
    ),
    "sparse": (
        lambda hvd: hvd.allreduce(X.to_sparse()),
        ends_with(OperationCode.UNSUPPORTED_LAYOUT, "torch.sparse_coo", "hvd.sparse_allreduce_async"),
    ),
    "dense to sparse": (
        lambda hvd: hvd.sparse_allreduce_async(X, "s", hvd.Sum),
        ends_with(OperationCode.UNSUPPORTED_LAYOUT, "torch.strided"),
    ),
    "sparse maximum": (
        lambda hvd: hvd.sparse_allreduce_async(X.to_sparse(), "s", hvd.Max),
        ends_with(OperationCode.UNDEFINED_REDUCTION, "sparse_allreduce_async", "hvd.Average", "hvd.Sum"),
    ),
    "no tensor": (lambda hvd: hvd.allreduce([1.0, 2.0]), ends_with(OperationCode.NOT_A_TENSOR, "not list")),
    "no tensor in place": (lambda hvd: hvd.allreduce_(3.0), ends_with(OperationCode.NOT_A_TENSOR, "not float")),
    "no tensor to gather": (lambda hvd: hvd.allgather("rows"), ends_with(OperationCode.NOT_A_TENSOR, "not str")),
    "op and average": (
        lambda hvd: hvd.allreduce(X, average=True, op=hvd.Sum),
        ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, SUPERSEDES),
    ),
    "unknown op": (
        lambda hvd: hvd.allreduce(X, op=17),
        ends_with(OperationCode.UNKNOWN_REDUCTION, "op=17", "hvd.Average"),
    ),
    "op by name": (lambda hvd: hvd.allreduce_(X, op="Sum"), ends_with(OperationCode.UNKNOWN_REDUCTION, "op='Sum'")),
    "average of bool": (lambda hvd: hvd.allreduce(X > 0), "Average of bool is not defined"),
    "root too large": (lambda hvd: hvd.broadcast(X, 17), ends_with(OperationCode.INVALID_ROOT, "root_rank 17")),
    "root negative": (lambda hvd: hvd.broadcast_(X, -1), ends_with(OperationCode.INVALID_ROOT, "root_rank -1")),
    "root no number": (
        lambda hvd: hvd.broadcast_async_(X, "zero"),
        ends_with(OperationCode.INVALID_ROOT, "root_rank 'zero'"),
    ),
    "object root": (
        lambda hvd: hvd.broadcast_object(1, root_rank=17),
        ends_with(OperationCode.INVALID_ROOT, "root_rank 17"),
    ),
    "scalar to scatter": (
        lambda hvd: hvd.reducescatter(torch.tensor(1.0)),
        ends_with(OperationCode.NO_ROWS, "Reducescatter"),
    ),
    "too many splits": (
        lambda hvd: hvd.alltoall(X, [0] * (hvd.size() + 1)),
        lambda hvd: ends_with(OperationCode.WRONG_SPLITS, f"{hvd.size() + 1} entries", f"{hvd.size()} ranks"),
    ),
    "splits too large": (
        lambda hvd: hvd.alltoall(X, [5] * hvd.size()),
        lambda hvd: ends_with(OperationCode.WRONG_SPLITS, f"sum to {5 * hvd.size()}", "(4)"),
    ),
    "negative splits": (lambda hvd: hvd.alltoall(X, [-1] * hvd.size()), ends_with(OperationCode.WRONG_SPLITS, "[-1")),
    "splits of another type": (
        lambda hvd: hvd.alltoall(X, torch.tensor([4])),
        ends_with(OperationCode.WRONG_SPLITS, "torch.int32", "torch.int64"),
    ),
    "splits that are no numbers of rows": (
        lambda hvd: hvd.alltoall(X, [3.5] * hvd.size()),
        ends_with(OperationCode.WRONG_SPLITS, "[3.5"),
    ),
    "two-dimensional splits": (
        lambda hvd: hvd.alltoall(X, torch.ones(1, 1, dtype=torch.int32)),
        ends_with(OperationCode.WRONG_SPLITS, "2-dimensional"),
    ),
    "a group of letters": (lambda hvd: hvd.grouped_allreduce("ab"), ends_with(OperationCode.NOT_A_TENSOR, "not str")),
    "a group with a number": (
        lambda hvd: hvd.grouped_allgather([X, 1.0]),
        ends_with(OperationCode.NOT_A_TENSOR, "not float"),
    ),
    "a group with a gap": (
        lambda hvd: hvd.grouped_allreduce_([X, None]),
        ends_with(OperationCode.NOT_A_TENSOR, "not NoneType"),
    ),
    "a scalar in a group": (
        lambda hvd: hvd.grouped_reducescatter([X, torch.tensor(1.0)]),
        ends_with(OperationCode.NO_ROWS, "Reducescatter"),
    ),
    "op and average in place": (
        lambda hvd: hvd.allreduce_(X, average=True, op=hvd.Sum),
        ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, SUPERSEDES),
    ),
    "op and average grouped": (
        lambda hvd: hvd.grouped_allreduce([X], True, op=hvd.Sum),
        ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, SUPERSEDES),
    ),
    "no handle": (lambda hvd: hvd.poll(None), ends_with(OperationCode.CLEARED_HANDLE, "None")),
    "no process set": (
        lambda hvd: hvd.allreduce(X, process_set=1),
        ends_with(TrainingCode.INVALID_ARGUMENT, "not int"),
    ),
    "unregistered set": (
        lambda hvd: hvd.allreduce(X, process_set=hvd.ProcessSet([0, 1, 5])),
        ends_with(OperationCode.NO_SUCH_SET, "Allreduce", "[0, 1, 5]"),
    ),
    "unregistered set, barrier": (
        lambda hvd: hvd.barrier(process_set=hvd.ProcessSet([0, 1, 5])),
        ends_with(OperationCode.NO_SUCH_SET, "Barrier", "[0, 1, 5]"),
    ),
    "handle that never was": (lambda hvd: hvd.poll(12345), ends_with(OperationCode.CLEARED_HANDLE, "12345")),
}

# What the coordinator refuses where there are several ranks, the engine by itself where there is one.
TOLD: Cases = {
    "scalar": (lambda hvd: hvd.allgather(SCALAR, name="s"), r"anks? .* tried to ALLGATHER a rank-zero tensor"),
    "unnamed scalar": (lambda hvd: hvd.allgather(SCALAR), "tried to ALLGATHER a rank-zero tensor, in allgather.noname"),
    "differentiable scalar": (
        lambda hvd: hvd.allgather(torch.tensor(1.0, requires_grad=True), name="s"),
        "tried to ALLGATHER a rank-zero tensor",
    ),
    "grouped scalar": (
        lambda hvd: hvd.grouped_allgather([X, SCALAR], name="s"),
        r"tried to ALLGATHER a rank-zero tensor, in grouped_allgather\.s\. .*tensor\.reshape\(1\)",
    ),
    "scalar to all": (lambda hvd: hvd.alltoall(SCALAR, name="s"), "tried to ALLTOALL a rank-zero tensor"),
    "scalar to all with splits": (
        lambda hvd: hvd.alltoall(SCALAR, [1] * hvd.size(), name="s"),
        "tried to ALLTOALL a rank-zero tensor",
    ),
    "asynchronous scalar": (
        lambda hvd: hvd.synchronize(hvd.alltoall_async(SCALAR, name="s")),
        "tried to ALLTOALL a rank-zero tensor",
    ),
    "long name": (lambda hvd: hvd.allreduce(X, name="n" * 5000), "name of 1 to 4096 characters, but this one has 5010"),
    "many dimensions": (lambda hvd: hvd.allreduce(torch.ones([1] * 70), name="d"), "more than 64 dimensions"),
    "devices of a group": (
        lambda hvd: hvd.grouped_allreduce([X, torch.ones(1, device="meta")]),
        ends_with(OperationCode.SEVERAL_DEVICES, "Tensors in list must be on same device.", "cpu, meta"),
    ),
    "minimum of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Min), SCATTERED),
    "maximum of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Max), SCATTERED),
    "product of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Product), SCATTERED),
}


def run(hvd: Any) -> None:
    """Every case, on a rank that takes part."""
    for cases, error in ((REFUSED, ValueError), (TOLD, hvd.HorovodInternalError)):
        for case, (call, expected) in cases.items():
            pattern = expected if isinstance(expected, str) else expected(hvd)
            try:
                with pytest.raises(error, match=pattern):
                    call(hvd)
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # the engine must stay usable
            except BaseException as failure:
                failure.add_note(f"The case is {case!r}.")
                raise
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    if not hvd.is_set:
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "float8_e4m3fn")):
            hvd.allreduce(float8, op=hvd.Adasum)
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "hvd.Adasum")):
            hvd.allreduce(X.long(), op=hvd.Adasum)
    with pytest.raises(
        NotImplementedError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "hvd.Adasum", "process set")
    ):
        hvd.allreduce(X, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    scattered_adasum = ends_with(OperationCode.UNDEFINED_REDUCTION, "Reducescatter", "hvd.Adasum")
    for rows in (X, X.long(), float8, X > 0):
        with pytest.raises(NotImplementedError, match=scattered_adasum):
            hvd.reducescatter(rows, op=hvd.Adasum)
        with pytest.raises(NotImplementedError, match=scattered_adasum):
            hvd.grouped_reducescatter_async([rows], op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "sparse")):
        hvd.sparse_allreduce_async(X.to_sparse(), "s", hvd.Adasum)


def run_in_the_world() -> None:
    import horovod.torch

    run(Calls(horovod.torch.global_process_set))


def run_in_a_set(ranks: list[int]) -> None:
    import horovod.torch

    chosen = horovod.torch.add_process_set(ranks)
    try:
        if chosen.included():
            run(Calls(chosen))
    finally:
        horovod.torch.remove_process_set(chosen)  # the others wait for this
