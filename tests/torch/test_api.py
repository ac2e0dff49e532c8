"""The names and signatures of horovod.torch are a contract: this file is the copy that a change must edit as well."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import horovod.torch as hvd
from horovod.torch import mpi_ops
from horovod.torch.tensors import DTYPE_CODES

G = "process_set=gps"
FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
REDUCE = f"average=None, name=None, op=None, {FACTORS}, {G}"
REDUCE_COMPRESSED = f"average=None, name=None, compression=none, op=None, {FACTORS}, {G}"

SIGNATURES = {
    "allreduce": f"tensor, {REDUCE_COMPRESSED}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {REDUCE_COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": f"tensor, name, op, {G}",
    "allgather": f"tensor, name=None, {G}",
    "allgather_async": f"tensor, name=None, {G}",
    "grouped_allgather": f"tensors, name=None, {G}",
    "grouped_allgather_async": f"tensors, name=None, {G}",
    "broadcast": f"tensor, root_rank, name=None, {G}",
    "broadcast_async": f"tensor, root_rank, name=None, {G}",
    "broadcast_": f"tensor, root_rank, name=None, {G}",
    "broadcast_async_": f"tensor, root_rank, name=None, {G}",
    "alltoall": f"tensor, splits=None, name=None, {G}",
    "alltoall_async": f"tensor, splits=None, name=None, {G}",
    "reducescatter": f"tensor, name=None, compression=none, op=Average, {G}, {FACTORS}",
    "reducescatter_async": f"tensor, name=None, op=Average, {G}, {FACTORS}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, op=Average, {G}, {FACTORS}",
    "grouped_reducescatter_async": f"tensors, name=None, op=Average, {G}, {FACTORS}",
    "poll": "handle",
    "synchronize": "handle",
    "barrier": G,
    "join": "device=-1",
    "broadcast_parameters": f"params, root_rank, {G}",
    "broadcast_optimizer_state": f"optimizer, root_rank, model=None, {G}",
    "broadcast_object": f"obj, root_rank=0, name=None, {G}",
    "allgather_object": f"obj, name=None, {G}",  # process_set is our addition
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {G}"
    ),
}

ELASTIC_SIGNATURES = {
    "run": "func",
    "leave_at_next_commit": "reason=''",
    "TorchState": "model=None, optimizer=None, kwargs",
    "ElasticSampler": "dataset, shuffle=True, seed=0",
}

# Without arguments.
SIGNATURES |= dict.fromkeys(
    [
        *("shutdown", "is_initialized", "stop_timeline", "mpi_threads_supported", "mpi_enabled", "gloo_enabled"),
        *("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"),
        *("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
    ],
    "",
)
SIGNATURES |= {
    "start_timeline": "file_path, mark_cycles=False",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks_or_comm",
}
# What follows is our addition, by name only.
BEGINNINGS = {
    "init": "comm=None, process_sets=None",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}
REDUCE_OPS = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]  # in the order of their numbers
OTHER_NAMES = ["Compression", "HorovodInternalError", "ReduceOp", "elastic", "global_process_set"]


def _render(function: object) -> str:
    def default(name: str, value: object) -> str:
        if value is hvd.global_process_set:
            return "gps"
        if value is hvd.Compression.none:
            return "none"
        return "Average" if name == "op" and value is not None else repr(value)

    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={default(p.name, p.default)}" for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function = getattr(hvd, name)
    assert _render(function) == SIGNATURES[name]
    assert function.__doc__


@pytest.mark.parametrize("name", BEGINNINGS)
def test_signature_begins(name: str) -> None:
    assert f"{_render(getattr(hvd, name))}, ".startswith(f"{BEGINNINGS[name]}, ")


@pytest.mark.parametrize("name", ELASTIC_SIGNATURES)
def test_signature_of_elastic(name: str) -> None:
    function = getattr(hvd.elastic, name)
    assert _render(function) == ELASTIC_SIGNATURES[name]
    assert function.__doc__
    assert sorted(hvd.elastic.__all__) == sorted(ELASTIC_SIGNATURES)


def test_what_init_adds_is_given_by_name() -> None:
    _, _, *others = inspect.signature(hvd.init).parameters.values()
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}


def test_types_are_said() -> None:
    for name in {*SIGNATURES, "init"} - {"ProcessSet"}:
        signature = inspect.signature(getattr(hvd, name))
        assert signature.return_annotation is not inspect.Signature.empty, name
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name


def test_reduce_ops_are_numbers_in_their_order() -> None:
    assert [getattr(hvd, name) for name in REDUCE_OPS] == list(range(6))


def test_exported_names() -> None:
    assert sorted(hvd.__all__) == sorted([*SIGNATURES, *BEGINNINGS, *REDUCE_OPS, *OTHER_NAMES])
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_mpi_ops_has_the_same_functions() -> None:
    assert callable(mpi_ops.is_homogeneous)
    shared = set(mpi_ops.__all__) - {"gpu_available", "is_homogeneous", "num_rank_is_power_2"}
    assert all(getattr(mpi_ops, name) is getattr(hvd, name) for name in shared)
    assert {name for name in SIGNATURES if "all" in name} - {"allgather_object"} <= shared


def test_numbers_equal_those_of_the_protocol() -> None:
    from horovod.protos.v1 import types_pb2

    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(hvd, name) == types_pb2.ReduceOp.Value(f"REDUCE_OP_{name.upper()}")
    for dtype, code in DTYPE_CODES.items():
        name = str(dtype).removeprefix("torch.").upper()
        assert code == types_pb2.DataType.Value(f"DATA_TYPE_{name}")


def test_importing_has_no_effect() -> None:
    program = (
        "import os, sys, threading; before = dict(os.environ); import horovod; "
        "assert 'torch' not in sys.modules and 'horovod._core' not in sys.modules and 'grpc' not in sys.modules; "
        "assert horovod.__version__; import horovod.torch as hvd; assert not hvd.is_initialized(); "
        "assert 'grpc' not in sys.modules and dict(os.environ) == before and threading.active_count() == 1; "
        "assert callable(horovod.run)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


def test_missing_native_engine_raises() -> None:
    program = (
        "import sys; sys.modules['horovod._core'] = None\n"
        "try:\n    import horovod.torch\nexcept ImportError as error:\n    print('ImportError', error)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.stdout.startswith("ImportError"), finished.stderr


def test_unknown_attribute() -> None:
    import horovod

    with pytest.raises(AttributeError, match="module 'horovod' has no attribute 'fly'"):
        _ = horovod.fly


OLD_PATHS = """
import horovod.torch as hvd
assert hvd.mpi_ops.Sum == hvd.Sum and hvd.mpi_ops.is_homogeneous and hvd.mpi_ops.gpu_available("torch") in (True, False)
assert hvd.functions.broadcast_object is hvd.broadcast_object
assert hvd.compression.Compression is hvd.Compression
assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
assert hvd.elastic.state.TorchState is hvd.elastic.TorchState
assert (hvd.elastic.init, hvd.elastic.shutdown) == (hvd.init, hvd.shutdown)
assert hvd.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
from horovod.torch.mpi_ops import Adasum, allreduce_async_, num_rank_is_power_2, poll, synchronize
from horovod.common.elastic import HostUpdateResult, ObjectState, State, notification_manager, run_fn
from horovod.runner.elastic.worker import HostUpdateResult as same
assert same is HostUpdateResult
from horovod.common.util import (
    ccl_built, check_extension, check_installed_version, ddl_built, env, extension_available, gloo_built, gpu_available,
    is_iterable, mpi_built, nccl_built, num_rank_is_power_2, split_list
)
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod import run
"""


def test_old_import_paths_after_a_plain_import() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_PATHS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
