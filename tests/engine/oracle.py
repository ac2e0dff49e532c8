"""What NumPy makes of the same inputs."""

from __future__ import annotations

import numpy as np
from world import AVERAGE, MAX, MIN, PRODUCT, SUM


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """Small whole numbers, so that every order of summation is exact in every dtype."""
    random = np.random.default_rng(1000 * rank + count)
    return random.integers(0, 2 if dtype == "bool" else 4, count).astype(dtype)


def reduced(arrays: list[np.ndarray], op: int) -> np.ndarray:
    if arrays[0].dtype == bool:
        return np.any(arrays, axis=0) if op in (SUM, MAX) else np.all(arrays, axis=0)
    if op in (SUM, AVERAGE):
        total = np.add.reduce(arrays, dtype=arrays[0].dtype)
        return total if op == SUM else (total.astype(np.float64) / len(arrays)).astype(total.dtype)
    return {MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}[op].reduce(arrays, dtype=arrays[0].dtype)


def assert_allreduced(got: np.ndarray, arrays: list[np.ndarray], op: int) -> None:
    """Exact but for averages of floating numbers, which may be rounded once more."""
    expected = reduced(arrays, op)
    if op == AVERAGE and np.issubdtype(got.dtype, np.floating):
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=2e-3)
    else:
        np.testing.assert_array_equal(got, expected)
