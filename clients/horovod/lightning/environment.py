"""Lightning's ClusterEnvironment: the address, size and ranks of the world, as Horovod knows them."""

from __future__ import annotations

from typing import Any

from horovod.common import basics as hvd
from horovod.lightning.packages import completed

_Base: Any = object


class HorovodEnvironment(_Base):
    """The processes are there already, and their world tells each its place.

    With an environment of its own Lightning does not look for one, and finds that of Slurm, say, which counts tasks.
    """

    def __new__(cls, package: str) -> Any:
        """package: of packages.NAMES."""
        return object.__new__(completed(cls, package, "fabric.plugins.environments", "ClusterEnvironment"))

    def __init__(self, package: str) -> None:
        pass

    creates_processes_externally = True
    main_address = "127.0.0.1"  # for torch.distributed, which is not used
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Never: a Trainer has this environment by its strategy."""
        return False

    def world_size(self) -> int:
        return hvd.size()

    def global_rank(self) -> int:
        return hvd.rank()

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()

    def set_world_size(self, size: int) -> None:
        """The world has its size."""

    def set_global_rank(self, rank: int) -> None:
        """The world has told the rank."""
