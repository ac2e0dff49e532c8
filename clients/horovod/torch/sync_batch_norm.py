"""Batch normalization over the batches of all ranks.

The moments of the joined batch come from those of the parts by the pairwise update of Chan, Golub and LeVeque
("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), which does not lose the digits that
the difference of the mean square and the squared mean would. One allgather forward and one allreduce backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.basics import Sum, size
from horovod.torch.ops import allgather, allreduce

# The name ends with the number of channels: what one name means stays the same, so it is negotiated once.
_STATISTICS = "sync_batch_norm.statistics"
_GRADIENTS = "sync_batch_norm.gradients"


class SyncBatchNorm(_BatchNorm):
    """Normalizes each channel over the batches of all ranks of the global process set.

    Input and output: (N, C, *), any floating dtype, on the CPU or a GPU. N and the spatial sizes may differ between
    ranks, and N may be 0 on some. Parameters, running statistics, `momentum` and `eps` are those of
    torch.nn.BatchNorm1d to 3d. In evaluation (with running statistics) and in a world of one it is an ordinary batch
    normalization. Every rank must call it equally often.

    Raises ValueError for an input of another dtype, of fewer than 2 dimensions, of other than `num_features` channels,
    or with fewer than 2 values per channel on all ranks together.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), torch.nn.ReLU())
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_SHAPE, f"SyncBatchNorm expected at least 2D input (got {input.dim()}D input)."
                )
            )
        if not input.is_floating_point():
            raise ValueError(
                coded(OperationCode.UNSUPPORTED_DTYPE, f"SyncBatchNorm expected real floats, not {input.dtype}.")
            )
        if input.size(1) != self.num_features:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_SHAPE,
                    f"SyncBatchNorm expected {self.num_features} channels (got {input.size(1)}).",
                )
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        self._check_input_dim(input)
        # Without running statistics, those of the batch are used always.
        own = self.running_mean is None or self.running_var is None
        if not (self.training or own) or size() == 1:
            return self._alone(input, own)
        output: torch.Tensor
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                factor = self._next_factor()
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                if self.running_var is not None:
                    self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output

    def _alone(self, batch: torch.Tensor, own: bool) -> torch.Tensor:
        factor = self._next_factor() if self.training and self.track_running_stats else 0.0
        return functional.batch_norm(
            batch,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or own,
            factor,
            self.eps,
        )

    def _next_factor(self) -> float:
        """The weight of this batch in the running statistics; without a momentum they are plain averages."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = batch.to(_wide(batch.dtype))
        channels = batch.size(1)
        own_count = batch.numel() // channels
        own = batch.new_zeros(1, 1 + 2 * channels, dtype=torch.float64)  # count, means, squares
        if own_count:
            variance, mean = torch.var_mean(values, _all_but_channels(batch), correction=0)
            own[0, 0] = own_count
            own[0, 1 : 1 + channels] = mean
            own[0, 1 + channels :] = variance.double() * own_count
        rows = allgather(own, name=f"{_STATISTICS}.{channels}")
        counts, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
        count = counts.sum()
        # A rank with two values or more knows without looking: on a GPU the host would wait for all that is queued.
        if own_count < 2 and count < 2:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_SHAPE,
                    f"SyncBatchNorm expected more than 1 value per channel when training, got {int(count)} on all "
                    f"ranks together (this rank's input has shape {list(batch.shape)}).",
                )
            )
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        invstd = (variance + eps).rsqrt()
        shape = _per_channel(batch)
        centred = values - mean.to(values.dtype).view(shape)
        scale = invstd.to(values.dtype)
        output = centred * (scale if weight is None else scale * weight.to(values.dtype)).view(shape)
        if bias is not None:
            output += bias.to(values.dtype).view(shape)
        ctx.save_for_backward(batch, weight, mean, invstd, count)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(batch.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        batch, weight, mean, invstd, count = ctx.saved_tensors
        wide = _wide(batch.dtype)
        shape = _per_channel(batch)
        gradient = gradient.to(wide)
        centred = batch.to(wide) - mean.to(wide).view(shape)
        dims = _all_but_channels(batch)
        sums = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)]).double()
        # Gradients of the parameters stay local: the optimizer averages them like all others.
        weight_gradient = (
            (sums[1] * invstd).to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        )
        bias_gradient = sums[0].to(batch.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        batch_gradient = None
        if ctx.needs_input_grad[0]:
            sums = allreduce(sums, op=Sum, name=f"{_GRADIENTS}.{batch.size(1)}") / count
            scale = invstd if weight is None else invstd * weight.double()
            slope = (sums[1] * invstd.square()).to(wide).view(shape)
            batch_gradient = gradient - sums[0].to(wide).view(shape) - centred * slope
            batch_gradient = (batch_gradient * scale.to(wide).view(shape)).to(batch.dtype)
        return batch_gradient, weight_gradient, bias_gradient, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over a batch are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _all_but_channels(batch: torch.Tensor) -> list[int]:
    return [dim for dim in range(batch.dim()) if dim != 1]


def _per_channel(batch: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (batch.dim() - 2)
