"""Values that ranks send to the driver while a function runs.

In the function: ``ray_logger.log({"loss": 0.1})``; in the driver: ``executor.run(function, callbacks=[print])``.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from ray.exceptions import RayActorError

_log = logging.getLogger(__name__)

_queue: Any = None  # of the run that has callbacks
_warned = False


def configure(queue: Any) -> None:
    """Has `log` put its messages into this queue from now on; None: it drops them."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends the dict to each callback of the running `run` or `execute`; it has arrived when this returns.

    info_dict: anything that pickle can send.
    """
    global _warned
    if _queue is not None:
        with contextlib.suppress(RayActorError):  # the driver does not wait any more, since another rank has failed
            _queue.put(info_dict)
    elif not _warned:
        _warned = True
        _log.warning("ray_logger.log() goes nowhere: the driver has given no callbacks to run() or execute().")
