"""What the autoscaler is asked for while a job could have more workers than its cluster has room for.

A placement group that waits is a request: an autoscaler sees what is missing, and adds nodes. One group for each
missing worker, since not all have to come; a group whose resources have come is removed, as actors take them then.
Room on a host that is set aside is none for the job, so a request names the nodes on which it is not to be placed.
(request_resources() is one request for the whole cluster, of which the last caller's counts.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from horovod.launch.elastic.times import period_s
from horovod.ray.adapter import BaseParams

_MOST = 64  # requests at one time

_log = logging.getLogger(__name__)


class ResourceRequests:
    """Of one job. `keep` runs until it is cancelled."""

    def __init__(
        self, params: BaseParams, workers: int, slots: Callable[[], int], aside: Callable[[], Collection[str]]
    ) -> None:
        """workers: for so many there is to be room. slots: for how many there is, without the hosts `aside`."""
        self._bundle = params.bundle()
        self._workers, self._slots, self._aside = workers, slots, aside
        self._lock = threading.Lock()  # guards what follows
        self._groups: list[Any] = []
        self._is_over = False

    async def keep(self) -> None:
        try:
            while True:
                await asyncio.to_thread(self._look)
                await asyncio.sleep(max(period_s(), 0.1))
        finally:
            with self._lock:
                self._is_over = True
                self._keep(0)

    def _look(self) -> None:
        try:
            with self._lock:
                if self._is_over:
                    return
                for group in [one for one in self._groups if one.wait(0)]:
                    self._remove(group)
                self._keep(min(_MOST, self._workers - self._slots()))
        except Exception as error:  # without it the job runs on what there is
            _log.debug("Ray can't be asked for more room: %s", error)

    def _keep(self, count: int) -> None:
        if len(self._groups) < count:
            aside = self._aside()
            ids = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] in aside] if aside else []
            elsewhere = {"bundle_label_selector": [{"ray.io/node-id": f"!in({','.join(ids)})"}]} if ids else {}
            while len(self._groups) < count:
                self._groups.append(placement_group([self._bundle], **elsewhere))
        while len(self._groups) > max(0, count):
            self._remove(self._groups[-1])

    def _remove(self, group: Any) -> None:
        self._groups.remove(group)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
