"""Adasum by its definition: a binary tree over the ranks, coefficients of each tensor by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def adasum_of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ab, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    return (1 - ab / (2 * aa) if aa else 1.0) * a + (1 - ab / (2 * bb) if bb else 1.0) * b


def adasum(vectors: Sequence[np.ndarray]) -> np.ndarray:
    level = list(vectors)
    power = 1 << (len(level).bit_length() - 1)
    for rank in range(power, len(level)):
        level[rank - power] = adasum_of_two(level[rank - power], level[rank])
    del level[power:]
    while len(level) > 1:
        level = [adasum_of_two(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def gradient(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank * 77 + count).standard_normal(count)
