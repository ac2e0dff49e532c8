"""Wrong use that is refused in the same words in every world and process set, however many ranks it has.

Cases are functions of `hvd`: horovod.torch, or for the members of a process set op_cases.Calls. All ranks that take
part run all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import Calls

X = torch.ones(4)
SCALAR = torch.tensor(1.0)

# Refused at the call, before any rank hears of it.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not contiguous": (lambda hvd: hvd.allreduce(torch.ones(4, 4).t()), "Tensor is required to be contiguous"),
    "expanded": (lambda hvd: hvd.allreduce_(torch.ones(1).expand(4)), "Tensor is required to be contiguous"),
    "complex": (
        lambda hvd: hvd.allreduce(torch.ones(2, dtype=torch.complex64)),
        r"Tensor type torch\.complex64 is not",
    ),
    "complex with a name": (
        lambda hvd: hvd.allreduce_(torch.ones(2, dtype=torch.complex128), name="waves"),
        r"Tensor type torch\.complex128 is not .*view_as_real\(tensor\)\. It was given as 'allreduce\.waves'\.$",
    ),
    "complex, broadcast": (
        lambda hvd: hvd.broadcast(torch.ones(2, dtype=torch.complex64), hvd.global_rank(0), name="waves"),
        r"Tensor type torch\.complex64 is not .* It was given as 'broadcast\.waves'\.$",
    ),
    "one of a group": (
        lambda hvd: hvd.grouped_allreduce([X, torch.ones(2, dtype=torch.complex64)], name="waves"),
        r"Tensor type torch\.complex64 .* It was given as 'grouped_allreduce\.waves'\.$",
    ),
    "another device": (lambda hvd: hvd.allreduce(torch.ones(2, device="meta")), "on device meta, which has no memory"),
    "sparse": (lambda hvd: hvd.allreduce(X.to_sparse()), "use hvd.sparse_allreduce_async"),
    "dense to sparse": (lambda hvd: hvd.sparse_allreduce_async(X, "s", hvd.Sum), "needs a sparse COO tensor"),
    "sparse maximum": (
        lambda hvd: hvd.sparse_allreduce_async(X.to_sparse(), "s", hvd.Max),
        "Average and op=hvd.Sum only",
    ),
    "no tensor": (lambda hvd: hvd.allreduce([1.0, 2.0]), "A torch.Tensor is required, not list"),
    "no tensor in place": (lambda hvd: hvd.allreduce_(3.0), "A torch.Tensor is required, not float"),
    "no tensor to gather": (lambda hvd: hvd.allgather("rows"), "A torch.Tensor is required, not str"),
    "op and average": (lambda hvd: hvd.allreduce(X, average=True, op=hvd.Sum), "The op parameter supersedes average"),
    "unknown op": (lambda hvd: hvd.allreduce(X, op=17), "op=17 is not one of hvd.Average"),
    "op by name": (lambda hvd: hvd.allreduce_(X, op="Sum"), "op='Sum' is not one of hvd.Average"),
    "average of bool": (lambda hvd: hvd.allreduce(X > 0), "Average of bool is not defined"),
    "root too large": (lambda hvd: hvd.broadcast(X, 17), "root_rank 17 is not a"),
    "root negative": (lambda hvd: hvd.broadcast_(X, -1), "root_rank -1 is not a"),
    "root no number": (lambda hvd: hvd.broadcast_async_(X, "zero"), "root_rank 'zero' is not a"),
    "object root": (lambda hvd: hvd.broadcast_object(1, root_rank=17), "root_rank 17 is not a"),
    "scalar to scatter": (lambda hvd: hvd.reducescatter(torch.tensor(1.0)), "the tensor is a scalar"),
    "too many splits": (
        lambda hvd: hvd.alltoall(X, [0] * (hvd.size() + 1)),
        r"splits has \d entries, but \d ranks take part",
    ),
    "splits too large": (
        lambda hvd: hvd.alltoall(X, [5] * hvd.size()),
        r"splits sum to \d+, which is more than the first dimension",
    ),
    "negative splits": (lambda hvd: hvd.alltoall(X, [-1] * hvd.size()), "splits must not be negative"),
    "splits of another type": (
        lambda hvd: hvd.alltoall(X, torch.tensor([4])),
        r"of torch.int32, not .* of torch.int64",
    ),
    "splits that are no numbers of rows": (
        lambda hvd: hvd.alltoall(X, [3.5] * hvd.size()),
        r"whole numbers, not \[3\.5",
    ),
    "two-dimensional splits": (lambda hvd: hvd.alltoall(X, torch.ones(1, 1, dtype=torch.int32)), "not 2-dimensional"),
    "a group of letters": (lambda hvd: hvd.grouped_allreduce("ab"), "A torch.Tensor is required, not str"),
    "a group with a number": (lambda hvd: hvd.grouped_allgather([X, 1.0]), "A torch.Tensor is required, not float"),
    "a group with a gap": (lambda hvd: hvd.grouped_allreduce_([X, None]), "A torch.Tensor is required, not NoneType"),
    "a scalar in a group": (lambda hvd: hvd.grouped_reducescatter([X, torch.tensor(1.0)]), "the tensor is a scalar"),
    "op and average in place": (
        lambda hvd: hvd.allreduce_(X, average=True, op=hvd.Sum),
        "op parameter supersedes average",
    ),
    "op and average grouped": (
        lambda hvd: hvd.grouped_allreduce([X], True, op=hvd.Sum),
        "op parameter supersedes average",
    ),
    "no handle": (lambda hvd: hvd.poll(None), "None was not created or has been cleared"),
    "no process set": (lambda hvd: hvd.allreduce(X, process_set=1), "process_set must be an hvd.ProcessSet, not int"),
    "unregistered set": (lambda hvd: hvd.allreduce(X, process_set=hvd.ProcessSet([0, 1, 5])), "is not registered"),
    "unregistered set, barrier": (lambda hvd: hvd.barrier(process_set=hvd.ProcessSet([0, 1, 5])), "is not registered"),
    "handle that never was": (lambda hvd: hvd.poll(12345), "12345 was not created or has been cleared"),
}

# What the coordinator refuses where there are several ranks, the engine by itself where there is one.
TOLD: dict[str, tuple[Callable[[Any], Any], str]] = {
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
        "Tensors in list must be on same device",
    ),
    "minimum of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Min), r"Average and op=hvd\.Sum only"),
    "maximum of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Max), r"Average and op=hvd\.Sum only"),
    "product of scattered rows": (lambda hvd: hvd.reducescatter(X, op=hvd.Product), r"Average and op=hvd\.Sum only"),
}


def run(hvd: Any) -> None:
    """Every case, on a rank that takes part."""
    for cases, error in ((REFUSED, ValueError), (TOLD, hvd.HorovodInternalError)):
        for case, (call, sentence) in cases.items():
            try:
                with pytest.raises(error, match=sentence):
                    call(hvd)
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # the engine must stay usable
            except BaseException as failure:
                failure.add_note(f"The case is {case!r}.")
                raise
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    if not hvd.is_set:
        with pytest.raises(ValueError, match=r"Adasum of float8_e4m3fn is not defined"):
            hvd.allreduce(float8, op=hvd.Adasum)
        with pytest.raises(ValueError, match="needs a floating-point tensor"):
            hvd.allreduce(X.long(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="global process set"):
        hvd.allreduce(X, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    for rows in (X, X.long(), float8, X > 0):
        with pytest.raises(NotImplementedError, match=r"Reducescatter does not support op=hvd\.Adasum"):
            hvd.reducescatter(rows, op=hvd.Adasum)
        with pytest.raises(NotImplementedError, match=r"Reducescatter does not support op=hvd\.Adasum"):
            hvd.grouped_reducescatter_async([rows], op=hvd.Adasum)
    with pytest.raises(NotImplementedError):
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
