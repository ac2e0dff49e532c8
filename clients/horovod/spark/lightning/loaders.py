"""What Lightning iterates over: a rank's batches as dicts of tensors by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.spark.common.batches import Batches
from horovod.spark.common.shapes import Shape, of_row
from horovod.spark.torch.tensors import as_tensor


class Loader(BaseDataLoader):
    """One iteration is the epoch that `epoch` tells. Floating numbers get `dtype`, whole ones of labels int64.

    shapes: of columns that are to have another one than they are stored with.
    """

    def __init__(
        self,
        batches: Batches,
        epoch: Callable[[], int],
        dtype: torch.dtype,
        shapes: Mapping[str, Shape],
        labels: Sequence[str],
    ) -> None:
        self._batches = batches
        self._epoch = epoch
        self._dtype = dtype
        self._shapes = shapes
        self._labels = labels

    def __len__(self) -> int:
        return self._batches.steps

    def _iterate(self) -> Iterator[dict[str, Any]]:
        for batch, _, _ in self._batches.of_epoch(self._epoch()):
            yield {name: self._tensor(name, array) for name, array in batch.items()}

    def _tensor(self, name: str, array: Any) -> Any:
        if array.dtype == object:
            return list(array)  # text
        tensor = as_tensor(array)
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        elif name in self._labels and tensor.dtype != torch.bool:
            tensor = tensor.long()
        shape = self._shapes.get(name)
        return tensor if shape is None else tensor.reshape(len(tensor), *of_row(shape))


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    """The same, made ahead by a thread."""
