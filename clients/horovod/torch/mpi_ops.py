"""The module from which older scripts import collectives, and is_homogeneous, which horovod.torch does not export."""

import horovod.torch
from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.torch import *  # noqa: F403  (the same names, whatever they are)

__all__ = horovod.torch.__all__ + ["is_homogeneous"]  # noqa: RUF005
