"""What the processes of a training get of a store: paths, and two functions that bring their output to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass
class RemoteStore:
    """The store of one training, seen from its processes. Pickled for them, so all of it can be."""

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], AbstractContextManager[str]]  # with get_local_output_dir() as folder: ...
    sync: Callable[[str], None]  # sync(folder) brings what has changed in a local folder to run_path
    storage_options: dict[str, Any]  # what ParquetReader needs to read the data paths, beside the paths
