"""Where older scripts import these from."""

from horovod.common.elastic import HostUpdateResult as HostUpdateResult

__all__ = ["HostUpdateResult"]
