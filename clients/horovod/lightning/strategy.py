"""`HorovodStrategy`: what Lightning's Trainer asks of the processes that it trains with, answered by Horovod."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.base.errors import LaunchCode, TrainingCode, coded
from horovod.common import basics as hvd
from horovod.common.basics import Average, Max, Min, Product, Sum
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.lightning.packages import completed, used
from horovod.lightning.reduction import Reduction
from horovod.torch.compression import Compression, Compressor, GradientCompressor
from horovod.torch.functions import broadcast_parameters
from horovod.torch.ops import allgather, allreduce, barrier
from horovod.torch.sync_batch_norm import SyncBatchNorm
from horovod.torch.wrapping import Arguments, WrappedOptimizer

T = TypeVar("T")
_Base: Any = object
_OPS = {"mean": Average, "avg": Average, "sum": Sum, "min": Min, "max": Max, "product": Product}
_FITTING = "fit"


class HorovodStrategy(_Base):
    """Trains with the ranks of this process's world, each of which has made the same Trainer.

        >>> trainer = L.Trainer(strategy=HorovodStrategy(), max_epochs=3)
        >>> trainer.fit(model, loader)

    A step on a batch of each rank is the step that one process takes on all of these batches together: gradients are
    averages when backward() returns, and the learning rate is the optimizer's own.

    Args:
        accelerator, checkpoint_io, precision_plugin: as of every strategy of Lightning.
        op: hvd.Average or hvd.Sum of the gradients.
        compression, gradient_predivide_factor, sparse_as_dense: as of hvd.DistributedOptimizer.
        package: "lightning" or "pytorch_lightning", whose Trainer it is; default: the one that is imported.

    Calls hvd.init(), if the script has not.

    Raises:
        ValueError: arguments that contradict each other, or both packages are imported.
    """

    package: ClassVar[str] = ""  # one of packages.NAMES, set when the class gets its base
    strategy_name = "horovod"
    parallel_devices: Any
    is_distributed = True  # so a Trainer gives each rank its part of the data

    def __new__(cls, *args: Any, package: str | None = None, **kwargs: Any) -> Any:
        return object.__new__(cls if cls.package else completed(cls, used(package), "strategies", "ParallelStrategy"))

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        op: int = Average,
        compression: type[Compressor] | GradientCompressor = Compression.none,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        package: str | None = None,
    ) -> None:
        hvd.init()
        super().__init__(
            accelerator=accelerator,
            cluster_environment=HorovodEnvironment(self.package),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._arguments = Arguments(op, global_process_set, 1, gradient_predivide_factor, sparse_as_dense, compression)
        self._reductions: dict[int, Reduction] = {}  # id of an optimizer -> its reduction

    # -- places --------------------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Called once a Trainer knows its devices: each rank of a host gets one of them."""
        rank_zero_only.rank = hvd.rank()
        self.parallel_devices = devices_of_host(self.parallel_devices, hvd.local_size())

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.parallel_devices[hvd.local_rank()]
        return device

    @property
    def num_nodes(self) -> int:
        """Hosts of the world."""
        return hvd.cross_size()

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        """Ignores the Trainer's num_nodes: the launcher has placed the ranks."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a sampler that select this rank's part of the data."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    # -- the beginning and the end -------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """All ranks begin with the parameters and buffers of rank 0."""
        if trainer.state.fn == _FITTING and self._layer_sync is not None:
            synchronize_batch_norms(self.lightning_module)
        super().setup(trainer)
        gather_over_ranks(self.lightning_module)
        named = [*self.lightning_module.named_parameters(), *self.lightning_module.named_buffers()]
        broadcast_parameters(dict(named), root_rank=0)

    def setup_optimizers(self, trainer: Any) -> None:
        """ValueError: an optimizer is distributed already, or has parameters that are not the model's."""
        self._close()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, WrappedOptimizer):
                raise ValueError(
                    coded(
                        TrainingCode.UNSUPPORTED_OPTIMIZER,
                        "configure_optimizers() has returned a hvd.DistributedOptimizer. HorovodStrategy reduces the "
                        "gradients itself: return the optimizer that it was made of.",
                    )
                )
            self._reductions[id(optimizer)] = Reduction(optimizer, self.lightning_module, self._arguments)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _close(self) -> None:
        for reduction in self._reductions.values():
            reduction.close()
        self._reductions.clear()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        for reduction in self._reductions.values():
            reduction.before_backward()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        for reduction in self._reductions.values():
            reduction.after_backward()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in it add up gradients; the next one outside reduces the sum."""
        with contextlib.ExitStack() as stack:
            for reduction in self._reductions.values():
                stack.enter_context(reduction.local())
            yield

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        reduction = self._reductions.get(id(optimizer))
        if reduction is None:  # an optimizer that configure_optimizers() has not returned
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = super().optimizer_step(optimizer, reduction.closure(closure), model, **kwargs)
        reduction.after_step()
        return result

    # -- collectives ---------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks, or over the ProcessSet `group`. Other values are returned unchanged.

        reduce_op: mean, sum, min, max or product, or an operation of torch.distributed; None: the sum.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "sum" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in _OPS:
            sentence = f"Horovod can't reduce by {reduce_op!r}, but by one of {', '.join(_OPS)}."
            raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, sentence))
        return allreduce(tensor, op=_OPS[name], process_set=_ranks(group))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, of equal shapes, as rows of one tensor; with gradients, if asked for."""
        ranks = _ranks(group)
        with contextlib.nullcontext() if sync_grads else torch.no_grad():
            gathered = allgather(tensor.unsqueeze(0), process_set=ranks)
        if gathered.requires_grad:
            # Lightning's gradient is the sum over the ranks' losses, and Horovod's is their average.
            number = len(gathered)
            gathered.register_hook(lambda gradient: gradient * number)  # type: ignore[no-untyped-call]
        return gathered

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`."""
        return broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Returns when all ranks have called it."""
        barrier()


def devices_of_host(found: Sequence[torch.device], ranks: int) -> list[torch.device]:
    """A device for each rank of this host. found: what Trainer(accelerator=, devices=) means, in this process.

    With one CUDA device in `found` and more that can be seen, each rank gets the device of its number: `devices=1`
    is one for each process.
    """
    if ranks <= len(found):
        return list(found[:ranks])
    if len(found) == 1:
        seen = torch.cuda.device_count() if found[0].type == "cuda" else 1
        if seen >= ranks:
            return [torch.device("cuda", number) for number in range(ranks)]
        if seen == 1:  # a CPU, or a GPU that the launcher has made the only one for this process
            return [found[0]] * ranks
    raise ValueError(
        coded(
            LaunchCode.TOO_FEW_GPUS,
            f"{ranks} ranks of this host are to share {len(found)} devices ({', '.join(map(str, found))}). Start as "
            "many ranks as there are GPUs, or use Trainer(accelerator='cpu').",
        )
    )


def _ranks(group: Any) -> ProcessSet:
    if group is None:
        return global_process_set
    if isinstance(group, ProcessSet):
        return group
    sentence = f"group must be a ProcessSet of Horovod, or None for all ranks, not {group!r}."
    raise ValueError(coded(TrainingCode.INVALID_ARGUMENT, sentence))


class HorovodEnvironment(_Base):
    """Lightning's ClusterEnvironment. The processes are there already, and their world tells each its place.

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


# -- Trainer(sync_batchnorm=True) --------------------------------------------------------------------------------------
def synchronize_batch_norms(model: torch.nn.Module) -> None:
    """Replaces each batch normalization inside of `model` by a hvd.SyncBatchNorm of the same tensors."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
            setattr(model, name, _synchronized(child))
        else:
            synchronize_batch_norms(child)


def _synchronized(layer: _BatchNorm) -> SyncBatchNorm:
    made = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    # The tensors themselves and no copies: an optimizer may have them already.
    made._parameters = layer._parameters
    made._buffers = layer._buffers
    return made.train(layer.training)


# -- metrics of torchmetrics -------------------------------------------------------------------------------------------
# By themselves they gather over torch.distributed, and do nothing where that is not used.


def gather_over_ranks(model: torch.nn.Module) -> None:
    """The metrics in `model` compute over all ranks, but for those that were told how to gather."""
    from torchmetrics import Metric
    from torchmetrics.metric import jit_distributed_available

    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            if metric.distributed_available_fn is jit_distributed_available:
                metric.distributed_available_fn = _are_many
            metric.dist_sync_fn = gather_all


def gather_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, whose shapes may differ."""
    shapes = allgather_object(tuple(tensor.shape), "torchmetrics.shapes")
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(allgather(tensor.reshape(-1), "torchmetrics.states"), sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _are_many() -> bool:
    return hvd.is_initialized() and hvd.size() > 1
