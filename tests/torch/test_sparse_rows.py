"""What sparse_as_dense makes of a reduced gradient: the rows that are not zero, as Tensor.to_sparse finds them."""

from __future__ import annotations

import math

import pytest
import torch

from horovod.torch.sending import _to_sparse


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2), (0, 3), (5, 0)], ids=str)
def test_the_rows_that_are_not_zero(shape: tuple[int, ...]) -> None:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dense[::2] = 0.0
    for sparse_dim in range(1, len(shape) + 1):
        found = _to_sparse(dense, sparse_dim)
        assert (found.sparse_dim(), found.dense_dim()) == (sparse_dim, len(shape) - sparse_dim)
        assert found.is_coalesced()
        assert torch.equal(found.to_dense(), dense)
        if dense.numel():
            wanted = dense.to_sparse(sparse_dim)
            assert torch.equal(found.indices(), wanted.indices())
            assert torch.equal(found.values(), wanted.values())


def test_no_number_is_not_zero() -> None:
    dense = torch.zeros(3, 2)
    dense[1, 0], dense[2, 1] = math.nan, -0.0
    assert _to_sparse(dense, 1).indices().tolist() == [[1]]
