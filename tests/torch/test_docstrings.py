"""Every public name of horovod.torch explains itself, and the examples in its docstring are true on two real ranks.

What differs between the ranks is written `value  # on rank 0; value on rank 1`.
"""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import Keeper

import horovod.torch as hvd
from horovod.torch import compression, mpi_ops

NO_FUNCTIONS = {"Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum", "elastic", "global_process_set"}
WITHOUT_EXAMPLE = {"Compression", "HorovodInternalError"}  # values to pass and an error to catch
NEVER_RAISE = {*WITHOUT_EXAMPLE, "is_initialized", "mpi_enabled", "gloo_enabled"} | {
    name for name in hvd.__all__ if name.endswith("_built")
}
OBJECTS: dict[str, Any] = {
    **{name: getattr(hvd, name) for name in hvd.__all__ if name not in NO_FUNCTIONS},
    **{f"elastic.{name}": getattr(hvd.elastic, name) for name in hvd.elastic.__all__},
    "is_homogeneous": mpi_ops.is_homogeneous,
    "Compressor": compression.Compressor,
    "GradientCompressor": compression.GradientCompressor,
}
COLLECTIVES = sorted(
    name
    for name in OBJECTS
    if name.rstrip("_")
    .removesuffix("_async")
    .endswith(("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"))
)


def _doc(name: str) -> str:
    return inspect.getdoc(OBJECTS[name]) or ""


@pytest.mark.parametrize("name", sorted(set(OBJECTS) - NEVER_RAISE - {"Compressor", "GradientCompressor"}))
def test_it_says_what_it_raises(name: str) -> None:
    assert "aise" in _doc(name)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_says_which_shapes_and_dtypes_it_takes(name: str) -> None:
    doc = _doc(name)
    assert "hape" in doc
    assert "dtype" in doc or "bfloat16" in doc


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    environment = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": "DYNAMIC"}
    with Keeper(2, "auto", environment) as keeper:
        yield keeper


def _expected(want: str, rank: int) -> str:
    if "# on rank 0; " not in want:
        return want
    first, second = want.strip().split("# on rank 0; ")
    return (first.rstrip() if rank == 0 else second.removesuffix(" on rank 1")) + "\n"


def _play(name: str, doc: str, folder: str) -> int:
    """Runs the examples in a docstring; their number."""
    import collections
    import os

    import torch

    os.chdir(folder)
    test = doctest.DocTestParser().get_doctest(
        doc,
        {
            "collections": collections,
            "hvd": hvd,
            "torch": torch,
            "model": (model := torch.nn.Linear(2, 1)),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "tensor": torch.ones(2),
            "Compressor": compression.Compressor,
            "GradientCompressor": compression.GradientCompressor,
        },
        name,
        None,
        None,
    )
    for example in test.examples:
        example.want = _expected(example.want, hvd.rank())
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
    return len(test.examples)


@pytest.mark.parametrize("name", sorted(set(OBJECTS) - WITHOUT_EXAMPLE))
def test_the_example_is_true(keeper: Keeper, tmp_path: Path, name: str) -> None:
    counts = keeper.get().run(_play, name, _doc(name), str(tmp_path))
    assert counts[0] == counts[1] > 0
