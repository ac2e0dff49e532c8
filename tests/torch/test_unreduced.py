"""An optimizer that was never distributed is told after some steps, unless the script reduces by hand."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
from optimizer_model import distributed_sgd, linear
from worlds import World

from horovod.base.errors import TrainingCode

CODE = f"[{TrainingCode.NOT_DISTRIBUTED.value}]"


def _train(case: str) -> list[str]:
    import torch

    import horovod.torch as hvd
    from horovod.common import unreduced as common
    from horovod.torch import unreduced

    unreduced.watch.over()  # that of the process, in which other tests may have made distributed optimizers
    common.watch = common.Watch()
    unreduced.watch = unreduced.Unreduced()  # type: ignore[misc]
    # Larger than what an earlier test in these processes may have left on its way.
    model = torch.nn.Embedding(100_000, 4, sparse=True) if "rows" in case else torch.nn.Linear(64, 64)
    data = torch.tensor([1, 2]) if "rows" in case else torch.ones(2, 64)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    other = distributed_sgd(linear()) if case == "another is distributed" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(common.STEPS + 5):
            optimizer.zero_grad()
            model(data).sum().backward()
            if case == "gradients by hand":
                for parameter in model.parameters():
                    hvd.allreduce_(parameter.grad)
            if case == "rows by hand":
                model.weight.grad = hvd.sparse_allreduce_async(model.weight.grad, "rows", hvd.Average)()
            optimizer.step()
            if case == "weights now and then" and step == 50:
                for parameter in model.parameters():
                    hvd.allreduce_(parameter.data)
            if case == "a loss now and then" and step % 50 == 0:
                hvd.allreduce(torch.zeros(1))
    unreduced.watch.over()
    del other
    return [f"{one.filename}: {one.message}" for one in caught if CODE in str(one.message)]


@pytest.mark.parametrize("case", ["nothing", "a loss now and then", "rows of nothing"])
def test_an_optimizer_that_is_not_distributed_is_told_once_on_rank_0(pair: World, case: str) -> None:
    on_0, on_1 = pair.run(_train, case)
    assert len(on_0) == 1
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    assert "named_parameters=model.named_parameters()" in on_0[0]
    assert on_1 == []


@pytest.mark.parametrize(
    "case", ["gradients by hand", "rows by hand", "weights now and then", "another is distributed"]
)
def test_what_is_reduced_otherwise_is_not(pair: World, case: str) -> None:
    assert pair.run(_train, case) == [[], []]


def test_a_rank_that_is_alone_reduces_nothing() -> None:
    with World(1, "shm") as world:
        assert world.run(_train, "nothing") == [[]]


def _steps_in_a_child() -> int:
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=_one_step)
    child.start()
    child.join()
    return child.exitcode or 0


def _one_step() -> None:
    import torch

    from horovod.common import unreduced as common
    from horovod.torch import unreduced

    common.watch = common.Watch()
    unreduced.watch = unreduced.Unreduced()  # type: ignore[misc]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], 1.0).step()
    assert parameter.tolist() == [0, 0]


def test_a_child_of_a_rank_may_train_something_of_its_own(pair: World) -> None:
    assert pair.run(_steps_in_a_child) == [0, 0]


def _imported_late(folder: str) -> list[str]:
    from horovod.common import unreduced

    unreduced.watch = unreduced.Watch()
    sys.path.insert(0, folder)
    seen: list[str] = []

    def install() -> None:
        seen.append(getattr(sys.modules.get("comes_late"), "NAME", "nothing"))

    unreduced.when_in_a_world(install, "comes_late")
    assert importlib.util.find_spec("comes_late") is not None  # asks whether it is there
    late = importlib.import_module("comes_late")
    importlib.reload(late)
    unreduced.watch.over()
    assert not any(type(one) is type(unreduced._later) for one in sys.meta_path)
    return seen


def test_a_framework_may_be_imported_after_init(pair: World, tmp_path: Path) -> None:
    package = tmp_path / "comes_late"
    package.mkdir()
    (package / "__init__.py").write_text("from comes_late import part\nNAME = part.NAME\n")
    (package / "part.py").write_text("NAME = 'whole'\n")
    assert pair.run(_imported_late, str(tmp_path)) == [["nothing", "whole"]] * 2
