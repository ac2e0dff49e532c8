"""The table of `horovodrun --check-build`. Programs read its `[X]` and `[ ]` lines."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from horovod.base.frameworks import FRAMEWORKS
from horovod.base.protocol import __version__

_FIRST = ("TensorFlow", "PyTorch", "MXNet")  # in the order of earlier versions
_SHOWN = {one.name: f"horovod.{one.module}" for one in FRAMEWORKS if one.has_build_line}
_FRAMEWORKS = {name: _SHOWN[name] for name in dict.fromkeys((*_FIRST, *_SHOWN))}
_LAUNCHERS = {"Ray": "horovod.ray", "Spark": "horovod.spark"}
_MODULES = _FRAMEWORKS | _LAUNCHERS
_PROBES = {"MPI": "mpi_built", "DDL": "ddl_built", "CCL": "ccl_built"}
_TIMEOUT_S = 120
_NOT_FROM_HERE = "import sys; sys.path[:] = [entry for entry in sys.path if entry]"  # -P is only in Python >= 3.11


def check_build() -> str:
    """The table. Each framework is asked in a process of its own: importing it may take long, or crash."""
    names = [*_MODULES, *_PROBES, "Gloo", "NCCL", "Native"]
    with ThreadPoolExecutor(max_workers=4) as pool:
        has = dict(zip(names, pool.map(_has, names), strict=True))
    sections = {
        "Available Frameworks": list(_FRAMEWORKS),
        "Available Controllers": ["MPI", "Gloo", "Coordinator"],
        "Available Tensor Operations": ["NCCL", "DDL", "CCL", "MPI", "Gloo", "Native"],
        "Available Launchers": list(_LAUNCHERS),
    }
    has["Coordinator"] = has["Native"]  # the built-in controller and the built-in data plane are one
    # Programs ask for the controller Gloo to know whether jobs run without MPI.
    controllers = {**has, "Gloo": has["Native"]}
    blocks = [f"Horovod v{__version__}:"]
    for title, rows in sections.items():
        shown = controllers if title == "Available Controllers" else has
        blocks.append("\n".join([f"{title}:", *(f"    [{'X' if shown[row] else ' '}] {row}" for row in rows)]))
    return "\n\n".join(blocks) + "\n"


def _has(name: str) -> bool:
    if name == "Native":
        return _runs("import horovod._core")
    if name == "Gloo":  # its library; gloo_built() only says that no MPI is needed
        return _runs("from horovod import _core\nassert not _core.gloo_obstacle()")
    if name == "NCCL":  # without a driver there is nothing that it could be used for
        return _runs("from horovod.common.basics import cuda_built, nccl_built\nassert nccl_built() and cuda_built()")
    if name in _PROBES:
        return _runs(f"from horovod.common.util import {_PROBES[name]} as built\nassert built()")
    module = _MODULES[name]
    return importlib.util.find_spec(module) is not None and _runs(f"import {module}")


def _runs(code: str) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{_NOT_FROM_HERE}\n{code}"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
