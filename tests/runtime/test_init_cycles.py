"""hvd.init() and hvd.shutdown() again and again in the same processes, with a coordinator: nothing may add up.

Neither in them nor in the coordinator's process, which is this one. HOROVOD_TEST_INITS sets how often, for example for
the full 10,000: HOROVOD_TEST_INITS=10000 python -m pytest tests/runtime/test_init_cycles.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiers
from resources import held, leaks
from runtime_harness import DEADLINE_SECONDS, Program

from horovod.coordinator.server import EmbeddedCoordinator

CYCLES = int(os.environ.get("HOROVOD_TEST_INITS", str(tiers.pick(15, 100))))
SCRIPT = f"""
sys.path.append({str(Path(__file__).parents[1])!r})
from resources import held, leaks

def cycles(count):
    for cycle in range(count):
        hvd.init()
        assert allreduce("x") == 2.0
        hvd.shutdown()

cycles(10)
print("warm", flush=True)
before = held()
cycles({CYCLES})
print(leaks(before))
"""


@pytest.mark.longer
@pytest.mark.timeout(120 + CYCLES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_init_and_shutdown(coordinator: EmbeddedCoordinator, transport: str) -> None:
    environment = {
        "HOROVOD_COORDINATOR": coordinator.address,
        "HOROVOD_SIZE": "2",
        "HOROVOD_TRANSPORT": transport,
    }
    with Program(SCRIPT, **environment) as one, Program(SCRIPT, **environment) as other:
        for program in (one, other):
            assert program.line() == "warm"
        before = held()
        for program in (one, other):
            assert program.finish(DEADLINE_SECONDS + CYCLES) == "{}"
    assert not leaks(before)
