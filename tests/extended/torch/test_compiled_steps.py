"""Steps under torch.compile with its default backend, other optimizers and compiled autograd train like plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compiled_steps
import pytest
from worlds import World

LONG_SECONDS = 500.0  # a busy machine takes a minute and more to compile a step


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Ranks whose compiled code stands in a folder of these tests, and who start no processes to compile."""
    folder = str(tmp_path_factory.mktemp("inductor"))
    environment = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with World(2, environment=environment) as world:
        yield world


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        ("whole", {}),
        ("whole", {"traced_backward": True}),
        ("forward and backward", {"kind": "AdamW", "groups": 2, "marked": True}),
        ("optimizer", {"kind": "RMSprop", "clip": True}),
    ],
    ids=str,
)
def test_inductor(compiling: World, compiled: str, options: dict[str, Any]) -> None:
    compiled_steps.check(compiling, compiled, "inductor", deadline_seconds=LONG_SECONDS, **options)


def _adasum(compiled: str) -> Any:
    import horovod.torch as hvd

    return compiled_steps.train(compiled, "aot_eager", "SGD", False, False, False, op=hvd.Adasum)


@pytest.mark.parametrize("compiled", ["whole", "optimizer"])
def test_adasum(pair: World, compiled: str) -> None:
    expected, found = (pair.run(_adasum, one) for one in ("no", compiled))
    for weights, wanted in zip(found[0], expected[0], strict=True):
        assert weights == pytest.approx(wanted, rel=1e-9, abs=1e-11)
