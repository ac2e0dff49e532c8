"""What ranks and driver hear when something fails, and that nothing is left. One node of a real Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table
from resources import eventually

from horovod.base.errors import OperationCode
from horovod.launch.task import UnpicklableResultError
from horovod.ray import RayExecutor

Make = Callable[..., RayExecutor]
pytestmark = pytest.mark.usefixtures("one_node")

NEVER_S = 100_000  # nothing here waits for the start timeout


def gone(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def coordinators() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "horovod-coordinator"}


def no_group_is_left() -> bool:
    return {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.fixture(scope="module")
def trio(one_node: Any) -> Iterator[RayExecutor]:
    """Three ranks, for tests that leave them as they are, and for the one that ends them."""
    running = RayExecutor(RayExecutor.create_settings(timeout_s=NEVER_S), num_workers=3)
    running.start()
    yield running
    running.shutdown()


def test_a_function_that_raises_frees_its_peers(trio: RayExecutor) -> None:
    pids = trio.run(os.getpid)

    # In a world.
    refs = trio.run_remote(ray_ranks.until_told, args=[ray_ranks.fail])
    for told in ray.get([refs[0], refs[2]]):
        assert "its function raised ZeroDivisionError: out of coffee" in told
        assert f"[{OperationCode.SHUT_DOWN}]" in told
    with pytest.raises(ZeroDivisionError, match="out of coffee"):
        ray.get(refs[1])
    with pytest.raises(ZeroDivisionError, match="out of coffee"):  # whoever is the first to raise
        trio.run(ray_ranks.until_told, args=[ray_ranks.fail, 1, True])

    # The next call makes another world of the same processes.
    first = trio.run(ray_ranks.place)
    assert [one["rank"] for one in first] == [0, 1, 2]
    assert {one["sum"] for one in first} == {3.0}
    assert [one["pid"] for one in first] == pids

    # The driver does not wait any more: ranks that are in a world are freed all the same.
    with pytest.raises(KeyboardInterrupt):
        trio.run(ray_ranks.until_told, callbacks=[lambda info: signal.raise_signal(signal.SIGINT)])
    assert [one["pid"] for one in trio.run(ray_ranks.place)] == pids

    # Before it is in a world.
    def before_init() -> str:
        from horovod.common import basics as hvd

        hvd.shutdown()
        if os.environ["HOROVOD_RANK"] == "2":
            ray_ranks.fail()
        try:
            ray_ranks.place()
        except ValueError as error:
            return str(error)
        return ""

    refs = trio.run_remote(before_init)
    with pytest.raises(ZeroDivisionError, match="out of coffee"):
        ray.get(refs[2])
    for told in ray.get(refs[:2]):
        assert "rank 2" in told
        assert "raised ZeroDivisionError: out of coffee" in told
    assert {one["sum"] for one in trio.run(ray_ranks.place)} == {3.0}

    # Its result can't be sent.
    def locked() -> Any:
        from horovod.common import basics as hvd

        hvd.init()
        ray_ranks.allreduce("begin")
        return {"lock": threading.Lock()} if hvd.rank() == 1 else str(ray_ranks.lost())

    refs = trio.run_remote(locked)
    facts = "of type dict", "['lock'] is of type _thread.lock"
    with pytest.raises(UnpicklableResultError, match=ends_with(OperationCode.UNPICKLABLE, *facts)):
        ray.get(refs[1])
    assert all("UnpicklableResultError" in told for told in ray.get([refs[0], refs[2]]))


def test_a_killed_actor(trio: RayExecutor) -> None:
    pids = trio.run(os.getpid)
    refs = trio.run_remote(ray_ranks.until_told, args=[ray_ranks.kill])
    for told in ray.get([refs[0], refs[2]]):
        assert re.search(ends_with(OperationCode.PEER_LOST, "rank 1 (pid "), told)
    with pytest.raises(RayActorError):
        trio.run(ray_ranks.place)
    trio.shutdown()
    assert eventually(lambda: gone(pids))
    assert eventually(no_group_is_left)


def test_a_class_that_raises_leaves_nothing(executor: Make) -> None:
    class Failing:
        def __init__(self) -> None:
            if os.environ["HOROVOD_RANK"] == "0":
                ray_ranks.fail()
            ray_ranks.place()

    of_others = coordinators()
    running = executor(num_workers=2, timeout_s=NEVER_S)
    with pytest.raises(ZeroDivisionError, match="out of coffee"):
        running.start(Failing)
    assert not hasattr(running, "adapter")
    assert eventually(no_group_is_left)
    assert coordinators() <= of_others


def test_shutdown_in_the_middle(executor: Make) -> None:
    of_others = coordinators()
    running = executor(num_workers=2)
    running.start()
    assert len(coordinators()) == len(of_others) + 1
    pids = running.run(os.getpid)
    begun, raised = threading.Event(), []

    def train() -> None:
        try:
            running.run(ray_ranks.until_told, callbacks=[lambda info: begun.set()])
        except RayActorError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)
    running.shutdown()
    thread.join(60)
    assert len(raised) == 1
    assert eventually(lambda: gone(pids))
    assert eventually(no_group_is_left)
    assert coordinators() <= of_others


DRIVER = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell without job control has it ignored in the background
sys.path[:0] = [sys.argv[2]]
import ray
import ray_ranks
from horovod.ray import RayExecutor

ray.init(sys.argv[1], log_to_driver=False)
ray.cloudpickle.register_pickle_by_value(ray_ranks)
executor = RayExecutor(RayExecutor.create_settings(timeout_s=200), num_workers=2)
executor.start()
executor.run(ray_ranks.until_told, callbacks=[lambda info: print(info["pid"], flush=True)])
"""


def test_drivers_that_end(one_node: Any) -> None:
    """One is killed, one gets Ctrl-C."""
    address = one_node.address_info["gcs_address"]
    command = [sys.executable, "-c", DRIVER, address, os.path.dirname(ray_ranks.__file__)]
    with contextlib.ExitStack() as stack:
        drivers = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        pids = [int(driver.stdout.readline()) for driver in drivers for _ in range(2) if driver.stdout is not None]
        errors = []
        for driver, number in zip(drivers, (signal.SIGKILL, signal.SIGINT), strict=True):
            driver.send_signal(number)
            errors.append(driver.communicate(timeout=60)[1])
            assert driver.returncode != 0
    assert errors[1].rstrip().endswith("KeyboardInterrupt")
    assert len(pids) == 4
    assert eventually(lambda: gone(pids))
    assert eventually(no_group_is_left)
