"""The engine in C (csrc/bindings/c_api.h), as a native operation of a framework uses it: a library in plain C11."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
from native_builds import ROOT, run, tool
from world import EngineWorld, Member

from horovod import _core
from horovod.worker.runtime import context

pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype = ctypes.c_void_p
pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library: Path = tmp_path_factory.mktemp("c_api") / "client.so"
    options = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-pedantic", "-shared", "-fPIC")
    source = ROOT / "tests" / "native" / "c_api_client.c"
    run(tool("cc"), *options, f"-I{ROOT / 'csrc'}", str(source), "-o", str(library), "-pthread")
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
    loaded.client_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    loaded.client_chain.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    loaded.client_leave_in_flight.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    loaded.client_has_current.argtypes = (ctypes.c_void_p,)
    return loaded


def api() -> int:
    return pointer_of(_core.C_API, b"horovod._core.C_API")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_function_from_a_thread_in_c(client: ctypes.CDLL, transport: str) -> None:
    def body(member: Member) -> int:
        engine = member.engine.c_engine()
        return client.client_run(api(), pointer_of(engine, b"horovod.engine"), member.rank)

    with EngineWorld(2, transport) as world:
        assert world.run(body) == [0, 0]  # else the line that failed


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_operation_that_starts_at_once_is_not_gathered(client: ctypes.CDLL, transport: str, at_once: bool) -> None:
    def body(member: Member) -> int:
        engine = member.engine.c_engine()
        return client.client_chain(api(), pointer_of(engine, b"horovod.engine"), member.rank, at_once)

    with EngineWorld(2, transport) as world:
        assert world.run(body) == [0, 0]
        gathered = [engine.counters()["gathers"] for engine in world.engines]
    assert all(count == 0 for count in gathered) if at_once else all(count > 0 for count in gathered), gathered


def test_the_end_of_an_epoch_and_of_the_engine(client: ctypes.CDLL) -> None:
    with EngineWorld(2) as world:
        engine = world.engines[0].c_engine()
        assert client.client_leave_in_flight(api(), pointer_of(engine, b"horovod.engine")) == 0
        world.engines[1].abort("rank 1 on host here gave up.")
        assert client.client_after_the_end() == 0
    del world, engine
    gc.collect()
    assert client.client_after_the_engine() == 0


def test_the_current_engine_is_that_of_the_world_which_python_has_joined(client: ctypes.CDLL) -> None:
    assert not client.client_has_current(api())
    context.init()
    try:
        assert client.client_has_current(api())
        child = os.fork()
        if child == 0:
            os._exit(client.client_has_current(api()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child has no engine"
    finally:
        context.shutdown()
    assert not client.client_has_current(api())
