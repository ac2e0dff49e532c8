"""Inputs that tell ranks and positions apart, and what must come out of them, exactly.

Element j of rank r is (1 + j mod 8191) + 1000 r, times 2^-60. The period is a prime, so that a chunk which lands in a
wrong place shows, and everything is a small whole number times a power of two, so that float32 sums are exact in any
order. An in-place sum that is repeated multiplies by the number of ranks each time, which stays exact for powers of
two: Case says for how long. Adasum rounds; it is compared with its definition in float64, to within what float32 can
hold. Repeated in place it changes nothing more: of equal tensors it makes the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.cases import Case

_PERIOD = 8191
_SCALE = 2.0**-60
_RANK_STEP = 1000.0
_ROWS_AT_ONCE = 512
UNSET = -1.0
# Each of the few steps rounds two products and a sum by 2^-24, of terms a few times as large as the result.
_ADASUM_TOLERANCE = 2.0**-20


class WrongValuesError(Exception):
    """The sentence says where and what."""


def fill(case: Case, rank: int, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        _spread(tensor, _tile(index, 1.0, _RANK_STEP * rank))


def check(case: Case, rank: int, calls: int, results: Sequence[torch.Tensor]) -> int:
    """Compares every value of the results after `calls` calls on filled inputs; returns how many were compared.

    Raises:
        WrongValuesError: a value differs, or there are not as many as there should be.
    """
    n = case.ranks
    ranks_sum = _RANK_STEP * n * (n - 1) / 2
    checked = 0
    for index, result in enumerate(results):
        flat = result.reshape(-1)
        if case.operation == "broadcast":
            checked += _compare(flat, checked, _tile(index, 1.0, 0.0))
        elif case.operation == "adasum":
            checked += _compare(flat, checked, _adasum_tile(n, flat.numel()), _ADASUM_TOLERANCE)
        elif case.operation == "allgather":
            for source, part in enumerate(flat.chunk(n)):
                checked += _compare(part, checked, _tile(0, 1.0, _RANK_STEP * source))
        elif case.operation == "alltoall":
            for source, part in enumerate(flat.chunk(n)):
                checked += _compare(part, checked, _tile(rank * part.numel(), 1.0, _RANK_STEP * source))
        elif case.operation == "reducescatter":
            checked += _compare(flat, checked, _tile(rank * flat.numel(), n, ranks_sum))
        else:
            factor = float(n) ** (calls - 1)
            checked += _compare(flat, checked, _tile(index, n * factor, ranks_sum * factor))
    if checked != case.result_elements:
        raise WrongValuesError(f"{checked} values came out of {case.operation}, not {case.result_elements}")
    return checked


def _adasum_tile(ranks: int, count: int) -> torch.Tensor:
    """The tree of docs/algorithms.md over one period of all inputs; a weight is how often an element is there."""
    weights = count // _PERIOD + (torch.arange(_PERIOD) < count % _PERIOD).double()

    def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ab, aa, bb = ((weights * x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
        return (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b

    level = [_tile(0, 1.0, _RANK_STEP * rank).double() for rank in range(ranks)]
    power = 1 << (ranks.bit_length() - 1)
    for rank in range(power, ranks):
        level[rank - power] = combine(level[rank - power], level[rank])
    del level[power:]
    while len(level) > 1:
        level = [combine(level[at], level[at + 1]) for at in range(0, len(level), 2)]
    return level[0].float()


def _tile(first: int, factor: float, addend: float) -> torch.Tensor:
    base = 1.0 + torch.arange(_PERIOD, dtype=torch.float64).roll(-(first % _PERIOD))
    return ((base * factor + addend) * _SCALE).to(torch.float32)


def _spread(tensor: torch.Tensor, tile: torch.Tensor) -> None:
    flat, tile = tensor.view(-1), tile.to(tensor.device)
    whole = flat.numel() // _PERIOD
    flat[: whole * _PERIOD].view(whole, _PERIOD).copy_(tile.expand(whole, _PERIOD))
    flat[whole * _PERIOD :].copy_(tile[: flat.numel() - whole * _PERIOD])


def _compare(flat: torch.Tensor, before: int, tile: torch.Tensor, tolerance: float = 0.0) -> int:
    """Bit for bit, or to within `tolerance` times what it should be."""
    step, tile = _ROWS_AT_ONCE * _PERIOD, tile.to(flat.device)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        whole = part.numel() // _PERIOD
        rows, rest = part[: whole * _PERIOD].view(whole, _PERIOD), part[whole * _PERIOD :]
        if not bool(_equal(rows, tile, tolerance).all() & _equal(rest, tile[: rest.numel()], tolerance).all()):
            wanted = tile.repeat(whole + 1)[: part.numel()]
            place = int(_equal(part, wanted, tolerance).logical_not().nonzero()[0])
            raise WrongValuesError(
                f"element {before + start + place} is {float(part[place]) / _SCALE:g}, "
                f"not {float(wanted[place]) / _SCALE:g} (both times 2^-60)"
            )
    return flat.numel()


def _equal(values: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> torch.Tensor:
    return values == wanted if tolerance == 0.0 else (values - wanted).abs() <= tolerance * wanted.abs()
