"""The module from which older scripts import collectives, and some names that horovod.tensorflow does not export."""

from typing import TYPE_CHECKING

from horovod.common.util import num_rank_is_power_2 as num_rank_is_power_2
from horovod.tensorflow import *  # noqa: F403  (the same names, whatever they are)
from horovod.tensorflow.util import _allreduce as _allreduce
from horovod.tensorflow.util import _basics as _basics
from horovod.tensorflow.util import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow.util import gpu_available as gpu_available
from horovod.tensorflow.util import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)

if not TYPE_CHECKING:  # as in horovod.tensorflow, which imports this module, and is no attribute yet
    from horovod.tensorflow import __all__ as _exported

    __all__ = [*_exported, "gpu_available", "num_rank_is_power_2"]  # noqa: PLE0604
