"""A second installation of the package, with numbers of its own: an earlier or a later release, for real processes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = {"": "clients/horovod", "base": "base", "coordinator": "coordinator", "worker": "worker"}


def install(folder: Path, version: str, protocol: int | None = None) -> str:
    """The interpreter of a virtual environment in `folder` whose horovod says that it is this release.

    Its other packages are those of the environment that runs the test. protocol: its PROTOCOL_VERSION; None: ours.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    ours = Path(sysconfig.get_path("purelib"))
    site = folder / ours.relative_to(sys.prefix)
    # Named by its folder only: of a .pth file there, which is how an editable horovod is found, Python reads nothing.
    (site / "others.pth").write_text(f"{ours}\n")
    package = site / "horovod"
    if (ours / "horovod").is_dir():
        _copy(ours / "horovod", package)
    if metadata.distribution("horovod").read_text("direct_url.json") and (ROOT / "pyproject.toml").exists():
        for name, source in SOURCES.items():
            _copy(ROOT / source, package / name)
    if protocol is not None:
        path = package / "base/protocol.py"
        text, count = re.subn(
            r"(?m)^PROTOCOL_VERSION: Final = \d+$", f"PROTOCOL_VERSION: Final = {protocol}", path.read_text()
        )
        assert count == 1
        path.write_text(text)
    about = site / f"horovod-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    python = str(folder / "bin" / "python")
    found = subprocess.run(
        [python, "-c", "import horovod; print(horovod.__version__, horovod.__file__)"],
        check=True, capture_output=True, text=True, cwd=folder, timeout=60,
    ).stdout.split()  # fmt: skip
    assert found[0] == version
    assert Path(found[1]).is_relative_to(folder)
    return python


def _copy(source: Path, target: Path) -> None:
    """With what Python has compiled, which is valid there since the times of files are kept."""
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc.*"))
