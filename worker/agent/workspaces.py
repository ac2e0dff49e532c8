"""Folders in which the lines of a job file run: one for each worker, deleted when the job is over on this host.

Logs lie in another folder (shim_job.py) and are kept.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Container, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

_FOLDER = "work"


class Workspaces:
    def __init__(self, state: Path) -> None:
        self._folder = state / _FOLDER

    def make(self, job: str, workers: int) -> list[Path]:
        """A new empty folder for each worker of this host."""
        folder = self._folder / quote(job, safe="")
        shutil.rmtree(folder, ignore_errors=True)
        folders = [folder / f"worker.{number}" for number in range(workers)]
        for one in folders:
            one.mkdir(mode=0o700, parents=True)
        return folders

    def add(self, job: str, names: Sequence[str]) -> tuple[list[Path], list[Path]]:
        """The folders with these names, and those of them that are new, and empty."""
        folders = [self._folder / quote(job, safe="") / name for name in names]
        new = [folder for folder in folders if not folder.exists()]
        for folder in new:
            folder.mkdir(mode=0o700, parents=True)
        return folders, new

    async def remove(self, job: str) -> None:
        """Removes the job's folders, because it is over on this host."""
        folder = self._folder / quote(job, safe="")
        if folder.exists():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def clear(self, running: Container[str]) -> None:
        """Deletes the folders that an earlier agent left of jobs that do not run any more."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if unquote(path.name) not in running:
                    shutil.rmtree(path, ignore_errors=True)
