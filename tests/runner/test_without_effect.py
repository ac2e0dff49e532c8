"""Settings that are accepted and change nothing, and misspelt ones: rank 0 alone says so, once for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode
from horovod.base.settings import SETTINGS, Settings, resolve
from horovod.launch.__main__ import run_commandline

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

TWICE = """
from horovod.common import basics as hvd
hvd.init()
hvd.shutdown()
hvd.init()
hvd.shutdown()
"""


def test_rank_0_says_it_once(horovodrun: Run, program: Program) -> None:
    environ = {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "HOROVOD_STAGING_BUFFER_BYTE": "1",
        "HOROVOD_CPU_OPERATIONS": "CCL",
        "HOROVOD_CACHE_CAPACITY": "-1",
        "HOROVOD_TWO_STAGE_LOOP": "1",
    }
    done = horovodrun("-np", "2", "--verbose", "--autotune", "--cycle-time-ms", "5", *program(TWICE), environ=environ)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if re.search("effect|autotune|BUFFER_BYTE|LOOP", line)]
    start = "[0]<stderr>:horovod rank 0 WARNING: "
    assert [line.removeprefix(start).partition(" has no effect: ")[0] for line in lines if line.startswith(start)] == [
        "HOROVOD_CPU_OPERATIONS=ccl (--cpu-operations)",
        "HOROVOD_CYCLE_TIME=5.0 (--cycle-time-ms)",
        "HOROVOD_CACHE_CAPACITY=-1 (--cache-capacity)",
        "HOROVOD_AUTOTUNE=1 (--autotune)",
        "HOROVOD_CONTROLLER=mpi",
        "HOROVOD_GLOO_IFACE=lo",
        "HOROVOD_STAGING_BUFFER_BYTE is not a setting; did you mean HOROVOD_STAGING_BUFFER_BYTES?",
        "HOROVOD_TWO_STAGE_LOOP is not a setting of this version of Horovod: nothing reads it.",
    ]
    assert all(line.startswith(start) for line in lines), "neither the launcher nor rank 1 says it again"


def test_what_asks_for_nothing_special_is_not_mentioned() -> None:
    environ = {"HOROVOD_AUTOTUNE": "0", "HOROVOD_CYCLE_TIME": "1", "HOROVOD_TORUS_ALLREDUCE": "0"}
    settings = resolve(environ)
    assert settings != Settings()
    assert [row.unheeded(getattr(settings, row.name)) for row in SETTINGS if row.env in environ] == [""] * 3


def test_every_reason_completes_its_sentence() -> None:
    idle = [row for row in SETTINGS if row.no_effect]
    names = {row.env for row in idle}
    assert names >= {
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "HOROVOD_ENABLE_XLA_OPS",
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
        "HOROVOD_CCL_CACHE",
        "HOROVOD_DISABLE_NVTX_RANGES",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    }
    for row in idle:
        assert not row.no_effect.endswith(".")
        assert row.unheeded(row.default) == ""


@pytest.mark.parametrize("name", ["CACHE_CAPACITY", "CYCLE_TIME", "GLOO_RENDEZVOUS_PORT", "ADASUM_MPI_CHUNK_SIZE"])
def test_minus_one_of_an_old_image_stops_no_job(name: str) -> None:
    row = next(row for row in SETTINGS if row.env == f"HOROVOD_{name}")
    settings = resolve({row.env: "-1"})
    assert row.unheeded(getattr(settings, row.name)).startswith(f"HOROVOD_{name}=-1")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, row.env, "'none'")):
        resolve({row.env: "none"})


@pytest.mark.parametrize(("given", "level"), [("warn", "warning"), ("WARN", "warning"), ("Critical", "fatal")])
def test_other_words_for_levels_of_the_log(given: str, level: str) -> None:
    assert resolve({"HOROVOD_LOG_LEVEL": given}).log_level == level


@pytest.mark.parametrize("flag", ["--gloo", "--disable-cache"])
def test_options_that_ask_for_what_is_so_are_told(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_commandline([flag, "-np", "1", "true"])
    assert [line.partition(" has no effect: ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"horovodrun: {flag}"
    ]


@pytest.mark.parametrize("text", ["foo", "nccl"])
def test_a_value_that_was_never_one_is_an_error_still(text: str) -> None:
    with pytest.raises(
        ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"HOROVOD_CONTROLLER='{text}'", "mpi, gloo")
    ):
        resolve({"HOROVOD_CONTROLLER": text})
