"""Where scripts of earlier releases import HostUpdateResult from, which is in horovod.common.elastic."""

from horovod.common.elastic import HostUpdateResult as HostUpdateResult

__all__ = ["HostUpdateResult"]
