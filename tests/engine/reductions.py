"""Reductions of any kind, what each rank brings to them, and what must come out, to the last bit.

Inputs have wide exponents, so that any other order of summation, or a rounding in between, changes bits. The reference
is the definition: inputs are prescaled and rounded, then ranks are added (or multiplied) from left to right and the
result postscaled, float16 and bfloat16 in float32 with one rounding at the end; where some ranks of several hosts share
memory, first those of each host and then the hosts' (rounded) results. Over a sparse mesh the hosts' results, or in a
reducescatter the ranks' inputs, are added by a balanced tree, each of its sums rounded (collectives/sparse/balanced.h).
Adasum has no such reference: its dot products are sums of another order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from world import AVERAGE, DTYPES, PRODUCT, REDUCESCATTER, Member

from horovod._core import OpSpec


@dataclass(frozen=True)
class Op:
    name: str
    kind: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]  # several: a grouped operation
    reduce_op: int
    in_place: bool
    prescale: float = 1.0
    postscale: float = 1.0

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Op:
        return cls(**{**document, "shapes": tuple(tuple(shape) for shape in document["shapes"])})


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, to nearest even; for finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def inputs(op: Op, rank: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng([seed, rank, int(op.name.rsplit(".t", 1)[1])])
    arrays = []
    for shape in op.shapes:
        widest = 2 if op.reduce_op == PRODUCT else 8  # of five factors, float16 holds nearly all products
        exponents = random.integers(-widest, widest + 1, shape)
        values = np.ldexp(random.standard_normal(shape), exponents).astype(np.float32)
        arrays.append(to_bfloat16(values) if op.dtype == "bfloat16" else values.astype(op.dtype))
    return arrays


def combine(dtype: str, parts: list[np.ndarray], function: np.ufunc = np.add, factor: float = 1.0) -> np.ndarray:
    """From left to right, rounded once."""
    if len(parts) == 1 and factor == 1.0:
        return parts[0]
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    terms = [from_bfloat16(part) if dtype == "bfloat16" else part.astype(wide) for part in parts]
    total = functools.reduce(function, terms) * wide.type(factor)
    with np.errstate(over="ignore"):  # a few products
        return to_bfloat16(total) if dtype == "bfloat16" else total.astype(dtype)


def combine_balanced(dtype: str, parts: list[np.ndarray], function: np.ufunc, factor: float) -> np.ndarray:
    """Those behind the largest power of two are folded into the first ones; then neighbours are combined, until one is
    left. The factor goes to the last pair."""
    power = 1 << (len(parts).bit_length() - 1)
    level = [
        combine(dtype, [part, parts[power + i]], function) if power + i < len(parts) else part
        for i, part in enumerate(parts[:power])
    ]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [combine(dtype, list(pair), function, factor if len(level) == 2 else 1.0) for pair in pairs]
    return level[0]


def reference(op: Op, index: int, size: int, seed: int, hosts: Sequence[int] = (), sparse: bool = False) -> np.ndarray:
    """hosts: of the ranks, where some share memory. sparse: the order of a sparse mesh."""
    if sparse and op.kind == REDUCESCATTER:
        hosts = ()
    parts = [combine(op.dtype, [inputs(op, rank, seed)[index]], factor=op.prescale) for rank in range(size)]
    function = np.multiply if op.reduce_op == PRODUCT else np.add
    postscale = op.postscale / size if op.reduce_op == AVERAGE else op.postscale
    return combine_ranks(op.dtype, parts, hosts, sparse, function, postscale)


def combine_ranks(
    dtype: str,
    parts: list[np.ndarray],
    hosts: Sequence[int] = (),
    sparse: bool = False,
    function: np.ufunc = np.add,
    factor: float = 1.0,
) -> np.ndarray:
    """The ranks' parts in the order of their world."""
    by_host: dict[int, list[np.ndarray]] = {}
    for rank, part in enumerate(parts):
        by_host.setdefault(hosts[rank] if hosts else rank, []).append(part)
    of_hosts = [combine(dtype, on, function) for on in by_host.values()]
    if sparse and len(of_hosts) > 1:
        return combine_balanced(dtype, of_hosts, function, factor)
    return combine(dtype, of_hosts, function, factor)


def part_of(op: Op, whole: np.ndarray, size: int, rank: int) -> np.ndarray:
    """What of the reduced tensor a rank gets. Earlier ranks get one row more when rows do not divide evenly."""
    if op.kind != REDUCESCATTER:
        return whole
    base, extra = divmod(whole.shape[0], size)
    begin = rank * base + min(rank, extra)
    return whole[begin : begin + base + (rank < extra)]


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def submit(member: Member, op: Op, arrays: list[np.ndarray]) -> int:
    if op.kind == REDUCESCATTER:
        outputs: list[np.ndarray | None] = [None]
    else:
        outputs = [array if op.in_place else np.empty_like(array) for array in arrays]
    tensors = [
        (a.ctypes.data, 0 if o is None else o.ctypes.data, DTYPES[op.dtype], a.shape)
        for a, o in zip(arrays, outputs, strict=True)
    ]
    handle: int = member.engine.submit(
        OpSpec(op.kind, op=op.reduce_op, prescale=op.prescale, postscale=op.postscale), op.name, tensors
    )
    member._keep[handle] = (arrays, outputs)
    return handle
