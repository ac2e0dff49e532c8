"""The names and signatures of horovod.keras and horovod.tensorflow.keras are a contract: this file is the copy that a
change must edit as well."""

from __future__ import annotations

import inspect
from typing import Any

from worlds import World

BEGIN = (
    "optimizer, name=None, device_dense='', device_sparse='', compression=None, sparse_as_dense=False, "
    "gradient_predivide_factor=1.0, op=Average, "
)
PASSES = "backward_passes_per_step=1, average_aggregated_gradients=False, "
REST = "groups=None, process_set=gps, "
OPTIMIZER = {
    "horovod.keras": f"{BEGIN}num_groups=0, groups=None, {PASSES}process_set=gps, scale_local_gradients=True",
    "horovod.tensorflow.keras": f"{BEGIN}{PASSES}num_groups=0, {REST}scale_local_gradients=True",
}
SIGNATURES = {
    "PartialDistributedOptimizer": f"{BEGIN}{PASSES}{REST}local_layers=None, scale_local_gradients=True",
    "allreduce": "value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=None",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "broadcast_global_variables": "root_rank",
    "reducescatter": "value, name=None, op=Average",
    "barrier": "process_set=gps",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=gps",
    "allgather_object": "obj, name=None, process_set=gps",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=None, legacy_opts=False",
}
SCHEDULE = "momentum_correction=True, steps_per_epoch=None"
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": (
        f"initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, {SCHEDULE}"
    ),
    "LearningRateWarmupCallback": f"initial_lr, warmup_epochs=5, {SCHEDULE}, verbose=0",
}
BEST = {
    "horovod.keras": "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch', save_weights_only=False",
    "horovod.tensorflow.keras": (
        "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch'"
    ),
}
ELASTIC = {
    "KerasState": "model, optimizer=None, kwargs",
    "CommitStateCallback": "state, batches_per_commit=1",
    "UpdateBatchStateCallback": "state",
    "UpdateEpochStateCallback": "state",
    "leave_at_next_commit": "reason=''",
    "run": "func",
}


def _signature(function: Any) -> str:
    import horovod.keras as hvd

    known = {id(hvd.global_process_set): "gps"}

    def default_of(name: str, value: Any) -> str:
        return "Average" if name == "op" and value == hvd.Average else known.get(id(value), repr(value))

    return ", ".join(
        one.name if one.default is one.empty else f"{one.name}={default_of(one.name, one.default)}"
        for one in inspect.signature(function).parameters.values()
    )


def _contract() -> None:
    import horovod.keras
    import horovod.tensorflow.elastic
    import horovod.tensorflow.keras

    for module in (horovod.keras, horovod.tensorflow.keras):
        places = {
            module: SIGNATURES | {"DistributedOptimizer": OPTIMIZER[module.__name__]},
            module.callbacks: CALLBACKS | {"BestModelCheckpoint": BEST[module.__name__]},
            module.elastic: ELASTIC,
        }
        for place, signatures in places.items():
            for name, signature in signatures.items():
                public = getattr(place, name)
                assert _signature(public) == signature, (place, name)
                assert inspect.getdoc(public), (place, name)
            assert sorted(signatures) == sorted(place.__all__) or place is module
        assert set(SIGNATURES) < set(module.__all__)
        assert module.elastic.init is module.init
        assert module.elastic.shutdown is module.shutdown
        assert module.elastic.TensorFlowKerasState is horovod.tensorflow.elastic.TensorFlowKerasState
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert horovod.tensorflow.elastic.init is horovod.tensorflow.init
    assert horovod.tensorflow.elastic.shutdown is horovod.tensorflow.shutdown


def _what_every_framework_has() -> None:
    import horovod.keras as hvd

    hvd.barrier()
    assert hvd.allgather_object("x" * hvd.rank()) == ["", "x"]
    assert hvd.broadcast_object({"of": hvd.rank()}, root_rank=1) == {"of": 1}
    assert float(hvd.allreduce(float(hvd.rank()), op=hvd.Max)) == 1.0
    assert hvd.is_homogeneous()


def test_what_every_framework_has(tf_pair: World) -> None:
    tf_pair.run(_what_every_framework_has)


def test_names_signatures_and_docstrings(tf_pair: World) -> None:
    tf_pair.run(_contract)
