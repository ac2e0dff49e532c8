"""The framework-independent public pieces: exceptions, process sets as values, what is built, small helpers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from error_codes import ends_with

from horovod.base.errors import TrainingCode, WorldCode
from horovod.common import basics, exceptions, util
from horovod.common.process_sets import ProcessSet, global_process_set


def test_exceptions():
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    assert issubclass(exceptions.HostsUpdatedInterrupt, RuntimeError)
    error = exceptions.HorovodVersionMismatchError("torch", "2.1", "2.2")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.2")
    assert "torch is installed with version 2.2" in str(error)


def test_exceptions_need_neither_the_native_library_nor_a_framework():
    script = (
        "import sys; import horovod.common.exceptions; "
        "print([m for m in ('horovod._core', 'grpc', 'torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_what_is_built_is_known_before_init():
    assert not basics.is_initialized()
    for built in (basics.mpi_built, basics.ddl_built, basics.ccl_built):
        assert built() is False
    assert basics.gloo_built() is util.gloo_built(verbose=True) is basics.gloo_enabled() is True
    assert basics.rocm_built() is basics.mpi_enabled() is False
    assert type(basics.cuda_built()) is bool
    assert type(basics.nccl_built()) is int
    assert util.mpi_built(verbose=True) is util.ddl_built() is util.ccl_built() is False
    assert util.nccl_built() == basics.nccl_built()  # what it is: tests/engine/test_gpu_libraries.py


def test_reduction_constants_are_those_of_the_contract():
    from horovod.protos.v1 import types_pb2

    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(basics, name) == types_pb2.ReduceOp.Value(f"REDUCE_OP_{name.upper()}")


def test_a_process_set_that_is_not_registered():
    process_set = ProcessSet([2, 0])
    assert process_set.ranks == [0, 2]
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    assert process_set.size() is None
    assert process_set.rank() is None
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
        process_set.included()


def test_the_global_process_set_before_init():
    assert global_process_set.process_set_id == 0
    assert global_process_set.size() is global_process_set.rank() is global_process_set.included() is None


@pytest.mark.parametrize("ranks", [[0.5], ["0"], "01", 3, [True]])
def test_a_process_set_takes_integers_only(ranks):
    with pytest.raises(ValueError, match=ends_with(WorldCode.INVALID_PROCESS_SET, repr(ranks))):
        ProcessSet(ranks)


def test_membership_of_a_registered_set():
    basics.init()
    try:
        mine, theirs = ProcessSet([0]), ProcessSet([1])
        mine.process_set_id, theirs.process_set_id = 5, 6
        assert (mine.size(), mine.rank(), mine.included()) == (1, 0, True)
        assert (theirs.size(), theirs.included()) == (1, False)
        with pytest.raises(ValueError, match=r"^Process is not part of provided process set\. \[not-in-process-set\]$"):
            theirs.rank()
    finally:
        basics.shutdown()


@pytest.mark.parametrize(
    ("items", "parts", "expected"),
    [
        ([1, 2, 3, 4, 5], 2, [[1, 2, 3], [4, 5]]),
        ([1, 2], 3, [[1], [2], []]),
        ([], 1, [[]]),
        ([1, 2, 3], 3, [[1], [2], [3]]),
    ],
)
def test_split_list(items, parts, expected):
    assert util.split_list(items, parts) == expected


def test_split_list_into_nothing():
    with pytest.raises(ValueError, match="at least 1 part"):
        util.split_list([1], 0)


def test_small_helpers():
    assert [n for n in range(-2, 17) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.is_iterable("ab")
    assert not util.is_iterable(3)
    assert util.extension_available("torch")
    assert not util.extension_available("caffe", verbose=True)
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    util.check_installed_version("pytorch", "2.1")
    with pytest.raises(ValueError, match="mxnet"):
        util.gpu_available("mxnet")


def test_env_puts_everything_back(monkeypatch):
    monkeypatch.setenv("HOROVOD_TEST_A", "1")
    with contextlib.suppress(KeyError), util.env(HOROVOD_TEST_A=None, HOROVOD_TEST_B="2"):
        assert "HOROVOD_TEST_A" not in os.environ
        assert os.environ["HOROVOD_TEST_B"] == "2"
        raise KeyError
    assert os.environ["HOROVOD_TEST_A"] == "1"
    assert "HOROVOD_TEST_B" not in os.environ
