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
"""

from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
