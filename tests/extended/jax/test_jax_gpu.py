"""Arrays on a GPU. There is none here, so JAX compiles nothing for one and has no such arrays.

The handler of XLA's platform CUDA is called by xla_on_gpu.cc as XLA calls it, with the driver and NCCL that stand in
for the real ones (tests/native/gpu). What JAX hands to XLA for that platform it tells without a GPU. And for the way
that calls outside of compiled functions take, arrays on the CPU are taken for arrays on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from gpu_world import DeviceArray, GpuMember, GpuWorld, StandIns, now
from native_builds import ROOT, run, tool
from world import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from worlds import World

from horovod import _core
from horovod.base.errors import OperationCode, code_of

Addresses = ctypes.POINTER(ctypes.c_void_p)
Rows = ctypes.POINTER(ctypes.c_int64)

pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Xla:
    """The handler for GPUs, and what stands in for XLA around it."""

    def __init__(self, library: Path) -> None:
        self._caller = ctypes.CDLL(str(library))
        self._caller.xla_engine_api.argtypes, self._caller.xla_engine_api.restype = [ctypes.c_void_p], ctypes.c_void_p
        self._caller.xla_traits_of.argtypes, self._caller.xla_traits_of.restype = [ctypes.c_void_p], ctypes.c_int64
        self._caller.xla_call.restype = ctypes.c_char_p
        self._caller.xla_call.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32),
            *(ctypes.c_int64, Addresses, Rows, Addresses, Rows),
        )
        ours = ctypes.CDLL(str(Path(_core.__file__).with_name("libhorovod_jax.so")))
        ours.horovod_jax_handler.restype = ctypes.c_void_p
        self._no_sets = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(lambda _: 0)
        api = self._caller.xla_engine_api(pointer_of(_core.C_API, b"horovod._core.C_API"))
        ours.horovod_jax_begin(ctypes.c_void_p(api), self._no_sets)
        self._handler = ours.horovod_jax_handler(1)

    def traits(self) -> int:
        return int(self._caller.xla_traits_of(self._handler))

    def call(
        self,
        member: GpuMember,
        kind: _core.OpType,
        given: Sequence[DeviceArray],
        into: Sequence[DeviceArray],
        device: int | None = None,
    ) -> str:
        """The sentence of its error, or "". Broadcasts are of rank 1, reductions sums."""
        engine = member.engine.c_engine()
        count = len(given)
        numbers = [(ctypes.c_int64 * count)(*(one.shape[0] for one in arrays)) for arrays in (given, into)]
        places = [(ctypes.c_void_p * count)(*(one.address for one in arrays)) for arrays in (given, into)]
        sentence: bytes = self._caller.xla_call(
            self._handler,
            pointer_of(engine, b"horovod.engine"),
            member.current_stream,
            member.gpu.ordinal if device is None else device,
            f"{kind.name.lower()}.jit.noname".encode(),
            int(kind),
            count,
            places[0],
            numbers[0],
            places[1],
            numbers[1],
        )
        return sentence.decode()


@pytest.fixture(scope="module")
def xla(tmp_path_factory: pytest.TempPathFactory) -> Xla:
    (jaxlib,) = importlib.util.find_spec("jaxlib").submodule_search_locations  # type: ignore[union-attr, misc]
    library = tmp_path_factory.mktemp("xla") / "xla_on_gpu.so"
    options = ("-std=c++17", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-shared", "-fPIC")
    source = Path(__file__).with_name("xla_on_gpu.cc")
    run(tool("c++"), *options, f"-I{ROOT / 'csrc'}", f"-I{jaxlib}/include", str(source), "-o", str(library))
    return Xla(library)


def on_each_rank(body: Callable[[GpuMember], Any]) -> list[Any]:
    def with_a_stream(member: GpuMember) -> Any:
        member.current_stream = member.gpu.stream()
        return body(member)

    with GpuWorld(StandIns(), 2, "shm") as world:
        return world.run(with_a_stream)


RESULTS = {  # of arange(4) + 10 * rank
    ALLREDUCE: [[10, 12, 14, 16]] * 2,
    BROADCAST: [[10, 11, 12, 13]] * 2,
    ALLGATHER: [[0, 1, 2, 3, 10, 11, 12, 13]] * 2,
    ALLTOALL: [[0, 1, 10, 11], [2, 3, 12, 13]],
    REDUCESCATTER: [[10, 12], [14, 16]],
}


def test_collectives_come_after_what_xla_has_queued_and_before_what_follows(xla: Xla) -> None:
    def body(member: GpuMember) -> None:
        stream = member.current_stream
        for kind, results in RESULTS.items():
            wanted = np.array(results[member.rank], np.float32)
            into = [member.array(np.zeros_like(wanted)) for _ in range(2)]
            member.gpu.synchronize(stream)
            held = member.gpu.hold(stream)
            given = [member.array(np.arange(4, dtype=np.float32) + 10 * member.rank) for _ in range(2)]
            if kind in (ALLREDUCE, BROADCAST):
                into[1] = given[1]  # as XLA does where nothing else needs the argument
            assert xla.call(member, kind, given, into) == ""
            assert not now(into[0]).any()
            member.gpu.release(held)
            for one in into:
                np.testing.assert_array_equal(one.numpy(stream), wanted)

    on_each_rank(body)


def test_what_goes_wrong_is_an_error_of_xla_with_our_sentence(xla: Xla) -> None:
    def body(member: GpuMember) -> list[str]:
        four = member.array(np.ones(4, np.float32))
        other = member.array(np.ones(4, np.float32))
        said = [
            xla.call(member, ALLGATHER, [four], [four]),  # for eight rows
            xla.call(member, BROADCAST, [four], [other], device=7),
            xla.call(member, ALLREDUCE, [four], [four], device=7),
        ]
        assert xla.call(member, ALLREDUCE, [four], [four]) == ""
        np.testing.assert_array_equal(four.numpy(member.current_stream), np.full(4, 2))
        return said

    codes = [OperationCode.MISMATCHED, OperationCode.WRONG_GPU, OperationCode.WRONG_GPU]
    for said in on_each_rank(body):
        assert [code_of(sentence) for sentence in said] == codes, said


def test_xla_leaves_the_calls_out_of_cuda_graphs(xla: Xla) -> None:
    """They wait for other ranks, so a graph can't contain them; XLA asks the handler."""
    assert xla.traits() == 0


def _lowered() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    traced = jax.jit(lambda x: (hvd.allreduce(x), hvd.allgather(x))).trace(jnp.ones(3))
    for_cpu, for_gpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda"))
    assert for_gpu.count("custom_call @horovod(") == 2
    assert for_gpu == for_cpu
    for platform in ("tpu", "rocm"):
        with pytest.raises(NotImplementedError, match=ends_with(OperationCode.UNSUPPORTED_DEVICE)):
            traced.lower(lowering_platforms=(platform,))


def test_jax_hands_xla_the_same_calls_for_a_gpu(jax_pair: World) -> None:
    jax_pair.run(_lowered)


def _outside_of_compiled_functions() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd
    from horovod.jax import devices, primitive

    compiled = []
    original = devices.is_on_gpu, primitive.is_on_gpu, primitive._compiled
    devices.is_on_gpu = primitive.is_on_gpu = lambda array: isinstance(array, jax.Array)

    def counted(call: Any, *tensors: Any) -> Any:
        compiled.append(call.kind.name)
        return original[2](call, *tensors)

    primitive._compiled = counted
    try:
        rank = hvd.rank()
        mine = jnp.arange(2.0) + 10 * rank
        assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [10, 12]
        assert hvd.broadcast(mine, root_rank=1).tolist() == [10, 11]
        assert hvd.reducescatter(mine, op=hvd.Sum).tolist() == [[10], [12]][rank]
        assert compiled == ["ALLREDUCE", "BROADCAST", "REDUCESCATTER"]
        assert hvd.allgather(mine[rank:]).tolist() == [0, 1, 11]
        rows, received = hvd.alltoall(mine, splits=[2 - rank, rank])
        assert (rows.tolist(), received.tolist()) == [([0, 1, 10], [2, 1]), ([11], [0, 1])][rank]
        assert jax.grad(lambda x: (hvd.allgather(x) * jnp.arange(3)).sum())(mine[rank:]).tolist() == [[0, 1], [2]][rank]
        tree = hvd.broadcast_parameters({"w": mine, "numpy": np.full(2, rank), "key": jax.random.key(rank)}, 1)
        assert (tree["w"].tolist(), tree["numpy"].tolist()) == ([10, 11], [1, 1])
        assert tree["key"] == jax.random.key(1)
    finally:
        devices.is_on_gpu, primitive.is_on_gpu, primitive._compiled = original


def test_calls_outside_of_compiled_functions(jax_pair: World) -> None:
    jax_pair.run(_outside_of_compiled_functions)
