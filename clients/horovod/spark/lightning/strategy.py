"""A strategy of Lightning whose ranks are Horovod's: those that hvd.init() has joined."""

from __future__ import annotations

from typing import Any

import torch


def strategy_for(pl: Any, device: torch.device, compression: Any) -> Any:
    """The strategy, of the classes of `pl`, which is lightning.pytorch or pytorch_lightning."""
    import horovod.torch as hvd

    class HorovodStrategy(pl.strategies.ParallelStrategy):
        """Gradients are averages when backward() returns. `scale` is what the loss of the next batch counts for."""

        strategy_name = "horovod"
        scale = 1.0
        optimizers: Any
        cluster_environment: Any

        @property
        def root_device(self) -> torch.device:
            return device

        @property
        def global_rank(self) -> int:
            return hvd.rank()

        @property
        def local_rank(self) -> int:
            return hvd.local_rank()

        @property
        def world_size(self) -> int:
            return hvd.size()

        @property
        def distributed_sampler_kwargs(self) -> dict[str, int]:
            return {"num_replicas": hvd.size(), "rank": hvd.rank()}

        def model_to_device(self) -> None:
            self.lightning_module.to(device)

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            module = self.lightning_module
            hvd.broadcast_parameters(module.state_dict(), root_rank=0)
            names = {parameter: name for name, parameter in module.named_parameters()}
            self.optimizers = [
                hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=[
                        (names.get(parameter, f"parameter.{place}.{number}"), parameter)
                        for place, group in enumerate(optimizer.param_groups)
                        for number, parameter in enumerate(group["params"])
                    ],
                    compression=compression or hvd.Compression.none,
                    backward_passes_per_step=trainer.accumulate_grad_batches,
                )
                for optimizer in self.optimizers
            ]

        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.scale != 1.0:
                closure_loss = closure_loss * self.scale
            return super().backward(closure_loss, optimizer, *args, **kwargs)

        def barrier(self, name: str | None = None) -> None:
            hvd.barrier()

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return hvd.broadcast_object(obj, root_rank=src)

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            is_sum = str(reduce_op).lower().rpartition(".")[2] == "sum"
            value = tensor.detach()
            value = value if value.is_floating_point() or is_sum else value.float()
            return hvd.allreduce(value, op=hvd.Sum if is_sum else hvd.Average)

        def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
            """The tensors of all ranks, which have one shape, with a dimension for the ranks before the others."""
            gathered = hvd.allgather(tensor.reshape(1, *tensor.shape))
            return gathered if sync_grads else gathered.detach()

        def teardown(self) -> None:
            self.cluster_environment = self.cluster_environment or pl.plugins.environments.LightningEnvironment()
            super().teardown()

    return HorovodStrategy()
