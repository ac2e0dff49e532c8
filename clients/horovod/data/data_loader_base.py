"""The two classes of horovod.data: the base of all loaders, and the mixin that makes batches in the background.

class Loader(BaseDataLoader)                          batches are made when the training asks for them
class AsyncLoader(AsyncDataLoaderMixin, Loader)       batches are made ahead, by a thread of each iteration
"""

from __future__ import annotations

import numbers
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from horovod.base.errors import TrainingCode, coded
from horovod.data.prefetch import Prefetch

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]


class BaseDataLoader:
    """A source of batches that can be iterated over any number of times. Subclasses write `__len__` and `_iterate`.

    >>> class Batches(BaseDataLoader):
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def _iterate(self):
    ...         yield from (10, 20, 30)
    >>> list(Batches())
    [10, 20, 30]
    """

    def __len__(self) -> int:
        """How many batches one iteration has."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__, the number of batches.")

    def _iterate(self) -> Iterable[Any]:
        """One pass over the data: called once for each iteration, usually written as a generator of batches."""
        raise NotImplementedError(f"{type(self).__name__} must define _iterate, which yields batches.")

    def _process_batch(self, batch: Any) -> Any:
        """What the training gets for `batch`. Runs in the thread that iterates, also of an asynchronous loader."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Runs `_iterate` of the next base class in a thread, which makes batches ahead of the training.

    Comes first among the base classes:

        >>> class AsyncLoader(AsyncDataLoaderMixin, Loader): ...
        >>> loader = AsyncLoader(async_loader_queue_size=8, path="data")  # the rest goes to Loader.__init__

    Each iteration has a separate thread, which starts with the first batch and has ended when the iteration is over:
    after the last batch, an exception, `break` or `close_async_loader()`. An exception in `_iterate` is raised when
    the training asks for the batch that could not be made, after all batches before it.

    Args:
        async_loader_queue_size: the most batches that wait to be used, in addition to the batch that is being made.
            With 0, `_iterate` runs in the thread that iterates.
        debug_data_loader: report on stderr, at the end of each iteration, how long training and loader waited for
            each other.

    Raises:
        ValueError: a queue size that is no number, or below 0.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        is_number = isinstance(async_loader_queue_size, numbers.Integral)  # NumPy's integers as well
        if not is_number or async_loader_queue_size < 0:
            said = f"async_loader_queue_size must be a number from 0 on, not {async_loader_queue_size!r}."
            if not is_number:
                said += " It is the first argument, so pass the loader's own arguments by name."
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, said))
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._hvd_running: list[Prefetch] = []
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(AsyncDataLoaderMixin)]:
            if "__iter__" in vars(base) and not issubclass(base, AsyncDataLoaderMixin):
                warnings.warn(
                    f"{cls.__name__} makes its batches synchronously: {base.__name__}.__iter__ comes before that of "
                    f"AsyncDataLoaderMixin. Name the mixin first: class {cls.__name__}(AsyncDataLoaderMixin, ...).",
                    stacklevel=2,
                )
                return

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            for batch in self._iterate():  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        prefetch = Prefetch(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]
        self._hvd_running.append(prefetch)  # added before it starts, so that no close misses it
        try:
            for batch in prefetch:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            prefetch.close()
            self._hvd_running.remove(prefetch)
            if self.debug_data_loader:
                print(f"{type(self).__name__}: {prefetch.summary()}", file=sys.stderr, flush=True)

    def close_async_loader(self) -> None:
        """Ends all running iterations: they give no further batch. Waits for the batch that is being made.

        A later iteration starts from the beginning. Calling it twice, or without an iteration, does nothing.
        """
        for prefetch in self._hvd_running[:]:
            prefetch.close()
