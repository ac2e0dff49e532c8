"""`horovod.ray`: ranks as actors of Ray.

    from horovod.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    losses = executor.run(train, args=[epochs])  # by rank
    executor.shutdown()

Ray places, starts and watches the processes; Horovod gives them ranks, a coordinator and the data plane (docs/ray.md).

    RayExecutor (runner.py)      what users call; under Ray Client the rest is in an actor of the cluster
      Adapter (adapter.py)       the workers, from the start to the end; what both kinds of them have in common
      StaticAdapter (static.py)  one set of workers: starts, calls, failures
        strategy.py              where actors are placed
        calls.py                 one function on all ranks
      ElasticAdapter (elastic_v2.py)  workers on hosts that come and go
        elastic_workers.py       an agent for each host, as the scheduler knows them
        cluster.py               the hosts, as Ray sees them, and requests to an autoscaler
      coordinator.py             the coordinator, in the process that has the adapter, and a worker's place
      worker.py                  one actor, one rank
    ElasticRayExecutor (elastic.py)  the same as RayExecutor(min_workers=...)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horovod.base.errors import LaunchCode, coded

try:
    import ray as _ray  # noqa: F401 - only whether it is there
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    sentence = f"horovod.ray needs Ray, which is not installed ({error}). Install it with: pip install 'horovod[ray]'"
    raise ImportError(coded(LaunchCode.MISSING_PROGRAM, sentence)) from error

if TYPE_CHECKING:
    from horovod.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from horovod.ray.runner import RayExecutor as RayExecutor
    from horovod.ray.worker import BaseHorovodWorker as BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]

_WHERE = {
    "BaseHorovodWorker": "horovod.ray.worker",
    "ElasticRayExecutor": "horovod.ray.elastic",
    "RayExecutor": "horovod.ray.runner",
}


def __getattr__(name: str) -> Any:
    # Each actor imports this package, and needs neither the coordinator nor the rest of the driver's side.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'horovod.ray' has no attribute {name!r}")
