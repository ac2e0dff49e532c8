"""A world of one, in this process: every call works without launcher or coordinator; wrong use is refused in words."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import refusals
import torch
from error_codes import ends_with
from op_cases import DTYPES, EIGHT_BIT_FLOATS, OPERATIONS, run_case

import horovod.torch as hvd
from horovod.base.errors import OperationCode
from horovod.common.ops import handles
from horovod.worker.runtime.context import current


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOROVOD_COORDINATOR", "HOROVOD_SIZE", "HOROVOD_RANK"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def test_every_collective() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        assert torch.equal(hvd.allreduce(x, op=op, prescale_factor=2.0), 2 * x)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    assert torch.equal(hvd.alltoall(x), x)
    assert hvd.alltoall(x, [1])[1].tolist() == [1]
    assert torch.equal(hvd.reducescatter(x), x)
    assert torch.equal(hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Average)().to_dense(), x)
    hvd.barrier()
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object("a") == ["a"]


def test_empty_groups() -> None:
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allreduce_([]) == ()
    assert hvd.grouped_allgather([]) == ()
    assert hvd.grouped_reducescatter([]) == []
    handle = hvd.grouped_allreduce_async([])
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) == ()


def test_optimizer_without_others_is_the_plain_one() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    for _ in range(2):  # nothing is in flight, so nothing forbids two passes
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_an_elastic_world_of_one_reduces_because_it_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    def submitted() -> int:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        before = current().counters()["submitted"]
        weight.sum().backward()
        optimizer.step()
        assert weight.tolist() == [0.0, 0.0]
        return current().counters()["submitted"] - before

    assert submitted() == 0
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    hvd.init()
    assert submitted() == 1


X = torch.ones(4)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matches_numpy(operation: str) -> None:
    for dtype in (*DTYPES, *EIGHT_BIT_FLOATS):
        run_case(operation, dtype)


def test_wrong_use_is_refused_in_words() -> None:
    refusals.run_in_the_world()


def test_average_is_deprecated_but_works() -> None:
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        hvd.allreduce(X, average=True)
    with pytest.warns(DeprecationWarning, match="op=hvd.Sum"):
        hvd.allreduce_(X.clone(), average=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(X)


# -- handles -----------------------------------------------------------------------------------------------------------
def test_handle_is_forgotten_after_synchronize() -> None:
    handle = hvd.allreduce_async(X)
    result = hvd.synchronize(handle)
    assert torch.equal(result, X)
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(98765) is None
    with pytest.raises(ValueError, match=ends_with(OperationCode.CLEARED_HANDLE)):
        hvd.poll(handle)


class _Part:
    """Stands for an operation that ends when the test says so; how the engine's own handles behave is tested there."""

    device = None

    def __init__(self, value: int) -> None:
        self._value = value
        self.over = self.failed = False

    def done(self) -> bool:
        return self.over

    def result(self) -> int:
        if self.failed:
            raise hvd.HorovodInternalError("lost")
        if not self.over:
            raise KeyboardInterrupt
        return self._value


def _parted(*parts: _Part) -> handles.PartedHandle:
    return handles.PartedHandle(parts, tuple)  # type: ignore[arg-type]


def test_interrupted_wait_for_several_parts_goes_on_where_it_was() -> None:
    parts = [_Part(70), _Part(80)]
    handle = _parted(*parts)
    for part in parts:
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        assert not hvd.poll(handle)
        part.over = True
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) == (70, 80)
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match=ends_with(OperationCode.CLEARED_HANDLE)):
        hvd.poll(handle)


def test_a_failed_part_fails_the_whole_and_lets_go_of_the_rest() -> None:
    parts = [_Part(70), _Part(80)]
    parts[0].failed = True
    rest = weakref.ref(parts[1])
    handle = _parted(*parts)
    del parts
    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    gc.collect()
    assert rest() is None


# -- memory and compression -------------------------------------------------------------------------------------------
def test_gathered_memory_outlives_everything_else() -> None:
    result = hvd.allgather(torch.arange(1000))
    view = result[10:20]
    del result
    gc.collect()
    [hvd.allgather(torch.zeros(1000, dtype=torch.int64)) for _ in range(10)]
    assert view.tolist() == list(range(10, 20))
    view += 1  # and it is ours to write to
    assert view[0].item() == 11


def test_compression() -> None:
    x = torch.tensor([1.0, 1 / 3])
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        small, context = compression.compress(x)
        assert small.dtype == dtype
        assert compression.decompress(small, context).dtype == torch.float32
        whole = torch.arange(3)
        assert compression.compress(whole)[0] is whole
        assert hvd.allreduce(x, compression=compression).tolist() == x.to(dtype).float().tolist()
        assert hvd.grouped_allreduce([x, whole], compression=compression)[1].tolist() == [0, 1, 2]
    assert hvd.Compression.none.compress(x)[0] is x
