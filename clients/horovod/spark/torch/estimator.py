"""TorchEstimator and TorchModel."""

from __future__ import annotations

import inspect
import io
import pickle
from typing import Any

import torch
from pyspark import keyword_only

from horovod.base.errors import TrainingCode
from horovod.spark.common.columns import Metadata
from horovod.spark.common.params import refused
from horovod.spark.torch.datamodule import PetastormDataModule
from horovod.spark.torch.modules import ModuleEstimator
from horovod.spark.torch.modules import TorchModel as TorchModel
from horovod.spark.torch.remote import TorchTrainer, TorchTraining


class TorchEstimator(ModuleEstimator):
    """Trains a torch.nn.Module.

    The optimizer is made of the model's parameters, with the learning rate of one process. Losses are functions of
    (output, label), given as `loss` or made on each rank by `loss_constructors`; metrics too. Inputs and labels are
    tensors of shape (rows,) for numbers and (rows, length) for vectors, if input_shapes and label_shapes don't say
    otherwise; floating ones get the type of the model's parameters. Where a label has as many numbers as the model's
    output, it gets its shape.
    """

    _framework = "pytorch"
    _trainer = TorchTrainer

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        compress_sparse_cols: bool = False,
        feature_cols: list[str] | None = None,
        continuous_cols: list[str] | None = None,
        categorical_cols: list[str] | None = None,
        input_shapes: Any = None,
        validation: Any = None,
        label_cols: list[str] | None = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int = 1,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_minibatch_fn: Any = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        transformation_edit_fields: Any = None,
        transformation_removed_fields: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Any = None,
        inmemory_cache_all: bool = False,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
        backward_passes_per_step: int = 1,
        data_module: Any = None,
        tensorflow_dataset_prefetch_buffer_size: int = 0,
    ) -> None:
        super().__init__()
        self._setDefault(
            input_shapes=None, loss_constructors=None, train_minibatch_fn=None, data_module=PetastormDataModule
        )
        self._set(**self._input_kwargs)  # None leaves a default as it is

    def _check_params(self, metadata: Metadata | None) -> None:
        super()._check_params(metadata)
        model = self.getOrDefault("model")
        if not isinstance(model, torch.nn.Module):
            raise refused(f"model must be a torch.nn.Module, not {type(model).__name__}.")
        if not self.getOrDefault("loss") and not self.getOrDefault("loss_constructors"):
            raise refused("Loss parameter is required: pass loss= or loss_constructors=.")
        if not isinstance(self.getOrDefault("optimizer"), torch.optim.Optimizer):
            raise refused("Optimizer parameter is required: pass optimizer=, a torch.optim.Optimizer of the model.")
        self._check_optimizer()
        self._check_closure()
        self._pickled()

    def _check_closure(self) -> None:
        """ValueError for an optimizer, such as LBFGS, that a step of this estimator can't call."""
        optimizer = self.getOrDefault("optimizer")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        is_needed = closure is not None and closure.default is closure.empty
        if is_needed and not self.getOrDefault("train_minibatch_fn"):
            raise refused(
                f"{type(optimizer).__name__} computes the loss several times in a step, by a closure: pass "
                "train_minibatch_fn=, which gives it one, or use another optimizer.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )

    def _load_checkpoint(self, run_id: str) -> dict[str, Any]:
        """The last checkpoint of a run: model, optimizer, epochs that are done, history, seed."""
        return _loaded(self._read_checkpoint(run_id))

    def _of_earlier_run(self, run_id: str) -> tuple[Any, dict[str, Any]]:
        checkpoint = self._load_checkpoint(run_id)
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        before, now = checkpoint["optimizer_class"], type(optimizer).__name__
        if before != now:
            raise self._other_than_before(run_id, "optimizer", f"that was {before}, and this is {now}")
        try:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise self._other_than_before(run_id, "model", str(error)) from error
        return checkpoint, {name: checkpoint[name] for name in ("epochs", "history", "seed")}

    def _training(self, checkpoint: Any, common: dict[str, Any]) -> TorchTraining:
        return TorchTraining(
            model=self._pickled(),
            checkpoint=checkpoint,
            input_shapes=self.getOrDefault("input_shapes"),
            train_minibatch=self.getOrDefault("train_minibatch_fn"),
            **self._losses(),
            **common,
        )

    def _trained(self, content: bytes) -> tuple[Any, Any, Any]:
        checkpoint = _loaded(content)
        model, optimizer = pickle.loads(self._pickled())  # noqa: S301 - a copy
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return model.eval(), checkpoint["history"], optimizer


def _loaded(content: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return loaded
