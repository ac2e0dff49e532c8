"""What the bindings say of wrong calls, word by word. All other tests name the codes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimizer_model import distributed_sgd, linear, rows
from worlds import Keeper, World

import horovod.torch as hvd
from horovod.torch.compression import GradientCompressor

X = torch.ones(4)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, AssertionError, NotImplementedError, hvd.HorovodInternalError) as error:
        return str(error)
    return "nothing"


# -- calls of operations -----------------------------------------------------------------------------------------------
OPERATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "expanded": (
        lambda: hvd.allreduce_(torch.ones(1).expand(4), name="spread"),
        (
            "The result can't be written to a tensor of shape (4,) and strides (0,), of which several elements have "
            "one place in memory (made by expand() for example). Pass tensor.contiguous(), or use the function that "
            "returns a new tensor. It was given as 'allreduce.spread'. [overlapping-elements]"
        ),
    ),
    "complex": (
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max),
        (
            "Allreduce: op=hvd.Max is not defined for complex numbers. Use hvd.Average or hvd.Sum, or send the real "
            "and the imaginary parts. [undefined-reduction]"
        ),
    ),
    "dtype": (
        lambda: hvd.grouped_allreduce([X, torch.zeros(2, dtype=torch.float8_e4m3fnuz)], name="eighths"),
        (
            "Tensor type torch.float8_e4m3fnuz is not supported. It was given as 'grouped_allreduce.eighths'. "
            "[unsupported-dtype]"
        ),
    ),
    "meta": (
        lambda: hvd.allreduce(torch.ones(2, device="meta")),
        (
            "The tensor is on device meta, which has no memory: give it some with .to_empty(device='cpu'), and "
            "values, first. [unsupported-device]"
        ),
    ),
    "sparse": (
        lambda: hvd.allreduce(X.to_sparse()),
        (
            "Tensor layout torch.sparse_coo is not supported: use hvd.sparse_allreduce_async for sparse tensors, or "
            "make it dense with .to_dense(). [unsupported-layout]"
        ),
    ),
    "dense": (
        lambda: hvd.sparse_allreduce_async(X, "s", hvd.Sum),
        "sparse_allreduce_async needs a sparse COO tensor, not one of layout torch.strided. [unsupported-layout]",
    ),
    "no tensor": (
        lambda: hvd.allreduce([1.0]),  # type: ignore[arg-type]
        "A torch.Tensor is required, not list. [not-a-tensor]",
    ),
    "two devices": (
        lambda: hvd.grouped_allreduce([X, torch.ones(1, device="meta")]),
        "Tensors in list must be on same device. Found: cpu, meta. [several-devices]",
    ),
    "op and average": (
        lambda: hvd.allreduce(X, average=True, op=hvd.Sum),
        "The op parameter supersedes average. Please provide only one of them. [contradictory-arguments]",
    ),
    "unknown op": (
        lambda: hvd.allreduce(X, op=17),
        "Allreduce: op=17 is not one of hvd.Average, Sum, Adasum, Min, Max, Product. [unknown-reduction]",
    ),
    "adasum of rows": (
        lambda: hvd.reducescatter(X, op=hvd.Adasum),
        "Reducescatter does not support op=hvd.Adasum. Use hvd.Average or hvd.Sum. [undefined-reduction]",
    ),
    "root": (
        lambda: hvd.broadcast(X, 17),
        "Broadcast: root_rank 17 is not a rank of this world: ranks go from 0 to 1. [invalid-root]",
    ),
    "uneven rows": (
        lambda: hvd.alltoall(torch.ones(3)),
        (
            "Alltoall: the first dimension of the tensor (3) is not divisible by the number of ranks (2). Pass "
            "splits to send unequal parts. [wrong-splits]"
        ),
    ),
    "number of splits": (
        lambda: hvd.alltoall(X, [4]),
        "Alltoall: splits has 1 entries, but 2 ranks take part. [wrong-splits]",
    ),
    "sum of splits": (
        lambda: hvd.alltoall(X, [3, 3]),
        "Alltoall: splits sum to 6, which is more than the first dimension of the tensor (4). [wrong-splits]",
    ),
    "scalar": (
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        (
            "Reducescatter: the tensor is a scalar, which has no rows to scatter. Use hvd.allreduce, or give it a "
            "dimension with tensor.reshape(1). [no-rows]"
        ),
    ),
    "unregistered": (
        lambda: hvd.barrier(process_set=hvd.ProcessSet([0, 5])),
        (
            "Barrier: ProcessSet(process_set_id=None, ranks=[0, 5], mpi_comm=None) is not registered. Pass it to "
            "hvd.init(process_sets=[...]) or to hvd.add_process_set() on every rank first. [no-such-process-set]"
        ),
    ),
    "no handle": (
        lambda: hvd.poll(12345),
        "Handle 12345 was not created or has been cleared. [cleared-handle]",
    ),
}


# -- optimizers --------------------------------------------------------------------------------------------------------
class Number(GradientCompressor):
    """Yields what it must not."""

    def reduce(self, name: str, gradient: torch.Tensor) -> Any:
        yield 3


def _made(**options: Any) -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), **options)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "names": (
        lambda: _made(named_parameters=[1]),
        (
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters(). [invalid-parameter-names]"
        ),
    ),
    "duplicates": (
        lambda: _made(named_parameters=[("w", X), ("w", X)]),
        "Parameter names in named_parameters must be unique. Found duplicates: w [invalid-parameter-names]",
    ),
    "groups": (
        lambda: _made(groups=0),
        "groups should be a non-negative integer or a list of list of torch.Tensor. [invalid-groups]",
    ),
    "compressor": (
        lambda: _made(compression=Number),
        (
            "compression is the class Number, which has memory; pass an instance of it, one for each optimizer: "
            "compression=Number(...). [invalid-compressor]"
        ),
    ),
    "compressor and groups": (
        lambda: _made(compression=Number(), groups=1),
        "Number reduces each gradient on its own; leave out groups. [contradictory-arguments]",
    ),
    "predivide factor": (
        lambda: _made(gradient_predivide_factor=2.0, op=hvd.Sum),
        "gradient_predivide_factor not supported with op != Average. [contradictory-arguments]",
    ),
    "class": (
        lambda: type(distributed_sgd(linear()))([X]),
        (
            "SGD(...) was called with the class of a distributed optimizer, as type(optimizer)(...) does. Make a "
            "torch.optim.sgd.SGD and pass it to hvd.DistributedOptimizer, or copy the distributed optimizer together "
            "with its model: copy.deepcopy((model, optimizer)). [not-distributed]"
        ),
    ),
    "LBFGS": (
        lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([X]), 0),
        "cannot broadcast torch.optim.LBFGS state [unsupported-optimizer]",
    ),
    "entry": (
        lambda: hvd.broadcast_parameters({"extra": {}}, 0),
        (
            "broadcast_parameters: entry 'extra' is a dict, not a tensor. Send such values with "
            "hvd.broadcast_object. [not-a-tensor]"
        ),
    ),
    "dimensions": (
        lambda: hvd.SyncBatchNorm(4)(X),
        "SyncBatchNorm expected at least 2D input (got 1D input). [invalid-input-shape]",
    ),
    "channels": (
        lambda: hvd.SyncBatchNorm(4)(torch.ones(2, 3)),
        "SyncBatchNorm expected 4 channels (got 3). [invalid-input-shape]",
    ),
    "too few values": (
        lambda: hvd.SyncBatchNorm(4)(torch.ones(1 - hvd.rank(), 4)),
        (
            "SyncBatchNorm expected more than 1 value per channel when training, got 1 on all ranks together (this "
            "rank's input has shape [1, 4]). [invalid-input-shape]"
        ),
    ),
}


def _all(table: str) -> dict[str, str]:
    return {case: said(call) for case, (call, _) in globals()[table].items()}


@pytest.mark.parametrize("table", ["OPERATIONS", "OPTIMIZERS"])
def test_wrong_calls(pair: World, table: str) -> None:
    assert pair.run(_all, table)[0] == {case: sentence for case, (_, sentence) in globals()[table].items()}


def _steps() -> list[str]:
    """What is wrong while gradients are being reduced: another parameter has none yet."""
    model = linear()
    optimizer = distributed_sgd(model)

    def skipping() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    torch.nn.functional.linear(rows(), model.weight).sum().backward()
    calls = [optimizer.zero_grad, skipping, lambda: model(rows()).sum().backward(), optimizer.synchronize]
    found = [said(call) for call in calls]
    optimizer.zero_grad()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    compressing = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression=Number())
    found.append(said(lambda: weight.sum().backward()))
    compressing.load_state_dict(compressing.state_dict())  # forgets the half-made step
    if hvd.rank() == 0:
        model(rows()).sum().backward()
        model.weight.grad.mul_(2)
    found.append(said(optimizer.step))
    return found


IN_FLIGHT = (
    "so it is neither the average nor what was meant, and may differ between ranks. Call optimizer.synchronize() "
    "on all ranks after loss.backward() and before gradients are changed (by clipping or GradScaler, for "
    "example), and then optimizer.step() inside `with optimizer.skip_synchronize():`."
)


def test_steps(pair: World) -> None:
    assert pair.run(_steps)[0] == [
        (
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(). This is prohibited as it can cause a race condition. [gradients-in-flight]"
        ),
        (
            "optimizer.step() was called inside optimizer.skip_synchronize() while gradients were being reduced. "
            "Call optimizer.synchronize() after loss.backward(), on all ranks. [gradients-in-flight]"
        ),
        (
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            "backward_passes_per_step to accumulate gradients locally. [too-many-passes]"
        ),
        (
            f"The gradient of parameter 'weight' was changed on ranks 0 and 1 while it was being reduced, {IN_FLIGHT} "
            "This was step 1 of this optimizer. No rank has taken the step. [changed-gradients]"
        ),
        "Number.reduce of parameter 'w' yields a int; it must yield tensors to reduce. [invalid-compressor]",
        (
            f"The gradient of parameter 'weight' was changed on rank 0 while it was being reduced, {IN_FLIGHT} In step "
            "1 of this optimizer rank 1 made no gradients, so backward() could not end with the averages on all ranks. "
            "No rank has taken the step. [changed-gradients]"
        ),
    ]


# -- Adasum beside the backward pass -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def overlapping() -> Iterator[World]:
    with Keeper(2, "shm", {"HOROVOD_ADASUM_OVERLAP": "1"}) as keeper:
        yield keeper.get()


def _overlapping_steps() -> list[str]:
    model = linear()
    optimizer = distributed_sgd(model, op=hvd.Adasum)

    def halve_weight() -> None:
        with torch.no_grad():
            model.weight.mul_(0.5)

    def double_rate() -> None:
        optimizer.param_groups[0]["lr"] *= 2

    found = []
    for interfere in (lambda: model.weight.grad.mul_(0.5), halve_weight, double_rate):
        model(rows()).sum().backward()
        interfere()
        found.append(said(optimizer.step))
        optimizer.zero_grad()
    return found


OVERLAP = (
    "With HOROVOD_ADASUM_OVERLAP backward() takes a parameter's step as soon as its gradient is made. "
    "Without it scripts may clip gradients, use a GradScaler and set learning rates between backward() and "
    "step(): unset it, on all ranks. [adasum-overlap]"
)


def test_steps_in_backward(overlapping: World) -> None:
    assert overlapping.run(_overlapping_steps)[0] == [
        f"The gradient of parameter 'weight' was changed between backward() and optimizer.step(). {OVERLAP}",
        f"Parameter 'weight' was changed between backward() and optimizer.step(). {OVERLAP}",
        f"Option 'lr' of parameter group 0 was changed between backward() and optimizer.step(). {OVERLAP}",
    ]
