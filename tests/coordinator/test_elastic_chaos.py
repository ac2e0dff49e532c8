"""Whatever processes of an elastic job do, its worlds are whole, and nobody is forgotten."""

import pytest
import tiers
from elastic_chaos import Chaos


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_whatever_processes_do_nobody_is_forgotten() -> None:
    count = tiers.pick(200, 4_000)
    worlds = sum(Chaos(seed).play() for seed in range(count))
    assert worlds > 3 * count
