"""What is measured: an operation on a message of a size, or on a set of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLOAT_BYTES = 4
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
COLLECTIVES = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter", "barrier")
OWN = ("adasum",)  # only horovod has it
GRADIENT_SETS = ("resnet50", "small200")
GPU_GRADIENT_SETS = ("resnet50", "transformer350m")
OPERATIONS = (*COLLECTIVES, *OWN, *GRADIENT_SETS)
FEW_SIZES = {"adasum": (KIB, 64 * KIB, MIB, 16 * MIB)}  # instead of SIZES

# Beyond this an in-place sum that is repeated would leave what float32 holds exactly; see values.py.
_EXPONENTS = 96
_MOST_CALLS = 48


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `bytes` is the size of the tensor that all ranks see the same of, rounded up to whole elements for every rank: the
    buffer of allreduce and broadcast, what an allgather returns, what goes into an alltoall or a reducescatter; in a
    grouped allreduce of `tensors` equal ones, the size of each.
    """

    operation: str
    ranks: int
    bytes: int = 0
    tensors: int = 1

    @property
    def elements(self) -> list[int]:
        """Elements of each input tensor of a rank."""
        if self.operation == "barrier":
            return []
        if self.operation == "resnet50":
            return [math.prod(shape) for shape in resnet50_shapes()]
        if self.operation == "transformer350m":
            return [math.prod(shape) for shape in transformer350m_shapes()]
        if self.operation == "small200":
            return [64] * 200
        count = max(1, self.bytes // FLOAT_BYTES)
        if self.operation == "grouped":
            return [count] * self.tensors
        if self.operation in ("allreduce", "broadcast", *OWN):
            return [count]
        part = -(-count // self.ranks)
        return [part if self.operation == "allgather" else part * self.ranks]

    @property
    def result_elements(self) -> int:
        """How many values of the result of a rank there are to check."""
        total = sum(self.elements)
        if self.operation == "allgather":
            return total * self.ranks
        return total // self.ranks if self.operation == "reducescatter" else total

    @property
    def is_gradient_set(self) -> bool:
        return self.operation in (*GRADIENT_SETS, *GPU_GRADIENT_SETS)

    def is_known_to(self, library: str) -> bool:
        return self.operation not in OWN or library == "horovod"

    @property
    def label(self) -> str:
        if self.is_gradient_set:
            return f"{len(self.elements)} tensors, {size_text(sum(self.elements) * FLOAT_BYTES)}"
        return size_text(self.bytes) if self.elements else ""

    def most_calls(self) -> int:
        """How often an in-place sum can be repeated before its values are made anew."""
        n = self.ranks
        if self.operation == "adasum":  # equal tensors remain what they are
            return _MOST_CALLS
        if n & (n - 1) == 0:  # multiplying by n is exact
            return min(_MOST_CALLS, _EXPONENTS // max(1, n.bit_length() - 1))
        return max(1, int(math.log(2**24 / (n * 12_000), n)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cases(ranks: int, operations: tuple[str, ...], sizes: tuple[int, ...] | None) -> list[Case]:
    """`sizes`: None for those that each operation is usually measured at."""
    rows = []
    for operation in operations:
        if operation == "barrier" or Case(operation, ranks).is_gradient_set:
            rows.append(Case(operation, ranks))
        else:
            rows.extend(Case(operation, ranks, size) for size in sizes or FEW_SIZES.get(operation, SIZES))
    return rows


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50 (https://arxiv.org/abs/1512.03385, table 1), 25,557,032 elements."""

    def convolution(outputs: int, inputs: int, kernel: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # and its batch normalization

    shapes = convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, inputs, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer350m_shapes() -> list[tuple[int, ...]]:
    """The 292 parameters of GPT-2 medium (Radford et al., 2019, table 2), 354,823,168 elements."""
    width = 1024
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    layer = [*norm, (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *(24 * layer), *norm]


def size_text(size: int) -> str:
    for unit, name in ((MIB, "MB"), (KIB, "KB")):
        if size >= unit:
            return f"{size // unit if size % unit == 0 else size / unit:.4g} {name}"
    return f"{size} B"


def parse_size(text: str) -> int:
    """ "4", "16K", "256 MB" -> bytes; powers of 1024."""
    cleaned = text.strip().upper().removesuffix("B").strip()
    factor = {"K": KIB, "M": MIB}.get(cleaned[-1:], 1)
    try:
        size = int(cleaned.rstrip("KM").strip()) * factor
    except ValueError:
        size = 0
    if size < FLOAT_BYTES or size % FLOAT_BYTES:
        raise ValueError(f"{text!r} is no size: expected a multiple of 4 bytes such as 4, 16K or 256M.")
    return size


def parse_names(text: str, what: str, known: Sequence[str]) -> tuple[str, ...]:
    """ "allreduce,barrier" -> those names; ValueError for what is no `what`."""
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no {what}; there are {', '.join(known)}.")
    return names
