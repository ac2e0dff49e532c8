"""The module from which older scripts import collectives, and some names that horovod.torch itself does not export."""

from typing import TYPE_CHECKING

from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.common.compatibility import HorovodBasics
from horovod.common.compatibility import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horovod.common.util import gpu_available as gpu_available
from horovod.common.util import num_rank_is_power_2 as num_rank_is_power_2
from horovod.torch import *  # noqa: F403  (the same names, whatever they are)

if not TYPE_CHECKING:  # as in horovod.torch, which imports this module, and is not an attribute yet
    from horovod.torch import __all__ as _exported

    __all__ = [*_exported, "gpu_available", "is_homogeneous", "num_rank_is_power_2"]  # noqa: PLE0604

_basics = HorovodBasics()
