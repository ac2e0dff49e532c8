"""hvd.init() and hvd.shutdown() again and again in the same processes, with a coordinator: nothing may add up.

Neither in them nor in the coordinator's process, which does nothing else. HOROVOD_TEST_INITS sets how often, for
example for the full 10,000: HOROVOD_TEST_INITS=10000 python -m pytest tests/runtime/test_init_cycles.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiers
from runtime_harness import DEADLINE_SECONDS, Program

CYCLES = int(os.environ.get("HOROVOD_TEST_INITS", str(tiers.pick(15, 100))))
MEASURE = f"""
sys.path.append({str(Path(__file__).parents[1])!r})
from resources import held, leaks
"""
RANK = f"""{MEASURE}
def cycles(count):
    for cycle in range(count):
        hvd.init()
        assert allreduce("x") == 2.0
        hvd.shutdown()

cycles(10)
print("warm", flush=True)
sys.stdin.readline()
before = held()
cycles({CYCLES})
print(leaks(before))
"""
COORDINATOR = f"""{MEASURE}
from horovod.coordinator.server import EmbeddedCoordinator

with EmbeddedCoordinator() as coordinator:
    print(coordinator.address, flush=True)
    sys.stdin.readline()
    before = held()
    print("measured", flush=True)
    sys.stdin.readline()
    print(leaks(before))
"""


@pytest.mark.longer
@pytest.mark.timeout(120 + CYCLES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_init_and_shutdown(transport: str) -> None:
    with Program(COORDINATOR) as coordinator:
        environment = {
            "HOROVOD_COORDINATOR": coordinator.line(),
            "HOROVOD_SIZE": "2",
            "HOROVOD_TRANSPORT": transport,
        }
        with Program(RANK, **environment) as one, Program(RANK, **environment) as other:
            for program in (one, other):
                assert program.line() == "warm"
            coordinator.tell()
            assert coordinator.line() == "measured"
            for program in (one, other):
                program.tell()
            for program in (one, other):
                assert program.finish(DEADLINE_SECONDS + CYCLES) == "{}"
        assert coordinator.finish() == "{}"
