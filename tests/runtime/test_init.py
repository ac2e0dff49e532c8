"""hvd.init and hvd.shutdown with a real coordinator and the real engine."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections.abc import Iterator

import pytest
from error_codes import ends_with
from resources import descriptors, eventually, threads
from runtime_harness import Program, allreduce_all, await_first, form_threads, threads_of_streams, world

from horovod.base.errors import LaunchCode, SettingCode, WorldCode, coded
from horovod.common import basics as hvd
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.worker.runtime import plan
from horovod.worker.runtime.errors import StartError


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    hvd.shutdown()


# -- a world of one ---------------------------------------------------------------------------------------------------
def test_without_a_coordinator_the_world_is_one_process():
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.is_initialized()) == (0, 1, True, True)
    assert global_process_set.ranks == [0]
    assert (global_process_set.size(), global_process_set.rank(), global_process_set.included()) == (1, 0, True)


def test_a_world_of_one_does_not_import_grpc():
    with Program("hvd.init(); print(allreduce('x', 3.0), 'grpc' in sys.modules)") as program:
        assert program.finish() == "3.0 False"


def test_init_twice_shutdown_twice_and_init_again():
    hvd.shutdown()
    hvd.init()
    hvd.init()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert global_process_set.ranks is None
    hvd.init()
    assert hvd.size() == 1


@pytest.mark.parametrize(
    "call",
    [
        *(hvd.size, hvd.rank, hvd.local_size, hvd.local_rank, hvd.cross_size, hvd.cross_rank, hvd.is_homogeneous),
        *(hvd.mpi_threads_supported, hvd.stop_timeline),
        lambda: hvd.start_timeline("file"),
        lambda: add_process_set([0]),
    ],
)
@pytest.mark.parametrize("when", ["before init", "after shutdown"])
def test_calls_without_a_world(call, when):
    if when == "after shutdown":
        hvd.init()
        hvd.shutdown()
    with pytest.raises(
        ValueError, match=r"^Horovod has not been initialized; use hvd\.init\(\)\. \[not-initialized\]$"
    ):
        call()


# -- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "arguments", "code", "fact"),
    [
        ({"HOROVOD_SIZE": "2"}, {}, SettingCode.MISSING_SETTING, "HOROVOD_SIZE=2,"),
        ({}, {"size": 2}, SettingCode.MISSING_SETTING, "HOROVOD_SIZE=2,"),
        ({"HOROVOD_RANK": "1"}, {}, SettingCode.MISSING_SETTING, "HOROVOD_RANK=1,"),
        ({"HOROVOD_COORDINATOR": "localhost:1"}, {}, SettingCode.MISSING_SETTING, "localhost:1"),
        (
            {"HOROVOD_COORDINATOR": "localhost:1", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "2"},
            {},
            SettingCode.CONFLICTING_SETTINGS,
            "HOROVOD_RANK=2",
        ),
        ({"HOROVOD_SIZE": "x"}, {}, SettingCode.INVALID_SETTING, "HOROVOD_SIZE='x'"),
        ({}, {"comm": "localhost"}, SettingCode.INVALID_SETTING, "coordinator='localhost'"),
        ({"HOROVOD_COORDINATOR": "h:0"}, {}, SettingCode.INVALID_SETTING, "HOROVOD_COORDINATOR='h:0'"),
        ({}, {"network_interfaces": 3}, SettingCode.INVALID_SETTING, "network_interfaces=3"),
    ],
)
def test_what_cannot_be_started_is_said(monkeypatch, environment, arguments, code, fact):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=ends_with(code, fact)) as caught:
        hvd.init(**arguments)
    assert str(caught.value).startswith("Horovod initialization failed. ")
    assert not hvd.is_initialized()


class Intracomm:
    """Looks like mpi4py's."""

    __module__ = "mpi4py.MPI"


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        ({"comm": Intracomm()}, SettingCode.UNSUPPORTED, ["MPI"]),
        ({"comm": 3}, SettingCode.INVALID_SETTING, ["comm=3"]),
        ({"comm": [0.5]}, SettingCode.INVALID_SETTING, ["comm=[0.5]"]),
        ({"comm": [0, 1]}, SettingCode.UNSUPPORTED, ["comm=[0, 1]", "[0]"]),
        ({"comm": [1]}, SettingCode.UNSUPPORTED, ["comm=[1]", "[0]"]),
        ({"comm": "h:1", "coordinator": "h:2"}, SettingCode.CONFLICTING_SETTINGS, ["'h:1'", "'h:2'"]),
        ({"process_sets": "static"}, WorldCode.INVALID_PROCESS_SET, ["process_sets='static'"]),
        ({"process_sets": [[0]]}, WorldCode.INVALID_PROCESS_SET, ["process_sets=[[0]]"]),
        ({"process_sets": [ProcessSet([0])]}, WorldCode.DUPLICATE_PROCESS_SET, ["[0]"]),
        ({"process_sets": [ProcessSet([1])]}, WorldCode.INVALID_PROCESS_SET, ["[1]", "0 to 0"]),
    ],
)
def test_wrong_arguments(arguments, code, facts):
    with pytest.raises(ValueError, match=ends_with(code, *facts)):
        hvd.init(**arguments)
    assert not hvd.is_initialized()


@pytest.mark.parametrize("arguments", [{"comm": [0]}, {"comm": []}, {"process_sets": "Dynamic"}, {"process_sets": []}])
def test_arguments_that_ask_for_what_there_is(arguments):
    hvd.init(**arguments)
    assert hvd.size() == 1


def test_process_sets_that_are_not_dynamic_say_so():
    hvd.init()
    with pytest.raises(ValueError, match=ends_with(WorldCode.STATIC_PROCESS_SETS, "HOROVOD_DYNAMIC_PROCESS_SETS=1")):
        add_process_set([0])
    assert not remove_process_set(global_process_set)
    assert not remove_process_set(ProcessSet([0]))


def test_a_timeline_needs_the_variable():
    hvd.init()
    with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, "HOROVOD_TIMELINE")):
        hvd.start_timeline("file")
    hvd.stop_timeline()


# -- several ranks ----------------------------------------------------------------------------------------------------
REPORT = "print(hvd.rank(), hvd.size(), hvd.local_rank(), current().transport, allreduce('x', hvd.rank() + 1.0))"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_processes_with_an_address_and_no_launcher(coordinator, transport):
    script = f"hvd.init({coordinator.address!r}); {REPORT}"
    environment = {"HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": transport}
    with Program(script, **environment) as one, Program(script, **environment) as other:
        assert sorted([one.finish(), other.finish()]) == [f"0 2 0 {transport} 3.0", f"1 2 1 {transport} 3.0"]


@pytest.mark.parametrize(("environment", "connections"), [({}, 1), ({"HOROVOD_CONNECTIONS_PER_PEER": "3"}, 3)])
def test_how_many_connections_two_ranks_have(coordinator, environment, connections):
    """The coordinator is on the loopback interface, so that is the one which both offer."""
    script = f"""
import psutil
hvd.init({coordinator.address!r}, size=2, transport="tcp")
ends = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
print(sum(one.raddr.port != {coordinator.address.rpartition(":")[2]} for one in ends), allreduce("x"))
"""
    with Program(script, **environment) as one, Program(script, **environment) as other:
        assert [one.finish(), other.finish()] == [f"{connections} 2.0"] * 2


def test_keyword_arguments_alone(coordinator):
    script = (
        f"hvd.init(coordinator={coordinator.address!r}, job='mine', size=2, transport='tcp', "
        "network_interfaces='lo', start_timeout_seconds=50); print(current().world.job, hvd.size())"
    )
    with Program(script) as one, Program(script) as other:
        assert [one.finish(), other.finish()] == ["mine 2", "mine 2"]


def test_a_launcher_decides_ranks(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    script = "hvd.init(comm=[1, 0]); print(hvd.rank())"
    with Program(script, **common, HOROVOD_RANK="1") as one, Program(script, **common, HOROVOD_RANK="0") as zero:
        assert [one.finish(), zero.finish()] == ["1", "0"]


def test_host_names_decide_what_is_local(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "3"}
    script = f"hvd.init(); print(hvd.cross_size(), hvd.is_homogeneous(), end=' '); {REPORT}"
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Program(script, **common, HOROVOD_HOSTNAME=host, HOROVOD_RANK=str(rank)))
            for rank, host in enumerate(["a", "a", "b"])
        ]
        assert [p.finish() for p in programs] == [
            "2 False 0 3 0 tcp+shm 6.0",
            "1 False 1 3 1 tcp+shm 6.0",
            "2 False 2 3 0 tcp+shm 6.0",
        ]


def test_a_world_of_one_with_a_coordinator(coordinator):
    hvd.init(coordinator.address, size=1)
    assert (hvd.rank(), hvd.size()) == (0, 1)


def test_shared_memory_that_is_asked_for_but_impossible_is_refused(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": "shm"}
    script = "\ntry: hvd.init()\nexcept ValueError as error: print(error)"
    with Program(script, **common, HOROVOD_HOSTNAME="a") as one, Program(script, **common, HOROVOD_HOSTNAME="b") as two:
        for text in (one.finish(), two.finish()):
            assert re.search(ends_with(WorldCode.NO_SHARED_MEMORY, "HOROVOD_TRANSPORT=shm", "host a", "host b"), text)


def test_a_launcher_that_gives_a_world_up_ends_the_waiting(coordinator):
    why = coded(LaunchCode.FUNCTION_RAISED, "The function of rank 1 raised ValueError: too bad.")
    script = "\ntry: hvd.init()\nexcept ValueError as error: print(error)"
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_JOB": "failed"}
    with Program(script, **common) as first:
        assert await_first(coordinator, "failed")
        coordinator.give_up("failed", why)
        assert re.search(ends_with(LaunchCode.FUNCTION_RAISED, "rank 1 raised ValueError: too bad"), first.finish())


def test_settings_that_must_agree(coordinator):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    script = "\ntry: hvd.init()\nexcept ValueError as error: print(error)"
    with Program(script, **common):
        assert await_first(coordinator)
        with Program(script, **common, HOROVOD_FUSION_THRESHOLD="0") as other:
            assert re.search(ends_with(WorldCode.MEMBERS_DISAGREE, "fusion_threshold_bytes", "'0'"), other.finish())


def test_the_second_identical_step_sends_nothing(coordinator):
    with world(coordinator.address, 2, transport="tcp") as contexts:
        assert allreduce_all(contexts, "x") == [2.0, 2.0]
        before = [context.counters()["messages_sent"] for context in contexts]
        assert [context.counters()["operations_announced"] for context in contexts] == [1, 1]
        for _ in range(20):
            assert allreduce_all(contexts, "x") == [2.0, 2.0]
        assert [context.counters()["messages_sent"] for context in contexts] == before


# -- the end of ranks and of the coordinator --------------------------------------------------------------------------
WAIT = "\ntry: allreduce('y'); allreduce('z')\nexcept HorovodInternalError as error: print(error)"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("end", ["killed", "left", "failed"])
def test_a_rank_that_ends_is_named_by_the_others(coordinator, transport, end):
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2", "HOROVOD_TRANSPORT": transport}
    ends = {
        "killed": "allreduce('y'); os.kill(os.getpid(), signal.SIGKILL)",
        "left": "allreduce('y'); hvd.shutdown()",
        "failed": "allreduce('y'); raise RuntimeError('out of coffee')",
    }
    with (
        Program(f"hvd.init(); {WAIT}", **common, HOROVOD_RANK="0") as zero,
        Program(f"hvd.init(); {ends[end]}", **common, HOROVOD_RANK="1") as one,
    ):
        one.process.communicate(timeout=60)
        text = zero.finish()
    assert f"ank 1 (pid {one.process.pid}) on host {os.uname().nodename}" in text
    if end == "failed":
        assert "RuntimeError: out of coffee" in text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_without_its_coordinator_a_world_goes_on_with_what_it_knows(coordinator, transport):
    with world(coordinator.address, 2, transport=transport, reattach_grace_seconds=0.5) as contexts:
        assert allreduce_all(contexts, "known") == [2.0, 2.0]
        address = coordinator.address
        coordinator.stop()
        assert allreduce_all(contexts, "known") == [2.0, 2.0]
        # HorovodInternalError for users; in this process nobody may have told the engine of that class yet.
        with pytest.raises(RuntimeError, match=rf"allreduce\.new.*{re.escape(address)}"):
            allreduce_all(contexts, "new")


# -- nothing is left --------------------------------------------------------------------------------------------------
def python_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("horovod-") and t.name != "horovod-coordinator"}


def shared_files() -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if "horovod" in name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_is_left_after_many_worlds(coordinator, transport):
    def cycle() -> None:
        with world(coordinator.address, 2, transport=transport) as contexts:
            allreduce_all(contexts, "x")

    for _ in range(3):  # what grpc and the coordinator make once
        cycle()
    segments, files, tasks = shared_files(), descriptors(), threads()
    for _ in range(10):
        cycle()
    assert not python_threads()
    assert not threads_of_streams()
    assert shared_files() == segments
    # The server closes its side of the last connections a moment later.
    assert eventually(lambda: descriptors() <= files + 2), f"{descriptors()} descriptors are open, {files} were"
    assert eventually(lambda: threads() <= tasks + 4), f"{threads()} threads run, {tasks} did"  # grpc keeps a pool


def test_a_failed_start_leaves_nothing(coordinator):
    def fail() -> None:
        with pytest.raises(StartError, match=ends_with(WorldCode.INCOMPLETE_WORLD)):
            form_threads(coordinator.address, 1, size=2, start_timeout_seconds=1)

    fail()
    gc.collect()  # pytest keeps tracebacks, and they keep what failed
    segments, files = shared_files(), descriptors()
    for _ in range(3):
        fail()
    gc.collect()
    assert not python_threads()
    assert not threads_of_streams()
    assert shared_files() == segments
    # The server closes its side of the last connections a moment later.
    assert eventually(lambda: descriptors() <= files + 2), f"{descriptors()} descriptors are open, {files} were"


def test_a_protocol_of_another_version_is_refused(coordinator, monkeypatch):
    monkeypatch.setattr(plan, "PROTOCOL_VERSION", 99)
    with pytest.raises(ValueError, match=ends_with(WorldCode.OTHER_VERSION, "99", coordinator.address)):
        hvd.init(coordinator.address, size=2)


def test_processes_keep_their_ranks_over_shutdown_and_init(coordinator):
    """They prove who they were; nobody requests a rank here, and any of them may be the first to come back."""
    script = """
for _ in range(5):
    hvd.init()
    print(hvd.rank(), end=" ")
    allreduce("x")
    hvd.shutdown()
"""
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    with Program(script, **common) as one, Program(script, **common) as other:
        ranks = [one.finish().split(), other.finish().split()]
    assert sorted(ranks) == [["0"] * 5, ["1"] * 5]
