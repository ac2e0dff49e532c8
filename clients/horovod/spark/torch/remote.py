"""The training of a torch.nn.Module on one rank: what TorchEstimator sends to all of them."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horovod.spark.common.batches import Batches
from horovod.spark.common.columns import Shape
from horovod.spark.common.training import Prediction
from horovod.spark.common.transform import kind_of
from horovod.spark.common.transformation import Batch, columns_of
from horovod.spark.torch.ranks import ModuleTrainer, ModuleTraining, same_shapes, scale_rates, share_buffers
from horovod.spark.torch.tensors import as_array, as_list, floating_type, inputs_of, labels_of, number


@dataclass(kw_only=True)
class TorchTraining(ModuleTraining):
    """checkpoint: what `_content` has saved."""

    input_shapes: Sequence[Shape] | None
    train_minibatch: Callable[..., Any] | None


class TorchTrainer(ModuleTrainer):
    """The epochs of TorchEstimator: the only framework of them that has none of its own."""

    training: TorchTraining

    def load(self) -> None:
        import horovod.torch as hvd

        training = self.training
        self.hvd = hvd
        self.model, optimizer = self.unpickled()
        if training.checkpoint is not None:
            self.model.load_state_dict(training.checkpoint["model"])
            optimizer.load_state_dict(training.checkpoint["optimizer"])
        self.model.to(self.device)
        optimizer.load_state_dict(optimizer.state_dict())  # its state goes where the parameters are
        self.optimizer_class = type(optimizer).__name__
        scale_rates(optimizer.param_groups, times=hvd.size())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.passes = training.backward_passes_per_step
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=training.gradient_compression or hvd.Compression.none,
            backward_passes_per_step=self.passes,
        )
        self.dtype = floating_type(self.model)
        self.loss = self.losses()
        self.seen: list[Prediction] = []  # in the first batch

    def fit(self, train: Batches, val: Batches | None) -> None:
        for epoch in range(self.run["epochs"], self.training.epochs):
            self._seed(epoch)
            record: dict[str, Any] = {"epoch": epoch, "train": self._train(train, epoch)}
            if val is not None:
                share_buffers(self.model)
                record["validation"] = self._validate(val, epoch)
            self.done(epoch, [*self.run["history"], record])
            if self.hvd.rank() == 0:
                self.keep(self._content())
                if self.training.verbose:
                    print(_line(record, self.training.epochs), flush=True)
            for callback in self.training.callbacks:
                callback(record)

    def checkpoint(self) -> bytes:
        return self.kept or self._content()

    def predictions(self, train: Batches) -> list[Prediction]:
        return self.seen or super().predictions(train)

    def predicted(self, batch: Batch) -> Sequence[np.ndarray]:
        self.model.eval()
        with torch.no_grad():
            return [as_array(output) for output in as_list(self.model(*self._tensors(batch)[0]))]

    def _train(self, batches: Batches, epoch: int) -> dict[str, Any]:
        self.model.train()
        sums = _Sums(len(self.training.metrics))
        steps = batches.steps
        step_of = self.training.train_minibatch or _minibatch
        for step, (batch, rows, scale) in enumerate(batches.of_epoch(epoch)):
            place = step % self.passes
            if place == 0:
                # The last step of an epoch may have fewer batches.
                self.optimizer.set_backward_passes_per_step(min(self.passes, steps - step))
            inputs, labels, weights = self._tensors(batch)
            losses = self.loss.scaled(scale)
            optimizer: Any = self.optimizer
            if self.passes > 1:
                is_last = place == self.passes - 1 or step == steps - 1
                optimizer = _PartOfStep(self.optimizer, place == 0, is_last)
            with self._explained(inputs, labels):
                outputs, loss = step_of(self.model, optimizer, same_shapes, losses, inputs, labels, weights)
            self.seen = self.seen or [kind_of(as_array(output)) for output in as_list(outputs)]
            # A train_minibatch_fn may have a loss of its own.
            value = losses.last if losses.last is not None else number(loss, "train_minibatch_fn")
            sums.add(value, self._metrics(outputs, labels), rows)
        return sums.over_ranks(self.hvd)

    @contextlib.contextmanager
    def _explained(self, inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> Iterator[None]:
        """Adds to an error what the model was called with: PyTorch names neither columns nor shapes of arguments."""
        try:
            yield
        except Exception as error:
            named = zip([*self.training.feature_columns, *self.training.label_columns], [*inputs, *labels], strict=True)
            found = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"The model was called with {len(inputs)} arguments, {', '.join(found[: len(inputs)])}; the labels "
                    f"were {', '.join(found[len(inputs) :])}."
                )
            raise

    def _validate(self, batches: Batches, epoch: int) -> dict[str, Any]:
        self.model.eval()
        sums = _Sums(len(self.training.metrics))
        with torch.no_grad():
            for batch, rows, _ in batches.of_epoch(epoch):
                inputs, labels, weights = self._tensors(batch)
                losses = self.loss.scaled(1.0)
                with self._explained(inputs, labels):
                    outputs, labels = same_shapes(self.model(*inputs), labels)
                    loss = losses(outputs, labels, weights)
                sums.add(number(loss, "the loss"), self._metrics(outputs, labels), rows)
        return sums.over_ranks(self.hvd)

    def _tensors(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        training = self.training
        inputs = inputs_of(columns_of(batch, training.feature_columns), training.input_shapes, self.dtype, self.device)
        labels = labels_of(columns_of(batch, training.label_columns), training.label_shapes, self.dtype, self.device)
        if training.weight_column is None:
            return inputs, labels, None
        (weight,) = columns_of(batch, [training.weight_column])
        weights = torch.as_tensor(weight.astype(np.float64), device=self.device)
        return inputs, labels, weights.to(self.dtype)

    def _metrics(self, outputs: Any, labels: list[torch.Tensor]) -> list[float]:
        if not self.training.metrics:
            return []
        with torch.no_grad():
            found, labels = same_shapes(outputs, labels)
            values = []
            for metric in self.training.metrics:
                each = metric if isinstance(metric, (list, tuple)) else [metric] * len(labels)
                of_labels = [
                    number(one(output, label), f"the metric {getattr(one, '__name__', type(one).__name__)}")
                    for one, output, label in zip(each, found, labels, strict=True)
                ]
                values.append(sum(of_labels) / len(of_labels))
            return values

    def _seed(self, epoch: int) -> None:
        """An epoch begins the same whether or not the run was interrupted before it; ranks differ."""
        words = np.random.SeedSequence((self.run["seed"], epoch, self.hvd.rank())).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        torch.manual_seed(int(words[2]))

    def _content(self) -> bytes:
        state = self.optimizer.state_dict()
        groups = [dict(group) for group in state["param_groups"]]
        scale_rates(groups, over=self.hvd.size())
        content = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": {**state, "param_groups": groups},
                "optimizer_class": self.optimizer_class,
                **self.run,
            },
            content,
        )
        return content.getvalue()


class _PartOfStep:
    """The optimizer as a step sees it that is made of several batches: it clears and steps only where it should."""

    def __init__(self, optimizer: Any, is_first: bool, is_last: bool) -> None:
        self._optimizer, self._is_first, self._is_last = optimizer, is_first, is_last

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        if self._is_first:
            self._optimizer.zero_grad(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Any:
        return self._optimizer.step(*arguments, **named) if self._is_last else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _minibatch(
    model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any, sample_weights: Any
) -> tuple[Any, Any]:
    """The default of train_minibatch_fn."""
    optimizer.zero_grad()
    outputs = model(*inputs)
    outputs, labels = transform_outputs(outputs, labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    optimizer.step()
    return outputs, loss


class _Sums:
    """Losses and metrics of an epoch, each batch by its rows."""

    def __init__(self, metrics: int) -> None:
        self._sums = torch.zeros(metrics + 2, dtype=torch.float64)

    def add(self, loss: float, metrics: Sequence[float], rows: int) -> None:
        if rows:
            self._sums += torch.tensor([1.0, loss, *metrics], dtype=torch.float64) * rows

    def over_ranks(self, hvd: Any) -> dict[str, Any]:
        count, *sums = hvd.allreduce(self._sums, op=hvd.Sum, name="epoch").tolist()
        loss, *metrics = (value / count if count else float("nan") for value in sums)
        return {"loss": loss, "all_metrics": metrics} if metrics else {"loss": loss}


def _line(record: dict[str, Any], epochs: int) -> str:
    parts = []
    for name in ("train", "validation"):
        if name in record:
            parts += [f"{name} {what} {value}" for what, value in record[name].items()]
    return f"epoch {record['epoch'] + 1}/{epochs}: " + ", ".join(parts)
