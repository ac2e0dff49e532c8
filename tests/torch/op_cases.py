"""The op matrix as tables: what each collective gets on each rank and what NumPy says must come out.

A case is (operation, dtype), among all ranks or in a process set: `hvd` is then the module with the set already given,
and ranks are places in it. Inputs are small whole numbers, so that every dtype computes sums and products exactly and
the oracle can work in float64; a result is compared bit for bit, except that averages of the half types may be off by
one rounding, and of the eight-bit floats everything may, which hold few whole numbers. A new collective is one
function here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with

from horovod.base.errors import OperationCode

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
DTYPES = (*UNSIGNED, "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
# For two ranks at most: of more, sums would be rounded several times on the way.
EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2")
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product")
SHAPES = ((), (1,), (0, 3), (5, 3), (1031,))


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """This rank's input, as float64; every rank can compute every other's."""
    generator = np.random.default_rng([seed, rank, *shape])
    low, high = (0, 2) if dtype == "bool" else (0, 4) if dtype in UNSIGNED else (-3, 4)
    return generator.integers(low, high, size=shape).astype(np.float64)


def to_device(made: Any) -> Any:
    """Where a rank has its tensors; tests of GPUs put another one here (gpu_worlds.py)."""
    return made


def tensor(array: np.ndarray, dtype: str) -> Any:
    import torch

    return to_device(torch.from_numpy(array.copy()).to(getattr(torch, dtype)))


def array(result: Any) -> np.ndarray:
    import torch

    found: np.ndarray = result.cpu().to(torch.float64).numpy()
    return found


def dtype_of(name: str) -> Any:
    import torch

    return getattr(torch, name)


def exactly(array: np.ndarray) -> Any:
    """A tensor of the array's own dtype, in the host's memory."""
    import torch

    return torch.from_numpy(array)


def is_floating(dtype: str) -> bool:
    return "float" in dtype


def reduced(inputs: list[np.ndarray], op: str, dtype: str, prescale: float = 1.0, postscale: float = 1.0) -> np.ndarray:
    """postscale * REDUCE(prescale * x); integers are cut toward zero after each multiplication, and sums wrap."""

    def scaled(x: np.ndarray, factor: float) -> np.ndarray:
        if factor == 1 or dtype == "bool":
            return x
        return x * factor if is_floating(dtype) else np.trunc(x * factor)

    stacked = np.stack([scaled(x, prescale) for x in inputs])
    if dtype == "bool":
        combined = stacked.max(0) if op in ("Sum", "Max") else stacked.min(0)
    else:
        function = {"Average": np.sum, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
        combined = function(stacked, axis=0)
    return scaled(combined, postscale / len(inputs) if op == "Average" else postscale)


def own_rows(full: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The rows that reducescatter gives to `rank`."""
    return np.array_split(full, size)[rank]


def split_sizes(rank: int, size: int) -> list[int]:
    """Rows that `rank` sends to each rank in the alltoall cases: uneven, some zero."""
    return [(rank + 2 * other) % 3 for other in range(size)]


def check(found: np.ndarray, expected: np.ndarray, dtype: str, what: str, rounding: bool = False) -> None:
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-12}.get(dtype, 0) if rounding else 0
    tolerance = {"float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}.get(dtype, tolerance)  # half of the last bit
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0, err_msg=what)


# -- what a rank does in each case: run here, compared here ------------------------------------------------------------
def allreduce(hvd: Any, rank: int, size: int, dtype: str) -> None:
    for op in REDUCTIONS:
        if dtype == "bool" and op == "Average":
            continue
        for shape in SHAPES:
            what = f"allreduce {op} {dtype} {shape}"
            inputs = [values(r, shape, dtype) for r in range(size)]
            expected = reduced(inputs, op, dtype)
            rounding = op == "Average"
            own = tensor(inputs[rank], dtype)
            code = getattr(hvd, op)
            name = f"{op}.{dtype}.{shape}"
            check(array(hvd.allreduce(own, op=code, name=name)), expected, dtype, what, rounding)
            check(array(own), inputs[rank], dtype, what + ": the input must not change")
            handle = hvd.allreduce_async(own, op=code, name=name)
            check(array(hvd.synchronize(handle)), expected, dtype, what + " async", rounding)
            copy = own.clone()
            assert hvd.synchronize(hvd.allreduce_async_(copy, op=code, name=name)) is copy
            check(array(copy), expected, dtype, what + " async in place", rounding)
            assert hvd.allreduce_(own, op=code, name=name) is own
            check(array(own), expected, dtype, what + " in place", rounding)


FACTORS = ((0.5, 1.0), (1.0, 0.5), (2.0, 0.25))


def allreduce_scaled(hvd: Any, rank: int, size: int, dtype: str) -> None:
    if dtype == "bool":
        return
    for prescale, postscale in FACTORS:
        for op in ("Average", "Sum", "Min", "Max"):
            inputs = [values(r, (64,), dtype) for r in range(size)]
            expected = reduced(inputs, op, dtype, prescale, postscale)
            options = {
                "op": getattr(hvd, op),
                "prescale_factor": prescale,
                "postscale_factor": postscale,
                "name": f"scaled.{op}.{dtype}.{prescale}",
            }
            for form in ("", "_async", "_", "_async_"):
                found = getattr(hvd, f"allreduce{form}")(tensor(inputs[rank], dtype), **options)
                found = hvd.synchronize(found) if "async" in form else found
                check(array(found), expected, dtype, f"allreduce{form} {op} {dtype} {prescale} {postscale}", True)


def allreduce_wraps(hvd: Any, rank: int, size: int, dtype: str) -> None:
    """Sums and products of integers beyond the type's range, as NumPy computes them in that type."""
    if is_floating(dtype) or dtype == "bool":
        return
    limits = np.iinfo(dtype)
    inputs = [
        np.random.default_rng([7, r]).integers(limits.min, limits.max, size=1031, dtype=dtype, endpoint=True)
        for r in range(size)
    ]
    for op, function in (("Sum", np.add), ("Product", np.multiply), ("Min", np.minimum), ("Max", np.maximum)):
        expected = inputs[0]
        for other in inputs[1:]:
            expected = function(expected, other)
        own = to_device(exactly(inputs[rank]))
        found = hvd.allreduce(own, op=getattr(hvd, op), name=f"wraps.{op}.{dtype}")
        np.testing.assert_array_equal(found.cpu().numpy(), expected, err_msg=f"{op} {dtype}")


def adasum(hvd: Any, rank: int, size: int, dtype: str) -> None:
    if not is_floating(dtype):
        return
    # Fractions of small powers of two, which every type holds exactly, so that all begin with the same vectors.
    inputs = [values(r, (37,), dtype) / 4 + (r == 0) for r in range(size)]
    own, options = tensor(inputs[rank], dtype), {"op": hvd.Adasum, "name": f"adasum.{dtype}"}
    if dtype in EIGHT_BIT_FLOATS:
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, dtype)):
            hvd.allreduce(own, **options)
        return
    if hvd.is_set:
        with pytest.raises(
            NotImplementedError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "Adasum", "process set")
        ):
            hvd.allreduce(own, **options)
        return
    expected = adaptive_sum(hosts_means(hvd, inputs) if own.is_cuda and hvd.nccl_built() else inputs)
    tolerance = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-5, "float64": 1e-12}[dtype]
    for found in (
        hvd.allreduce(own, **options),
        hvd.synchronize(hvd.allreduce_async(own, **options)),
        hvd.grouped_allreduce([own, 2 * own], **options)[0],
        hvd.allreduce_(own, **options),
    ):
        np.testing.assert_allclose(array(found), expected, rtol=tolerance, atol=tolerance)


def hosts_means(hvd: Any, vectors: list[np.ndarray]) -> list[np.ndarray]:
    """What Adasum combines where NCCL works within hosts; in these worlds ranks of a host are neighbours."""
    size = hvd.local_size()
    return [np.mean(vectors[first : first + size], axis=0) for first in range(0, len(vectors), size)]


def adaptive_sum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum as its paper defines it for two, in a tree; what is beyond a power of two is added to the first ones."""
    if len(vectors) == 1:
        return vectors[0]
    power = 1 << (len(vectors).bit_length() - 1)
    first = [adaptive_sum_of_two(a, b) for a, b in zip(vectors, vectors[power:], strict=False)]
    level = first + vectors[len(first) : power]
    while len(level) > 1:
        level = [adaptive_sum_of_two(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def adaptive_sum_of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot = float(a @ b)
    return (1 - dot / (2 * float(a @ a))) * a + (1 - dot / (2 * float(b @ b))) * b


def grouped_allreduce(hvd: Any, rank: int, size: int, dtype: str) -> None:
    # A float64 tensor among the others: two operations of the engine behind one call.
    kinds = (dtype, "float64", dtype)
    inputs = [[values(r, (4 + i,), kind, i) for r in range(size)] for i, kind in enumerate(kinds)]
    expected = [reduced(x, "Sum", kind) for x, kind in zip(inputs, kinds, strict=True)]

    def own() -> list[Any]:
        return [tensor(x[rank], kind) for x, kind in zip(inputs, kinds, strict=True)]

    in_place, in_place_async = own(), own()
    results = [
        hvd.grouped_allreduce(own(), op=hvd.Sum, name=f"a.{dtype}"),
        hvd.synchronize(hvd.grouped_allreduce_async(own(), op=hvd.Sum, name=f"a.{dtype}")),
        hvd.grouped_allreduce_(in_place, op=hvd.Sum, name=f"a.{dtype}"),
        hvd.synchronize(hvd.grouped_allreduce_async_(in_place_async, op=hvd.Sum, name=f"a.{dtype}")),
        in_place,
        in_place_async,
    ]
    for result in results:
        for found, wanted, kind in zip(result, expected, kinds, strict=True):
            assert found.dtype == dtype_of(kind)
            check(array(found), wanted, kind, f"grouped_allreduce {dtype}")
    if dtype == "bool":
        return
    for op in REDUCTIONS:
        for factors in (1.0, 1.0), *(FACTORS if op != "Product" else ()):
            options = {"op": getattr(hvd, op), "prescale_factor": factors[0], "postscale_factor": factors[1]}
            found = hvd.grouped_allreduce(own(), name=f"b.{dtype}.{op}", **options)
            for one, x, kind in zip(found, inputs, kinds, strict=True):
                wanted = reduced(x, op, kind, *factors)
                check(array(one), wanted, kind, f"grouped_allreduce {op} {factors} {kind}", rounding=True)


def compressed(hvd: Any, rank: int, size: int, dtype: str) -> None:
    if dtype == "bool":
        return
    inputs = [values(r, (2 * size + 1, 2), dtype) for r in range(size)]
    expected = reduced(inputs, "Sum", dtype)
    own = tensor(inputs[rank], dtype)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        options = {"op": hvd.Sum, "compression": compression, "name": f"{compression.__name__}.{dtype}"}
        both = hvd.grouped_allreduce([own, own], **options)
        parts = hvd.grouped_reducescatter([own, own], **options)
        for found in (hvd.allreduce(own, **options), *both):
            assert found.dtype == dtype_of(dtype)
            check(array(found), expected, dtype, f"allreduce {compression.__name__} {dtype}")
        for found in (hvd.reducescatter(own, **options), *parts):
            assert found.dtype == dtype_of(dtype)
            check(array(found), own_rows(expected, rank, size), dtype, f"reducescatter {compression.__name__} {dtype}")


def sparse_allreduce(hvd: Any, rank: int, size: int, dtype: str) -> None:
    if dtype in ("bool", "float16", "bfloat16", "uint16", "uint32", "uint64", *EIGHT_BIT_FLOATS):
        return  # torch itself can't coalesce all of them
    import torch

    def dense(r: int) -> np.ndarray:
        rows = values(r, (5, 2), dtype) * (np.arange(5) % 3 != r % 3)[:, None]
        return rows if r % 2 == 0 else rows * 0  # every second one has no entry at all

    everybody = [dense(r) for r in range(size)]
    for op in ("Sum", "Average") if is_floating(dtype) else ("Sum",):
        mine = tensor(everybody[rank], dtype).to_sparse(1)
        found = hvd.sparse_allreduce_async(mine, name=f"{dtype}.{op}", op=getattr(hvd, op))()
        assert found.is_sparse
        assert found.size() == (5, 2)
        assert found.dtype == getattr(torch, dtype)
        assert found._nnz() == sum(int(one.any(1).sum()) for one in everybody), "duplicates are left alone"
        check(array(found.to_dense()), reduced(everybody, op, dtype), dtype, f"sparse {op} {dtype}", op == "Average")


def allgather(hvd: Any, rank: int, size: int, dtype: str) -> None:
    for rows in (lambda r: 2, lambda r: r, lambda r: 0, lambda r: 400 * (r + 1)):
        for tail in ((), (3,), (0,)):
            inputs = [values(r, (rows(r), *tail), dtype) for r in range(size)]
            expected = np.concatenate(inputs)
            own = tensor(inputs[rank], dtype)
            check(array(hvd.allgather(own, name=f"{dtype}.{tail}")), expected, dtype, f"allgather {dtype} {tail}")
            handle = hvd.allgather_async(own, name=f"{dtype}.{tail}")
            check(array(hvd.synchronize(handle)), expected, dtype, f"allgather_async {dtype} {tail}")
            times = 1 if dtype == "bool" else 2
            both = hvd.grouped_allgather([own, tensor(inputs[rank] * times, dtype)], name=f"{dtype}.{tail}")
            check(array(both[0]), expected, dtype, f"grouped_allgather {dtype} {tail}")
            check(array(both[1]), expected * times, dtype, f"grouped_allgather {dtype}")


def broadcast(hvd: Any, rank: int, size: int, dtype: str) -> None:
    for root in range(size):
        root_rank = hvd.global_rank(root)
        for shape in SHAPES:
            what = f"broadcast {dtype} {shape} from {root}"
            expected = values(root, shape, dtype)
            mine = values(rank, shape, dtype)
            own = tensor(mine, dtype)
            name = f"{dtype}.{shape}.{root}"
            check(array(hvd.broadcast(own, root_rank, name=name)), expected, dtype, what)
            check(array(hvd.synchronize(hvd.broadcast_async(own, root_rank, name=name))), expected, dtype, what)
            check(array(own), mine, dtype, what + ": the input must not change")
            copy = own.clone()
            assert hvd.synchronize(hvd.broadcast_async_(copy, root_rank, name=name)) is copy
            check(array(copy), expected, dtype, what)
            assert hvd.broadcast_(own, root_rank, name=name) is own
            check(array(own), expected, dtype, what)


def alltoall(hvd: Any, rank: int, size: int, dtype: str) -> None:
    inputs = [values(r, (3 * size, 2), dtype) for r in range(size)]
    expected = np.concatenate([np.split(x, size)[rank] for x in inputs])
    found = hvd.alltoall(tensor(inputs[rank], dtype), name=f"even.{dtype}")
    check(array(found), expected, dtype, f"alltoall {dtype}")

    nothing = tensor(np.zeros((0, 2)), dtype)
    assert hvd.alltoall(nothing, name=f"nothing.{dtype}").shape == (0, 2)
    output, received = hvd.alltoall(tensor(inputs[rank], dtype), [0] * size, name=f"none.{dtype}")
    assert (output.shape, received.tolist()) == ((0, 2), [0] * size)

    rows = [sum(split_sizes(r, size)) + 1 for r in range(size)]  # the last row goes nowhere
    inputs = [values(r, (rows[r],), dtype) for r in range(size)]
    parts = [np.split(inputs[r], np.cumsum(split_sizes(r, size)))[rank] for r in range(size)]
    own, splits = tensor(inputs[rank], dtype), split_sizes(rank, size)
    as_tensor = exactly(np.array(splits, np.int32))
    for result in (
        hvd.alltoall(own, splits, name=dtype),
        hvd.alltoall(own, as_tensor, name=dtype),
        hvd.synchronize(hvd.alltoall_async(own, splits, name=dtype)),
    ):
        output, received = result
        check(array(output), np.concatenate(parts), dtype, f"alltoall {dtype} with splits")
        assert received.dtype == dtype_of("int32")
        assert received.tolist() == [len(part) for part in parts]


def reducescatter(hvd: Any, rank: int, size: int, dtype: str) -> None:
    for op in ("Sum",) if dtype == "bool" else ("Average", "Sum"):
        for shape in ((size, 2), (2 * size + 1,), (1, 3), (0,), (1031, 2)):
            what = f"reducescatter {op} {dtype} {shape}"
            inputs = [values(r, shape, dtype) for r in range(size)]
            expected = own_rows(reduced(inputs, op, dtype), rank, size)
            own, name, code = tensor(inputs[rank], dtype), f"{op}.{dtype}.{shape}", getattr(hvd, op)
            rounding = op == "Average"
            check(array(hvd.reducescatter(own, name=name, op=code)), expected, dtype, what, rounding)
            handle = hvd.reducescatter_async(own, name=name, op=code)
            check(array(hvd.synchronize(handle)), expected, dtype, what, rounding)
            for results in (
                hvd.grouped_reducescatter([own, own], name=name, op=code),
                hvd.synchronize(hvd.grouped_reducescatter_async([own, own], name=name, op=code)),
            ):
                for found in results:
                    check(array(found), expected, dtype, "grouped " + what, rounding)
            if dtype == "bool":
                continue
            for factors in FACTORS:
                wanted = own_rows(reduced(inputs, op, dtype, *factors), rank, size)
                options = {"op": code, "prescale_factor": factors[0], "postscale_factor": factors[1], "name": name}
                other = own.double()
                both = hvd.grouped_reducescatter([own, other], **options)
                assert both[1].dtype == other.dtype
                for found in (
                    hvd.reducescatter(own, **options),
                    hvd.synchronize(hvd.reducescatter_async(own, **options)),
                    both[0],
                ):
                    check(array(found), wanted, dtype, f"{what} {factors}", rounding=True)


OPERATIONS: dict[str, Callable[[Any, int, int, str], None]] = {
    function.__name__: function
    for function in (
        allreduce,
        allreduce_scaled,
        allreduce_wraps,
        adasum,
        grouped_allreduce,
        compressed,
        sparse_allreduce,
        allgather,
        broadcast,
        alltoall,
        reducescatter,
    )
}


class Calls:
    """horovod.torch for the members of a process set: what takes a set gets this one, ranks are places in it."""

    def __init__(self, process_set: Any) -> None:
        import horovod.torch

        self._module = horovod.torch
        self._set = process_set
        self.is_set = process_set is not self._module.global_process_set

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if inspect.isfunction(value) and "process_set" in inspect.signature(value).parameters:
            return functools.partial(value, process_set=self._set)
        return value

    def rank(self) -> Any:
        return self._set.rank()

    def size(self) -> Any:
        return self._set.size()

    def global_rank(self, place: int) -> Any:
        return self._set.ranks[place]


def run_case(operation: str, dtype: str) -> None:
    """Runs one cell of the matrix on this rank."""
    run_row(operation, [dtype])


def run_row(operation: str, dtypes: Sequence[str]) -> None:
    """Runs an operation with each of the dtypes on this rank."""
    import horovod.torch

    _run(Calls(horovod.torch.global_process_set), operation, dtypes)


def run_row_in_a_set(operation: str, dtypes: Sequence[str], ranks: list[int]) -> None:
    """The same in a process set, while the other ranks do something else."""
    import horovod.torch

    chosen = horovod.torch.add_process_set(ranks)
    if chosen.included():
        _run(Calls(chosen), operation, dtypes)
    horovod.torch.remove_process_set(chosen)


def _run(hvd: Calls, operation: str, dtypes: Sequence[str]) -> None:
    for dtype in dtypes:
        OPERATIONS[operation](hvd, hvd.rank(), hvd.size(), dtype)
