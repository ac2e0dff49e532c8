"""Which prepared data lie where in a store.

Each fit has a number of its own while it runs, so that fits beside each other do not write into the same folders. Its
data stay when it is over: the next fit with the same DataFrame uses them again, and any other one may overwrite them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


class Properties(NamedTuple):
    """The facts about prepared data that get_dataset_properties returns."""

    train_rows: int
    val_rows: int
    metadata: dict[str, dict[str, Any]]
    avg_row_size: float


class Key(NamedTuple):
    """Data are the same if the DataFrame, which can't change, is the same object, and store and share are equal."""

    df: Any
    train_path: str
    val_path: str
    validation: Any

    def __hash__(self) -> int:
        return hash((id(self.df), *self[1:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.df is other.df and self[1:] == other[1:]

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass
class Dataset:
    """The data of a number. settings: all else that decides how they look; users: fits that run with them now."""

    key: Key
    settings: Mapping[str, Any]
    properties: Properties | None = None
    users: int = 0


class TrainingCache:
    """Numbers for prepared data, from 0 on; thread-safe."""

    def __init__(self) -> None:
        self._key_to_dataset: dict[Key, int] = {}
        self._datasets: dict[int, Dataset] = {}
        self._changed = threading.Condition()  # guards all of it

    def create_key(self, df: Any, store: Any, validation: Any) -> Key:
        """The key that tells these data from others."""
        return Key(df, store.get_train_data_path(), store.get_val_data_path(), validation)

    def is_cached(self, key: Key, store: Any) -> bool:
        """Whether the data were prepared and are in the store."""
        with self._changed:
            number = self._key_to_dataset.get(key)
            ready = number is not None and self._datasets[number].properties is not None
        if not ready or not store.is_parquet_dataset(store.get_train_data_path(number)):
            return False
        return not key.validation or bool(store.is_parquet_dataset(store.get_val_data_path(number)))

    def get_dataset(self, key: Key) -> int | None:
        """The number of these data."""
        with self._changed:
            return self._key_to_dataset.get(key)

    def properties(self, number: int) -> Properties:
        """KeyError for a number under which nothing was prepared."""
        with self._changed:
            found = self._datasets[number].properties
        if found is None:
            raise KeyError(number)
        return found

    @contextmanager
    def use(
        self, key: Key, settings: Mapping[str, Any], store: Any, make: Callable[[int], Properties]
    ) -> Iterator[int]:
        """The number of these data while the block runs; `make` prepares them where they are not there yet.

        A second fit with the same data waits until the first has made them.
        """
        number, is_maker = self._take(key, settings, store)
        try:
            if is_maker:
                properties = make(number)
                with self._changed:
                    self._datasets[number].properties = properties
                    self._changed.notify_all()
            yield number
        finally:
            with self._changed:
                dataset = self._datasets[number]
                dataset.users -= 1
                if dataset.properties is None:  # making them failed: the next one tries again
                    self._forget(number)
                self._changed.notify_all()

    def _take(self, key: Key, settings: Mapping[str, Any], store: Any) -> tuple[int, bool]:
        is_there = self.is_cached(key, store)
        with self._changed:
            while (number := self._key_to_dataset.get(key)) is not None:
                dataset = self._datasets[number]
                if dataset.settings == settings and (dataset.users or is_there):
                    if dataset.properties is not None:
                        dataset.users += 1
                        return number, False
                    self._changed.wait()  # for the fit that makes them; ends with properties or without the entry
                elif dataset.users:
                    break  # the same DataFrame is being used with other columns: beside it
                else:
                    self._forget(number)
            number = next(one for one in range(len(self._datasets) + 1) if not self._is_used(one))
            self._forget(number)
            self._datasets[number] = Dataset(key, settings, users=1)
            self._key_to_dataset[key] = number
            return number, True

    def _is_used(self, number: int) -> bool:
        return number in self._datasets and self._datasets[number].users > 0

    def _forget(self, number: int) -> None:
        dataset = self._datasets.pop(number, None)
        if dataset is not None and self._key_to_dataset.get(dataset.key) == number:
            del self._key_to_dataset[dataset.key]

    def clear(self) -> None:
        """Forgets all data that no fit uses now."""
        with self._changed:
            for number in [one for one in self._datasets if not self._is_used(one)]:
                self._forget(number)
