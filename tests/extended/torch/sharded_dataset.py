"""Run by horovodrun: a dataset that shares itself out among ranks and their workers, read by every kind of worker."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import horovod.torch as hvd

ITEMS, WORKERS = 12, 2


class Shared(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        ranks, rank = (hvd.size(), hvd.rank()) if hvd.is_initialized() else (1, 0)
        return iter(range(rank * WORKERS + info.id, ITEMS, ranks * WORKERS))


def main() -> None:
    hvd.init()
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Shared(), batch_size=None, num_workers=WORKERS, multiprocessing_context=method)
        read = hvd.allgather_object([int(item) for item in loader])
        if hvd.rank() == 0:
            print(method, sorted(functools.reduce(operator.iadd, read, [])), flush=True)


if __name__ == "__main__":
    main()
