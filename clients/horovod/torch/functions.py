"""What every rank starts from and what everyone has: parameters, optimizer state, objects."""

from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.torch.optimizer_state import broadcast_optimizer_state
from horovod.torch.parameters import broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
