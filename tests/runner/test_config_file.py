"""--config-file: every key of the contract, and a sentence for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from error_codes import ends_with

from horovod.base.errors import LaunchCode, SettingCode
from horovod.launch.command_line.config_file import read_config

FULL = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 2.5, cache_capacity: 512, hierarchical_allreduce: true,
         hierarchical_allgather: false, torus_allreduce: false}
autotune: {enabled: false, log_file: /tmp/tune.csv, warmup_samples: 1, steps_per_sample: 2, bayes_opt_max_samples: 3,
           gaussian_process_noise: 0.1}
timeline: {filename: /tmp/t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 7, shutdown_time_seconds: 9}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 1, gloo_timeout_seconds: 20,
                  pin_gpus: true, set_num_threads: false}
logging: {level: INFO, with_timestamp: false}
"""


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_every_key_of_the_contract(tmp_path: Path) -> None:
    environ = read_config(config(tmp_path, FULL))
    assert len(environ) == sum(len(keys) for keys in yaml.safe_load(FULL).values() if isinstance(keys, dict))
    assert environ["HOROVOD_FUSION_THRESHOLD"] == str(32 << 20)
    assert environ["HOROVOD_CYCLE_TIME"] == "2.5"
    assert environ["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "1"
    assert environ["HOROVOD_HIERARCHICAL_ALLGATHER"] == "0"
    assert environ["HOROVOD_STALL_CHECK_DISABLE"] == "1"  # enabled: false
    assert environ["HOROVOD_LOG_HIDE_TIME"] == "1"  # with_timestamp: false
    assert environ["HOROVOD_THREAD_AFFINITY"] == "1"
    assert environ["HOROVOD_LOG_LEVEL"] == "info"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "params:\n", "params: {cycle_time_ms: }\n"])
def test_nothing_said_is_nothing_set(tmp_path: Path, text: str) -> None:
    assert read_config(config(tmp_path, text)) == {}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("parms: {}", ["'parms'", "'params'"]),
        ("params: {cycle_time: 1}", ["'params.cycle_time'", "'cycle_time_ms'"]),
        ("1: 2", ["key 1;", "params", "controller"]),  # those that are known
        ("params: 3", ["'params'", "value 3:"]),
        ("- a", [" list:"]),
        ("controller: smoke", ["'smoke'", "gloo, mpi"]),
        ("controller: mpi", ["'mpi'", "write gloo"]),
        ("params: {", ["column 10"]),
    ],
)
def test_what_should_not_be_there(tmp_path: Path, text: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(LaunchCode.WRONG_CONFIG_FILE, "config.yaml", *facts)) as error:
        read_config(config(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("params: {cycle_time_ms: -1}", ["params.cycle_time_ms in ", ">= 0", "-1"]),
        ("params: {cache_capacity: many}", ["params.cache_capacity in ", "='many'"]),
        ("params: {hierarchical_allreduce: 3}", ["params.hierarchical_allreduce in ", "=3 "]),
        ("logging: {level: loud}", ["logging.level in ", "='loud'"]),
    ],
)
def test_what_a_setting_can_not_be(tmp_path: Path, text: str, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "config.yaml", *facts)) as error:
        read_config(config(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ends_with(LaunchCode.WRONG_CONFIG_FILE, "none.yaml", "No such file")):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=ends_with(LaunchCode.WRONG_CONFIG_FILE, tmp_path, "Is a directory")):
        read_config(tmp_path)


@pytest.mark.parametrize("value", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merges"])
def test_aliases_that_come_to_far_more_than_the_file_are_refused(tmp_path: Path, value: str) -> None:
    """Each level names the one above nine times: 9^8 values come of some hundred bytes."""
    levels = [f"b{n + 1}: &b{n + 1} {value.format(', '.join([f'*b{n}'] * 9))}" for n in range(8)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(["b0: &b0 {x: y}", *levels]))
    with pytest.raises(ValueError, match=ends_with(LaunchCode.WRONG_CONFIG_FILE, "config.yaml", "alias")):
        read_config(path)


def test_aliases_and_merges_of_an_ordinary_file_are_values(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("params: &params\n  cache_capacity: 7\ntimeline:\n  filename: a\nparams: {<<: *params}\n")
    assert read_config(path)["HOROVOD_CACHE_CAPACITY"] == "7"
