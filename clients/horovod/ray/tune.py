"""`horovod.ray.tune`: trials of Ray Tune, each of which is a world of several ranks.

    from horovod.ray import tune as hvd_tune

    def train(config):  # on each rank
        hvd.init()
        ...
        hvd_tune.report({"loss": loss}, checkpoint=folder)  # as ray.tune.report, which calls it

    ray.tune.Tuner(hvd_tune.trainable(train, num_workers=2), param_space={"lr": ray.tune.loguniform(1e-4, 1e-1)}).fit()

A trial has a RayExecutor in its placement group, and so a coordinator of its own. It is a class for Tune and not a
function, since Tune asks an object to end: a trial that a scheduler stops ends its workers before it ends itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import ray.tune
from ray.exceptions import RayActorError
from ray.tune.result import DEFAULT_METRIC, DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from horovod.base.errors import LaunchCode, SettingCode, coded
from horovod.base.settings import ROWS
from horovod.base.tokens import is_own_folder
from horovod.launch.job_environment import of_driver
from horovod.ray.calls import queue_here
from horovod.ray.checks import check_callable
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import enter

Train = Callable[[dict[str, Any]], Any]
Files = dict[str, bytes]  # of a checkpoint, by their paths below its folder
_END_S = 60.0  # for a thread that waits for processes which were killed


# -- in the driver -----------------------------------------------------------------------------------------------------


def trainable(
    train: Train,
    num_workers: int,
    cpus_per_worker: int = 1,
    use_gpu: bool = False,
    gpus_per_worker: int | None = None,
    settings: Any = None,
    resources_per_worker: Mapping[str, float] | None = None,
) -> Any:
    """A Trainable for ray.tune.Tuner, each of whose trials calls `train(config)` on `num_workers` ranks.

        >>> tuner = ray.tune.Tuner(trainable(train, num_workers=2), param_space={"lr": ray.tune.choice([0.1, 0.01])})

    train: a function of the trial's config. num_workers: the ranks of each trial.
    cpus_per_worker, use_gpu, gpus_per_worker, resources_per_worker, settings: as of RayExecutor; Tune reserves them for
    each trial. A dict that rank 0's `train` returns is a last result, and a number is one by the name "_metric", as for
    functions of Tune. Settings of the environment (HOROVOD_*) are those of the process that calls this.
    """
    check_callable("train", train)
    given = RayExecutor.create_settings() if settings is None else settings
    workers: dict[str, Any] = {
        "num_workers": num_workers,
        "cpus_per_worker": cpus_per_worker,
        "use_gpu": use_gpu,
        "gpus_per_worker": gpus_per_worker,
        "resources_per_worker": resources_per_worker,
    }
    bundle = RayExecutor(given, **workers).params.bundle()  # wrong arguments are told here, and not by each trial
    made_with = _Made(train, given, workers, of_driver(os.environ))
    made = type(getattr(train, "__name__", "train"), (_Trial,), {"made_with": made_with})
    # The trial itself takes nothing: it waits for its workers.
    return ray.tune.with_resources(made, ray.tune.PlacementGroupFactory([{}, *[bundle] * num_workers]))


# -- on ranks ----------------------------------------------------------------------------------------------------------


def report(metrics: Mapping[str, Any], checkpoint: str | os.PathLike[str] | ray.tune.Checkpoint | None = None) -> None:
    """A result of the trial. All ranks may call it, and the result of rank 0 counts.

    metrics: values that Tune compares, by name. checkpoint: a folder, whose files travel to the trial, or a Checkpoint.
    It may be removed when this returns.

    Returns when Tune has taken the result before: a trial that is to be stopped does not run ahead.
    """
    rank = _here("report")
    if rank.queue is not None:
        with contextlib.suppress(RayActorError):  # the trial ends, and this process with it
            rank.queue.put((dict(metrics), None if checkpoint is None else _files(checkpoint)))


def get_checkpoint() -> ray.tune.Checkpoint | None:
    """The checkpoint from which this trial goes on, on every rank; None: it begins. It exists until `train` ends."""
    rank = _here("get_checkpoint")
    if rank.files is None:
        return None
    if rank.folder is None:
        rank.folder = _OwnFolder()
        _write(rank.files, Path(rank.folder.name))
    return ray.tune.Checkpoint.from_directory(rank.folder.name)


@dataclass
class _Rank:
    """The state of `report` and `get_checkpoint` in this process."""

    queue: Any  # None but on rank 0
    files: Files | None  # of the checkpoint to go on from
    folder: _OwnFolder | None = None


_rank: _Rank | None = None


class _Session:
    """The session that ray.tune.report() and ray.tune.get_checkpoint() ask. Without one they would only warn, and the
    trial would have no results.
    """

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **_: Any) -> None:
        report(metrics, checkpoint)

    @property
    def loaded_checkpoint(self) -> ray.tune.Checkpoint | None:
        return get_checkpoint()

    def __getattr__(self, name: str) -> None:
        """All else is unknown, as it is outside of a trial."""


def _here(function: str) -> _Rank:
    if _rank is None:
        sentence = f"horovod.ray.tune.{function}() was called outside of a trial of horovod.ray.tune.trainable()."
        raise RuntimeError(coded(LaunchCode.WORKERS_NOT_STARTED, sentence))
    return _rank


def _on_rank(train: Train, config: dict[str, Any], queue: Any, files: Files | None) -> None:
    global _rank
    _rank = _Rank(queue if os.environ[ROWS["rank"].env] == "0" else None, files)
    of_ray: Any = sys.modules.get("ray.train._internal.session")  # of which ray.tune is made, in Ray 2.60
    if of_ray is not None:
        of_ray._session = _Session()
    try:
        returned = train(config)
        if _rank.queue is not None and returned is not None:
            report(_last_result(returned))
    finally:
        if of_ray is not None:
            of_ray._session = None
        if _rank.folder is not None:
            _rank.folder.cleanup()
        _rank = None


def _last_result(returned: Any) -> Mapping[str, Any]:
    """The last result of a trial, from the value that `train` returned: Tune takes the same values of functions."""
    if isinstance(returned, Mapping):
        return returned
    if isinstance(returned, Number):
        return {DEFAULT_METRIC: returned}
    kind = "is a generator" if inspect.isgenerator(returned) else f"has returned {type(returned).__name__}"
    sentence = (
        f"The function of a trial {kind}. It must return a dict of metrics, a number or None. "
        "horovod.ray.tune.report() tells results in between."
    )
    raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))


# -- in the process of a trial -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """The arguments of `trainable`, and the environment in which it was called."""

    train: Train
    settings: Any
    workers: dict[str, Any]
    environ: dict[str, str]


class _Trial(ray.tune.Trainable):
    """Tune calls these methods one after the other. Workers run from the first step on."""

    made_with: _Made

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config
        self._run: _Run | None = None
        self._checkpoint: Files | None = None  # the last one that was reported, or the one to go on from
        self._metrics: dict[str, Any] = {}

    def step(self) -> dict[str, Any]:
        if self._run is None:
            self._run = _Run(self.made_with, self._config, self._checkpoint)
        told = self._run.next_report()
        if told is None:
            return {**self._metrics, DONE: True, RESULT_DUPLICATE: True}
        self._metrics, files = told
        if files is None:
            return dict(self._metrics)
        self._checkpoint = files
        return {**self._metrics, SHOULD_CHECKPOINT: True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        _write(self._checkpoint or {}, Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        self.cleanup()
        self._checkpoint = _files(checkpoint) or None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._config, self._checkpoint, self._metrics = new_config, None, {}
        return True

    def cleanup(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end()


class _Run:
    """Workers that train, and a thread that waits for their end."""

    def __init__(self, made: _Made, config: dict[str, Any], files: Files | None) -> None:
        enter(made.environ)  # this process has the environment of the user that has started Ray
        self._queue = queue_here(maxsize=1)  # one place: a rank whose report is still in it waits
        self._executor = RayExecutor(made.settings, **made.workers)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._train, args=(made.train, config, files), name="horovod-ray-tune", daemon=True
        )
        try:
            self._executor.start()
            self._thread.start()
        except BaseException:
            self._queue.shutdown(force=True)
            raise

    def next_report(self) -> tuple[dict[str, Any], Files | None] | None:
        """None: all ranks have returned. Raises what one has raised, as RayExecutor.run does."""
        told: tuple[dict[str, Any], Files | None] | None = self._queue.get()
        if told is None and self._error is not None:
            raise self._error
        return told

    def end(self) -> None:
        """Ends the workers, wherever they are."""
        self._executor.shutdown()
        self._queue.shutdown(force=True)
        self._thread.join(_END_S)

    def _train(self, train: Train, config: dict[str, Any], files: Files | None) -> None:
        queue = self._queue
        try:
            self._executor.run(_on_rank, args=[train, config, queue, files])
        except BaseException as error:
            self._error = error
        with contextlib.suppress(RayActorError):  # `end` was called
            queue.put(None)


# -- checkpoints -------------------------------------------------------------------------------------------------------


class _OwnFolder:
    """A folder for the files of a checkpoint, locked for as long as this process lives.

    Ray kills the processes of a trial that it stops, and they remove nothing. So the next one on that node removes the
    folders of processes that are gone: nobody locks them any more.
    """

    _PREFIX = "horovod-ray-tune-"
    _NEW_S = 60.0  # in this time another process may have made a folder and not locked it yet

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{self._PREFIX}*"):
            with contextlib.suppress(OSError):  # in use, of another user, or removed by another process
                self._remove_left(left)
        self.name = tempfile.mkdtemp(prefix=self._PREFIX)
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def cleanup(self) -> None:
        shutil.rmtree(self.name, ignore_errors=True)
        os.close(self._lock)

    def _remove_left(self, left: Path) -> None:
        if not is_own_folder(left) or time.time() - left.stat().st_mtime < self._NEW_S:
            return
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _files(checkpoint: str | os.PathLike[str] | ray.tune.Checkpoint) -> Files:
    with _folder(checkpoint) as folder:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def _folder(checkpoint: str | os.PathLike[str] | ray.tune.Checkpoint) -> Iterator[Path]:
    as_directory = getattr(checkpoint, "as_directory", None)
    if as_directory is not None:  # a Checkpoint of ray.tune, or of ray.train
        with as_directory() as folder:
            yield Path(folder)
        return
    if not Path(checkpoint).is_dir():
        sentence = f"The checkpoint of horovod.ray.tune.report() must be a folder, which {str(checkpoint)!r} is not."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    yield Path(checkpoint)


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
