"""What `horovodrun --check` says to fail does fail, with the versions that are installed."""

from __future__ import annotations

import builtins
import sys
import types
from pathlib import Path

import pytest
from older_scripts import OLDER

import horovod.torch as hvd

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, older in OLDER.items() if older.raises])
def test_it_fails_at_the_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    communicator = type("Intracomm", (), {"__module__": "mpi4py.MPI"})()
    mpi = types.ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = communicator  # type: ignore[attr-defined]
    package = types.ModuleType("mpi4py")
    package.MPI = mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    code, raises = OLDER[name]
    if name == "communicators":
        hvd.shutdown()
    marked = next(number for number, line in enumerate(code.splitlines(), 1) if line.endswith("#!"))
    with pytest.raises(getattr(builtins, raises)) as caught:
        exec(compile(code, "older", "exec"), {"__name__": "older"})
    lines = [entry.lineno + 1 for entry in caught.traceback if str(entry.path) == "older"]
    assert lines[-1:] == [marked]


def test_decay_is_ignored() -> None:
    """What does not fail and acts otherwise."""
    with pytest.warns(UserWarning, match="decay"):
        assert float(keras.optimizers.SGD(0.1, decay=0.5).learning_rate) == pytest.approx(0.1)
