"""The op matrix as tables: what each collective gets on each rank and what NumPy says must come out.

A case is (operation, dtype). Inputs are small whole numbers, so that every dtype computes sums and products exactly and
the oracle can work in float64; a result is compared bit for bit, except that averages of the half types may be off by
one rounding. A new collective is one function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
REDUCTIONS = ("Average", "Sum", "Min", "Max", "Product")
SHAPES = ((), (1,), (0, 3), (5, 3), (1031,))


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """This rank's input, as float64; every rank can compute every other's."""
    generator = np.random.default_rng([seed, rank, *shape])
    low, high = {"bool": (0, 2), "uint8": (0, 4)}.get(dtype, (-3, 4))
    return generator.integers(low, high, size=shape).astype(np.float64)


def tensor(array: np.ndarray, dtype: str) -> Any:
    import torch

    return torch.from_numpy(array.copy()).to(getattr(torch, dtype))


def array(result: Any) -> np.ndarray:
    import torch

    found: np.ndarray = result.to(torch.float64).numpy()
    return found


def is_floating(dtype: str) -> bool:
    return "float" in dtype


def reduced(inputs: list[np.ndarray], op: str, dtype: str, prescale: float = 1.0, postscale: float = 1.0) -> np.ndarray:
    """postscale * REDUCE(prescale * x); integers are cut toward zero after each multiplication and wrap."""

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
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0, err_msg=what)


# -- what a rank does in each case: run here, compared here ------------------------------------------------------------
def allreduce(rank: int, size: int, dtype: str) -> None:
    import horovod.torch as hvd

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


def allreduce_scaled(rank: int, size: int, dtype: str) -> None:
    import horovod.torch as hvd

    if dtype == "bool":
        return
    for prescale, postscale in ((0.5, 1.0), (1.0, 0.5), (2.0, 0.25)):
        for op in ("Average", "Sum", "Max"):
            inputs = [values(r, (64,), dtype) for r in range(size)]
            expected = reduced(inputs, op, dtype, prescale, postscale)
            found = hvd.allreduce(
                tensor(inputs[rank], dtype),
                op=getattr(hvd, op),
                prescale_factor=prescale,
                postscale_factor=postscale,
                name=f"scaled.{op}.{dtype}.{prescale}",
            )
            check(array(found), expected, dtype, f"{op} {dtype} {prescale} {postscale}", rounding=True)


def grouped_allreduce(rank: int, size: int, dtype: str) -> None:
    import torch

    import horovod.torch as hvd

    # A float64 tensor among the others: two operations of the engine behind one call.
    kinds = (dtype, "float64", dtype)
    inputs = [[values(r, (4 + i,), kind, i) for r in range(size)] for i, kind in enumerate(kinds)]
    expected = [reduced(x, "Sum", kind) for x, kind in zip(inputs, kinds, strict=True)]

    def own() -> list[torch.Tensor]:
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
            assert found.dtype == getattr(torch, kind)
            check(array(found), wanted, kind, f"grouped_allreduce {dtype}")


def allgather(rank: int, size: int, dtype: str) -> None:
    import horovod.torch as hvd

    for rows in (lambda r: 2, lambda r: r, lambda r: 0, lambda r: 400 * (r + 1)):
        for tail in ((), (3,), (0,)):
            inputs = [values(r, (rows(r), *tail), dtype) for r in range(size)]
            expected = np.concatenate(inputs)
            own = tensor(inputs[rank], dtype)
            check(array(hvd.allgather(own, name=f"{dtype}.{tail}")), expected, dtype, f"allgather {dtype} {tail}")
            handle = hvd.allgather_async(own, name=f"{dtype}.{tail}")
            check(array(hvd.synchronize(handle)), expected, dtype, f"allgather_async {dtype} {tail}")
            both = hvd.grouped_allgather([own, own + own if dtype != "bool" else own], name=f"{dtype}.{tail}")
            check(array(both[0]), expected, dtype, f"grouped_allgather {dtype} {tail}")
            check(array(both[1]), expected if dtype == "bool" else expected * 2, dtype, f"grouped_allgather {dtype}")


def broadcast(rank: int, size: int, dtype: str) -> None:
    import horovod.torch as hvd

    for root in range(size):
        for shape in SHAPES:
            what = f"broadcast {dtype} {shape} from {root}"
            expected = values(root, shape, dtype)
            mine = values(rank, shape, dtype)
            own = tensor(mine, dtype)
            name = f"{dtype}.{shape}.{root}"
            check(array(hvd.broadcast(own, root, name=name)), expected, dtype, what)
            check(array(hvd.synchronize(hvd.broadcast_async(own, root, name=name))), expected, dtype, what)
            check(array(own), mine, dtype, what + ": the input must not change")
            copy = own.clone()
            assert hvd.synchronize(hvd.broadcast_async_(copy, root, name=name)) is copy
            check(array(copy), expected, dtype, what)
            assert hvd.broadcast_(own, root, name=name) is own
            check(array(own), expected, dtype, what)


def alltoall(rank: int, size: int, dtype: str) -> None:
    import torch

    import horovod.torch as hvd

    inputs = [values(r, (3 * size, 2), dtype) for r in range(size)]
    expected = np.concatenate([np.split(x, size)[rank] for x in inputs])
    found = hvd.alltoall(tensor(inputs[rank], dtype), name=f"even.{dtype}")
    check(array(found), expected, dtype, f"alltoall {dtype}")

    rows = [sum(split_sizes(r, size)) + 1 for r in range(size)]  # the last row goes nowhere
    inputs = [values(r, (rows[r],), dtype) for r in range(size)]
    parts = [np.split(inputs[r], np.cumsum(split_sizes(r, size)))[rank] for r in range(size)]
    own, splits = tensor(inputs[rank], dtype), split_sizes(rank, size)
    as_tensor = torch.tensor(splits, dtype=torch.int32)
    for result in (
        hvd.alltoall(own, splits, name=dtype),
        hvd.alltoall(own, as_tensor, name=dtype),
        hvd.synchronize(hvd.alltoall_async(own, splits, name=dtype)),
    ):
        output, received = result
        check(array(output), np.concatenate(parts), dtype, f"alltoall {dtype} with splits")
        assert received.dtype == torch.int32
        assert received.tolist() == [len(part) for part in parts]


def reducescatter(rank: int, size: int, dtype: str) -> None:
    import horovod.torch as hvd

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


OPERATIONS: dict[str, Callable[[int, int, str], None]] = {
    function.__name__: function
    for function in (allreduce, allreduce_scaled, grouped_allreduce, allgather, broadcast, alltoall, reducescatter)
}


def run_case(operation: str, dtype: str) -> None:
    """Runs one cell of the matrix on this rank."""
    import horovod.torch as hvd

    OPERATIONS[operation](hvd.rank(), hvd.size(), dtype)
