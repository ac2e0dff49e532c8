"""Data loaders whose batches are made in the background, while the training computes on earlier ones.

>>> from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
>>> class Batches(BaseDataLoader):
...     def __len__(self):
...         return 3
...     def _iterate(self):
...         yield from (10, 20, 30)
>>> class AsyncBatches(AsyncDataLoaderMixin, Batches): ...
>>> list(AsyncBatches(async_loader_queue_size=2))
[10, 20, 30]

It needs no framework and no world: batches may be anything.

ParquetReader reads Parquet files, each rank its part of the rows, and needs pyarrow and fsspec (docs/data.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horovod.base.errors import DataCode, coded
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

if TYPE_CHECKING:
    from horovod.data.parquet.reader import ParquetReader as ParquetReader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader", "ParquetReader"]


def __getattr__(name: str) -> Any:
    # Loaders of the script's own need none of the packages that read Parquet.
    if name != "ParquetReader":
        raise AttributeError(f"module 'horovod.data' has no attribute {name!r}")
    try:
        return importlib.import_module("horovod.data.parquet.reader").ParquetReader
    except ModuleNotFoundError as error:
        if error.name not in ("fsspec", "numpy", "pyarrow"):
            raise
        sentence = f"horovod.data.ParquetReader needs {error.name}, which is not installed. pip install pyarrow fsspec"
        raise ImportError(coded(DataCode.MISSING_DATA_PACKAGE, sentence)) from error
