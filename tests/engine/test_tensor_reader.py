"""Tensors come in as objects of a framework, read in C through DLPack's exchange functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from exchange import CPU, CUDA, FUTURE, ONLY_FUTURE, Made, Special, Tensor, offer
from world import ALLGATHER, ALLREDUCE, ALLREDUCE_SUM, DTYPES, MAX, EngineWorld

from horovod._core import Engine, Handle, OpSpec, TensorReader
from horovod.base.errors import EngineCode, OperationCode


class Described:
    """Describes tensors by their addresses, and remembers which it was asked about."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, tensor: Any) -> tuple[Any, ...]:
        self.asked.append(tensor)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"A Tensor is required, not {type(tensor).__name__}.")
        array = tensor.array
        return array.ctypes.data, array.ctypes.data, DTYPES[str(array.dtype)], array.shape


@pytest.fixture
def engine() -> Iterator[Engine]:
    with EngineWorld(1) as world:
        yield world.engines[0]


def double(engine: Engine, reader: TensorReader, tensors: Any) -> Any:
    return engine.run(OpSpec(ALLREDUCE, prescale=2.0), "allreduce.x", tensors, reader=reader)


DESCRIBED: dict[str, Callable[[np.ndarray], Tensor]] = {
    "a subclass": Special,
    "complex": lambda array: Tensor(array, type_code=5),
    "vectors": lambda array: Tensor(array, type_bits=64, type_code=9),
    "on another device": lambda array: Tensor(array, device_type=10),
    "on a GPU whose stream is unknown": lambda array: Tensor(array, device_type=CUDA, device_id=7),
    "refused": lambda array: Tensor(array, fails=True),
    "transposed": lambda array: Tensor(array, strides=(1, 2)),
    "expanded": lambda array: Tensor(array, strides=(0, 1)),
}


# NumPy has no bfloat16.
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_every_dtype_is_read(engine: Engine, dtype: str) -> None:
    describe = Described()
    array = np.ones((2, 3), dtype)
    engine.run(
        OpSpec(ALLREDUCE, op=MAX, prescale=2.0),
        "allreduce.x",
        (Tensor(array),),
        reader=TensorReader((Tensor,), describe),
    )
    np.testing.assert_array_equal(array, np.full((2, 3), 2).astype(dtype))
    assert describe.asked == []


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), None), ((0,), (1,)), ((2, 0, 3), (5, 5, 5)), ((2, 3), (3, 1)), ((2, 1, 3), (3, 99, 1)), ((1,), (0,))],
    ids=str,
)
def test_what_is_contiguous_is_read(engine: Engine, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    describe = Described()
    array = np.ones(shape, np.float32)
    double(engine, TensorReader((Tensor,), describe), (Tensor(array, strides),))
    assert (array == 2).all()
    assert describe.asked == []


def test_a_tensor_may_begin_behind_its_address(engine: Engine) -> None:
    whole = np.ones(6, np.float32)
    double(engine, TensorReader((Tensor,), Described()), (Tensor(whole[2:4], data=whole.ctypes.data, byte_offset=8),))
    assert whole.tolist() == [1, 1, 2, 2, 1, 1]


@pytest.mark.parametrize("case", DESCRIBED)
def test_what_the_functions_can_not_say_is_described(engine: Engine, case: str) -> None:
    describe = Described()
    array = np.ones((2, 2), np.float32)
    tensor = DESCRIBED[case](array)
    double(engine, TensorReader((Tensor,), describe), (tensor,))
    assert (array == 2).all()
    assert describe.asked == [tensor]


def test_what_is_no_tensor_is_refused_by_the_description(engine: Engine) -> None:
    with pytest.raises(ValueError, match="A Tensor is required, not list"):
        double(engine, TensorReader((Tensor,), Described()), ([1.0],))


def test_the_result_goes_to_another_tensor_or_to_memory_of_the_engine(engine: Engine) -> None:
    reader = TensorReader((Tensor,), Described())
    array, other = np.ones(3, np.float32), np.zeros(3, np.float32)
    double(engine, reader, ((Tensor(array), Tensor(other)),))
    assert (array.tolist(), other.tolist()) == ([1, 1, 1], [2, 2, 2])
    double(engine, reader, ((Special(array), Tensor(other)), (Tensor(array), Special(other))))
    for wrong in (np.zeros(2, np.float32), np.zeros(3, np.int32)):
        with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_TENSOR)):
            double(engine, reader, ((Tensor(array), Tensor(wrong)),))
    with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_TENSOR)):
        double(engine, reader, ((Tensor(array), Tensor(other, device_type=CUDA)),))


@pytest.mark.parametrize("how", ["run", "submit"])
def test_results_in_memory_of_the_engine_are_tensors(engine: Engine, how: str) -> None:
    def gathered(reader: TensorReader) -> Any:
        array = np.arange(6, dtype=np.float32).reshape(3, 2)
        arguments: Any = (OpSpec(ALLGATHER), "allgather.x", ((Tensor(array), None),))
        if how == "run":
            return engine.run(*arguments, reader=reader)
        return engine.submit(*arguments, reader=reader, finish=lambda outputs: outputs).result()

    (made,) = gathered(TensorReader((Tensor,), Described()))
    assert isinstance(made, Made)
    assert (made.version, made.shape, made.strides, made.type) == (1, (3, 2), (2, 1), (2, 32, 1, CPU))
    assert made.array.tolist() == [[0, 1], [2, 3], [4, 5]]
    (output,) = gathered(TensorReader((object,), Described()))  # a framework that can't
    assert np.frombuffer(output, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_functions_of_another_version_lead_to_older_ones(engine: Engine) -> None:
    class Newer(Tensor):
        __dlpack_c_exchange_api__ = offer(FUTURE)

    class TooNew(Tensor):
        __dlpack_c_exchange_api__ = offer(ONLY_FUTURE)

    class Old:
        pass

    for kind, asked in ((Newer, 0), (TooNew, 1)):
        describe = Described()
        array = np.ones(2, np.float32)
        double(engine, TensorReader((kind,), describe), (kind(array),))
        assert (array == 2).all()
        assert len(describe.asked) == asked
    TensorReader((Old,), Described())  # without any
    with pytest.raises(TypeError, match="types must be types"):
        TensorReader((3,), Described())  # type: ignore[arg-type]


INVALID = ends_with(OperationCode.INVALID)
MISUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda e: e.submit(ALLREDUCE_SUM, "x"), TypeError, r"submit\(\) is missing its argument 'tensors'"),
    "too many": (lambda e: e.run(*range(12)), TypeError, r"run\(\) takes at most 6 arguments \(12 given\)"),
    "unknown": (
        lambda e: e.run(ALLREDUCE_SUM, "x", (), colour=1),
        TypeError,
        "got an unexpected keyword argument 'colour'",
    ),
    "twice": (lambda e: e.run(ALLREDUCE_SUM, "x", (), spec=1), TypeError, "multiple values for argument 'spec'"),
    "no spec": (lambda e: e.run(0, "x", ()), RuntimeError, "Unable to cast"),
    "unknown kind": (lambda e: OpSpec(9), ValueError, INVALID),
    "a large kind": (lambda e: OpSpec(1 << 40), TypeError, "incompatible constructor arguments"),
    "unknown op": (lambda e: OpSpec(0, op=9), ValueError, ends_with(OperationCode.INVALID, "9")),
    "no name": (lambda e: e.run(ALLREDUCE_SUM, b"x", ()), TypeError, INVALID),
    "no list": (lambda e: e.run(ALLREDUCE_SUM, "x", 5), TypeError, "tensors must be a sequence"),
    "no number": (lambda e: OpSpec(0, prescale="much"), TypeError, "incompatible constructor arguments"),
    "no reader": (lambda e: e.run(ALLREDUCE_SUM, "x", ("t",), reader=1), RuntimeError, "Unable to cast"),
    "no tensor": (lambda e: e.run(ALLREDUCE_SUM, "x", ("t",)), ValueError, ends_with(EngineCode.INTERNAL)),
    "no dtype": (
        lambda e: e.run(ALLREDUCE_SUM, "x", ((1, 1, 99, (1,)),)),
        ValueError,
        ends_with(EngineCode.INTERNAL, "dtype 99"),
    ),
    "no GPU": (
        lambda e: e.run(ALLREDUCE_SUM, "x", ((1, 1, 7, (1,), -2, 0),)),
        ValueError,
        ends_with(EngineCode.NO_GPU, "GPU -2"),
    ),
    "no engine": (lambda e: Engine.run(3, ALLREDUCE_SUM, "x", ()), TypeError, "doesn't apply to a 'int' object"),
    "a spec that is changed": (lambda e: setattr(OpSpec(0), "root", 1), AttributeError, "OpSpec"),
    "a handle by hand": (lambda e: Handle(), TypeError, "cannot create"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_misuse_is_told(engine: Engine, case: str) -> None:
    call, error, said = MISUSED[case]
    with pytest.raises(error, match=said):
        call(engine)


def test_a_handle_takes_a_stream_by_name_or_place(engine: Engine) -> None:
    reader = TensorReader((Tensor,), Described())
    for ask in (lambda h: h.result(), lambda h: h.result(None), lambda h: h.result(stream=5)):
        array = np.ones(1, np.float32)
        handle = engine.submit(ALLREDUCE_SUM, "allreduce.x", (Tensor(array),), keep="kept", reader=reader)
        assert ask(handle) == "kept"
        assert ask(handle) is None
    handle = engine.submit(ALLREDUCE_SUM, "allreduce.x", (Tensor(array),), reader=reader)
    with pytest.raises(TypeError):
        handle.result("now")  # type: ignore[arg-type]
    assert handle.done()  # it did not end
