"""ElasticSampler: a DistributedSampler that knows what of an epoch is done, so that other ranks can do the rest."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from horovod.common.basics import is_initialized, rank, size

__all__ = ["ElasticSampler"]

log = logging.getLogger(__name__)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the indices of a dataset out to the ranks, in each epoch once, also when ranks change in the middle of it.

    Every rank gets equally many: the last ones are given out twice where the ranks do not divide what is left. Give it
    to `TorchState`, which keeps it equal on all ranks. Example, on two ranks:

        >>> sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
        >>> list(sampler)
        [0, 2, 4]  # on rank 0; [1, 3, 0] on rank 1
        >>> sampler.record_batch(0, batch_size=1)
        >>> sampler.reset()
        >>> list(sampler)
        [2, 4]  # on rank 0; [3, 2] on rank 1

    Args:
        dataset: anything with a length.
        shuffle: whether each epoch has a different order, the same on all ranks.
        seed: the seed of that order.

    Attributes:
        epoch: the number that `set_epoch` was given last.
        processed_num: samples, of all ranks together, that were recorded since then; only `set_epoch` sets it to 0.
        num_replicas, rank: of the world, as of the last `reset`.
        remaining_indices: the samples of the epoch that are left for all ranks, in order.
        num_samples, total_size: the number of samples left for this rank, and for all ranks with repeated samples.
        processed_indices: always empty; scripts for old versions of Horovod read it.

    Raises ValueError before hvd.init().
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.processed_indices: set[int] = set()
        # Samples of processed_num that belong to earlier passes over the data, without set_epoch.
        self._processed_before = 0
        self._last_batch = 0  # samples of this rank in the batch that was recorded last
        self._is_resumed = False  # whether the progress was loaded, and nothing has been dealt out since
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins epoch number `epoch`, with nothing of it done. Call it at the end of the epoch before.

        Don't call it at the start of an epoch: after a failure it would discard which samples of the epoch are done,
        and you get a warning. Without any call, each epoch has the order of the first, also with a warning.
        """
        if self._is_resumed and epoch == self.epoch and 0 < self._done < len(self.dataset):
            log.warning(
                "ElasticSampler.set_epoch(%d) discards that %d of the %d samples of this epoch are done, so "
                "they are trained on again. Call it at the end of the previous epoch.",
                epoch,
                self._done,
                len(self.dataset),
            )
        self.epoch = epoch
        self.processed_num = self._processed_before = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has trained on `batch_size` more samples.

        Args:
            batch_idx: not needed.
            batch_size: samples on this rank, the same on the others.
        """
        self.processed_num += batch_size * self.num_replicas
        self._last_batch = batch_size

    def state_dict(self) -> dict[str, Any]:
        """The progress: {"epoch": ..., "processed_num": ...}.

        After a whole pass without `set_epoch`, "processed_before" says how much of it is of earlier passes.
        """
        progress = {"epoch": self.epoch, "processed_num": self.processed_num}
        return progress | ({"processed_before": self._processed_before} if self._processed_before else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the progress over and deals out what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._processed_before = state_dict.get("processed_before", 0)
        self.reset()
        self._is_resumed = True

    def reset(self) -> None:
        """Deals out what is left of the epoch to the ranks of the current world. ValueError before hvd.init()."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        if self._processed_before and self._done >= len(self.dataset):
            self._processed_before = self.processed_num  # another pass has begun without set_epoch
        self.remaining_indices = indices[self._done :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._end = self.processed_num + self.total_size
        self._is_dealt_out = self._is_resumed = False

    def __iter__(self) -> Iterator[int]:
        if is_initialized() and (rank(), size()) != (self.rank, self.num_replicas):
            log.warning("An ElasticSampler was dealt out to another world. Give it to hvd.elastic.TorchState.")
            self.reset()
        elif self._is_dealt_out and self._is_over():
            log.warning(
                "Epoch %d of an ElasticSampler is over and starts again, in the same order. Call set_epoch() "
                "at the end of each epoch.",
                self.epoch,
            )
            self._processed_before = self.processed_num
            self.reset()
        elif not self._is_dealt_out and self._done >= len(self.dataset) > 0:
            log.warning(
                "Epoch %d of an ElasticSampler was over when this world began, so it has no samples now. This "
                "skips an epoch if set_epoch() was not called at the end of the one before. Call it at the "
                "end of each epoch.",
                self.epoch,
            )
        self._is_dealt_out, self._is_resumed = True, False
        remaining = self.remaining_indices
        # Modulo, because there may be fewer left than ranks.
        return iter([remaining[i % len(remaining)] for i in range(self.rank, self.total_size, self.num_replicas)])

    @property
    def _done(self) -> int:
        """Samples of all ranks that were recorded in this pass over the data."""
        return self.processed_num - self._processed_before

    def _is_over(self) -> bool:
        """Whether nothing is left but less than a batch, which a DataLoader with drop_last leaves."""
        next_end = self.processed_num + self._last_batch * self.num_replicas
        return self._done > 0 and (self._done >= len(self.dataset) or next_end > self._end)

    def __len__(self) -> int:
        return self.num_samples
