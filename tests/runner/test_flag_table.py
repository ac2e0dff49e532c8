"""The options of horovodrun, row by row as the public API names them: spellings, defaults, what a value becomes.

A row is: spellings that --help shows, spellings that it hides, arguments to try, and what they become (`name=value`:
a variable of the ranks in capitals, else an attribute of the parsed arguments). `default` is what holds without the
option: the variable's or the attribute's.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode
from horovod.base.settings import SETTINGS
from horovod.launch.command_line.flags import flag_environment, make_parser, parse_args

pytestmark = pytest.mark.filterwarnings("ignore:--.* has no effect:DeprecationWarning")


class Row(NamedTuple):
    shown: str
    hidden: str = ""
    given: str = ""
    becomes: str = ""
    default: Any = None


TABLE = [
    Row("-v --version"),
    Row("-np --num-proc", given="--num-proc 3", becomes="num_proc=3"),
    Row("-cb --check-build", given="-cb", becomes="check_build=True", default=False),
    Row("--check", given="--check", becomes="check=True", default=False),
    Row("--disable-cache", given="--disable-cache", becomes="disable_cache=True", default=False),
    Row("--start-timeout", given="--start-timeout 60", becomes="HOROVOD_START_TIMEOUT=60.0", default=30.0),
    Row("--network-interfaces", given="--network-interfaces a,b", becomes="HOROVOD_NETWORK_INTERFACES=a,b", default=()),
    Row(
        "--network-interface",
        given="--network-interface a --network-interface b",
        becomes="HOROVOD_NETWORK_INTERFACES=a,b",
        default=(),
    ),
    Row("--output-filename", given="--output-filename d", becomes="output_filename=d"),
    Row("--verbose", given="--verbose", becomes="verbose=True", default=False),
    Row("--config-file", given="--config-file f", becomes="config_file=f"),
    Row("-p --ssh-port", given="-p 23", becomes="ssh_port=23"),
    Row("-i --ssh-identity-file", given="-i key", becomes="ssh_identity_file=key"),
    Row(
        "--fusion-threshold-mb",
        given="--fusion-threshold-mb 2",
        becomes="HOROVOD_FUSION_THRESHOLD=2097152",
        default=134217728,
    ),
    Row("--cycle-time-ms", given="--cycle-time-ms 2.5", becomes="HOROVOD_CYCLE_TIME=2.5", default=1.0),
    Row("--cache-capacity", given="--cache-capacity 0", becomes="HOROVOD_CACHE_CAPACITY=0", default=1024),
    Row(
        "--hierarchical-allreduce --no-hierarchical-allreduce",
        given="--no-hierarchical-allreduce",
        becomes="HOROVOD_HIERARCHICAL_ALLREDUCE=0",
    ),
    Row(
        "--hierarchical-allgather --no-hierarchical-allgather",
        given="--hierarchical-allgather",
        becomes="HOROVOD_HIERARCHICAL_ALLGATHER=1",
    ),
    Row("--torus-allreduce --no-torus-allreduce", given="--torus-allreduce", becomes="HOROVOD_TORUS_ALLREDUCE=1"),
    Row("--autotune", "--no-autotune", given="--autotune", becomes="HOROVOD_AUTOTUNE=1", default=False),
    Row("--autotune-log-file", given="--autotune-log-file f", becomes="HOROVOD_AUTOTUNE_LOG=f"),
    Row(
        "--autotune-warmup-samples",
        given="--autotune-warmup-samples 1",
        becomes="HOROVOD_AUTOTUNE_WARMUP_SAMPLES=1",
        default=3,
    ),
    Row(
        "--autotune-steps-per-sample",
        given="--autotune-steps-per-sample 1",
        becomes="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE=1",
        default=10,
    ),
    Row(
        "--autotune-bayes-opt-max-samples",
        given="--autotune-bayes-opt-max-samples 1",
        becomes="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES=1",
        default=20,
    ),
    Row(
        "--autotune-gaussian-process-noise",
        given="--autotune-gaussian-process-noise 1",
        becomes="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE=1.0",
        default=0.8,
    ),
    Row("--min-np --min-num-proc", given="--min-np 2", becomes="min_num_proc=2"),
    Row("--max-np --max-num-proc", given="--max-num-proc 2", becomes="max_num_proc=2"),
    Row("--slots-per-host", given="--slots 4", becomes="slots_per_host=4"),  # the documented name is a prefix
    Row("--elastic-timeout", given="--elastic-timeout 7", becomes="HOROVOD_ELASTIC_TIMEOUT=7.0", default=600.0),
    Row(
        "--elastic-begin-anew",
        given="--elastic-begin-anew",
        becomes="HOROVOD_ELASTIC_BEGIN_ANEW=1",
        default=False,
    ),
    Row("--reset-limit", given="--reset-limit 3", becomes="reset_limit=3"),
    Row(
        "--blacklist-cooldown-range",
        given="--blacklist-cooldown-range 1 5",
        becomes="blacklist_cooldown_range=[1, 5]",
    ),
    Row("--timeline-filename", given="--timeline-filename f", becomes="HOROVOD_TIMELINE=f"),
    Row(
        "--timeline-mark-cycles",
        "--no-timeline-mark-cycles",
        given="--timeline-mark-cycles",
        becomes="HOROVOD_TIMELINE_MARK_CYCLES=1",
        default=False,
    ),
    Row(
        "--no-stall-check",
        "--stall-check",
        given="--no-stall-check",
        becomes="HOROVOD_STALL_CHECK_DISABLE=1",
        default=False,
    ),
    Row(
        "--stall-check-warning-time-seconds",
        given="--stall-check-warning-time-seconds 5",
        becomes="HOROVOD_STALL_CHECK_TIME_SECONDS=5.0",
        default=60.0,
    ),
    Row(
        "--stall-check-shutdown-time-seconds",
        given="--stall-check-shutdown-time-seconds 9",
        becomes="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=9.0",
        default=0.0,
    ),
    Row(
        "--mpi-threads-disable --no-mpi-threads-disable",
        given="--mpi-threads-disable",
        becomes="HOROVOD_MPI_THREADS_DISABLE=1",
        default=False,
    ),
    Row("--mpi-args", given="--mpi-args=--map-by", becomes="mpi_args=--map-by"),
    Row("--tcp", given="--tcp", becomes="NCCL_IB_DISABLE=1"),
    Row("--binding-args", given="--binding-args=-x", becomes="binding_args=-x"),
    Row("--num-nccl-streams", given="--num-nccl-streams 2", becomes="HOROVOD_NUM_NCCL_STREAMS=2", default=1),
    Row("--thread-affinity", given="--thread-affinity 0", becomes="HOROVOD_THREAD_AFFINITY=0", default=()),
    Row(
        "--gloo-timeout-seconds",
        given="--gloo-timeout-seconds 5",
        becomes="HOROVOD_GLOO_TIMEOUT_SECONDS=5",
        default=30,
    ),
    *(
        Row("--log-level", given=f"--log-level {name}", becomes=f"HOROVOD_LOG_LEVEL={name.lower()}", default="warning")
        for name in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    ),
    Row(
        "--log-without-timestamp",
        "--log-with-timestamp --log-hide-timestamp --no-log-hide-timestamp",
        given="--log-without-timestamp",
        becomes="HOROVOD_LOG_HIDE_TIME=1",
        default=False,
    ),
    Row(
        "-prefix-timestamp --prefix-output-with-timestamp",
        given="-prefix-timestamp",
        becomes="prefix_output_with_timestamp=True",
        default=False,
    ),
    Row("-H --hosts", given="-H h1:2,h2:4", becomes="hosts=h1:2,h2:4"),
    Row("-hostfile --hostfile", given="-hostfile f", becomes="hostfile=f"),
    Row("--host-discovery-script", given="--host-discovery-script s", becomes="host_discovery_script=s"),
    Row("--gloo", given="--gloo", becomes="gloo=True", default=False),
    Row("--mpi", given="--mpi", becomes="mpi=True", default=False),
    Row("--jsrun", given="--jsrun", becomes="jsrun=True", default=False),
]
BY_VARIABLE = {setting.env: setting for setting in SETTINGS}


def parsed(given: str) -> argparse.Namespace:
    return parse_args(["-np", "2", *given.split(), "true"])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.given or row.shown)
def test_row(row: Row) -> None:
    actions = make_parser()._option_string_actions
    shown = {name: actions[name].help is not argparse.SUPPRESS for name in (row.shown + " " + row.hidden).split()}
    assert shown == {**dict.fromkeys(row.shown.split(), True), **dict.fromkeys(row.hidden.split(), False)}
    if not row.becomes:
        return
    name, _, value = row.becomes.partition("=")
    with_it, without = parsed(row.given), parsed("")
    if name.isupper():
        assert flag_environment(with_it) == {name: value}
        assert flag_environment(without) == {}
        assert (BY_VARIABLE[name].default if name in BY_VARIABLE else None) == row.default
    else:
        assert str(getattr(with_it, name)) == value
        assert name == "num_proc" or getattr(without, name) == row.default


def test_hidden_spellings_say_the_opposite() -> None:
    for given, variable, value in (
        ("--no-autotune", "HOROVOD_AUTOTUNE", "0"),
        ("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
        ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0"),
        ("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "0"),
    ):
        assert flag_environment(parsed(given)) == {variable: value}


@pytest.mark.parametrize(
    ("given", "value", "instead"),
    [
        ("--log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "1"}, "--log-without-timestamp"),
        ("--no-log-hide-timestamp", {"HOROVOD_LOG_HIDE_TIME": "0"}, "--log-with-timestamp"),
        ("--network-interface a,b", {"HOROVOD_NETWORK_INTERFACES": "a,b"}, "--network-interfaces a,b"),
    ],
)
def test_deprecated_spellings(given: str, value: dict[str, str], instead: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"is deprecated: write {re.escape(instead)}\.$"):
        assert flag_environment(parsed(given)) == value


NUMBERS = [
    *("-np", "--ssh-port", "--min-np", "--max-np", "--slots-per-host", "--reset-limit"),
    *(setting.flag for setting in SETTINGS if setting.flag and setting.kind in ("int", "float")),
]


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_negative_number_is_a_value_error(flag: str) -> None:
    argv = ["-np", "2", flag, "-3", "true"]
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, flag, "-3")):
        flag_environment(parse_args(argv))
