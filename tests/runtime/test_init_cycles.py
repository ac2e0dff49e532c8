"""hvd.init() and hvd.shutdown() again and again in the same processes, with a coordinator: nothing may add up.

HOROVOD_TEST_INITS sets how often.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runtime_harness import Program

from horovod.coordinator.server import EmbeddedCoordinator

CYCLES = int(os.environ.get("HOROVOD_TEST_INITS", "50"))
SCRIPT = f"""
sys.path.append({str(Path(__file__).parents[1])!r})
from resources import held, leaks

def cycles(count):
    for cycle in range(count):
        hvd.init()
        assert allreduce("x") == 2.0
        hvd.shutdown()

cycles(10)
before = held()
cycles({CYCLES})
print(leaks(before))
"""


@pytest.mark.slow
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
            assert program.finish().strip() == "{}"
