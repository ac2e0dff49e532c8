"""What is derived from the settings table: errors, flags, keys, agreement, the engine's options, the page in docs."""

from __future__ import annotations

import inspect
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with
from settings_page import markdown

from horovod import _core
from horovod.base.errors import SettingCode
from horovod.base.setting import Setting, environment_text
from horovod.base.settings import PARENT_WORLD, ROWS, SETTINGS, Settings, resolve, unread
from horovod.common import basics as hvd
from horovod.coordinator.__main__ import _seconds
from horovod.coordinator.config import Limits
from horovod.launch.command_line.config_file import read_config
from horovod.launch.command_line.flags import flag_environment, parse_args
from horovod.protos.v1.agents_pb2 import PlacedRank
from horovod.worker.rank_environment import JobOnHost, rank_environment
from horovod.worker.runtime.devices import GPU_OPERATION_NAMES
from horovod.worker.runtime.offers import engine_options

ROOT = Path(__file__).parents[2]
LIVE = [row for row in SETTINGS if not row.no_effect]
ENGINE = [row for row in SETTINGS if row.engine]


def other_than_default(row: Setting) -> str:
    """A value of the variable that its row accepts."""
    if row.kind == "bool":
        return environment_text(not row.default)
    if row.kind == "choice":
        return next(choice for choice in row.choices if choice != row.default)
    if row.kind in ("int", "float"):
        least = row.minimum or 0
        value = least if least != row.default else least + row.multiple * row.flag_scale
        return environment_text(int(value) if row.kind == "int" else float(value))
    return {"address": "host:1", "addresses": "host:1", "ports": "5-6"}.get(row.kind, "something")


def as_option(row: Setting) -> str:
    text = other_than_default(row)
    return str(int(text) // row.flag_scale) if row.flag_scale != 1 else text


def config(tmp_path: Path, row: Setting, text: str) -> Path:
    path = tmp_path / "config.yaml"
    section, _, key = str(row.yaml).partition(".")
    path.write_text(f"{section}: {{{key}: {text}}}")
    return path


WRONG = [
    ("staging_buffer_bytes", "5000", ["4096 to 67108864", "a multiple of 4096 (bytes)", "262144."]),
    ("staging_buffer_bytes", "134217728", ["4096 to 67108864", "a multiple of 4096 (bytes)"]),
    ("staging_buffer_bytes", "4096.0", ["integer"]),
    ("staging_buffer_count", "1", ["2 to 64", "4."]),
    ("progress_timeout_seconds", "0", ["0.001 to 10000000 (seconds)", "300.0."]),
    ("progress_timeout_seconds", "soon", ["number", "0.001"]),
    ("num_nccl_streams", "4294967297", ["0 to 1024"]),  # which is 1 in 32 bits
    ("gpu_operations", "smoke", ["auto, nccl, host, mpi, gloo", "auto."]),
    ("network_interfaces", ",", ["names"]),
    ("nccl_library", " ", ["text"]),
]


@pytest.mark.parametrize(("name", "value", "facts"), WRONG)
def test_a_bad_value_is_named_by_where_it_stands(name: str, value: str, facts: list[str], tmp_path: Path) -> None:
    row = ROWS[name]
    if value.strip():  # an empty variable counts as unset
        with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{row.env}='{value}' ", *facts)):
            resolve({row.env: value})
    shown = value.strip()
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{row.flag}='{shown}' ", *facts)):
        flag_environment(parse_args(["-np", "1", f"{row.flag}={shown}", "true"]))
    path = config(tmp_path, row, repr(value))
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{row.yaml} in {path}='{shown}' ")):
        read_config(path)


def test_a_bad_switch_is_named(tmp_path: Path) -> None:
    row = ROWS["dynamic_process_sets"]
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{row.env}='2' ", "1 or 0")):
        resolve({row.env: "2"})
    path = config(tmp_path, row, "2")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{row.yaml} in {path}=2 ", "1 or 0")):
        read_config(path)


def test_limits_are_told_in_the_unit_of_the_option(tmp_path: Path) -> None:
    row = ROWS["fusion_threshold_bytes"]
    facts = ["='1.5' ", "0 to 4398046511104 (MB)", " 128."]
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "--fusion-threshold-mb", *facts)):
        flag_environment(parse_args(["-np", "1", "--fusion-threshold-mb", "1.5", "true"]))
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "params.fusion_threshold_mb", *facts)):
        read_config(config(tmp_path, row, "'1.5'"))


def test_init_checks_before_it_contacts_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setenv("HOROVOD_STAGING_BUFFER_BYTES", "5000")
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        facts = ["Horovod initialization failed. ", "HOROVOD_STAGING_BUFFER_BYTES='5000' "]
        with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, *facts)):
            hvd.init(f"127.0.0.1:{coordinator.getsockname()[1]}", size=2)
        coordinator.setblocking(False)
        with pytest.raises(BlockingIOError):
            coordinator.accept()


def test_horovodrun_checks_before_it_starts_anything(
    horovodrun: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    mark = tmp_path / "started"
    done = horovodrun("-np", "2", "touch", str(mark), environ={"HOROVOD_STAGING_BUFFER_BYTES": "5000"})
    assert (done.returncode, mark.exists()) == (2, False)
    assert re.search(
        ends_with(SettingCode.INVALID_SETTING, "horovodrun: HOROVOD_STAGING_BUFFER_BYTES='5000' "), done.stderr
    )


def test_every_setting_is_a_variable_a_flag_and_a_key(tmp_path: Path) -> None:
    without = {row.name for row in LIVE if not row.flag}
    of_the_coordinator = {row.name for row in LIVE if row.name.startswith(("coordinator", "token", "tls_"))}
    of_spark = {row.name for row in LIVE if row.name.startswith("spark_")}  # horovodrun has no part in it
    assert without == {row.name for row in LIVE if row.launcher} | of_the_coordinator | of_spark | {"size"}
    assert {row.name for row in SETTINGS if row.yaml} == {row.name for row in SETTINGS if row.flag}


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.flag], ids=lambda row: row.name)
def test_flag_and_key_reach_the_ranks(row: Setting, tmp_path: Path) -> None:
    option, expected = as_option(row), {row.env: other_than_default(row)}
    assert row.parse(expected[row.env]) != row.default
    given = [str(row.flag), option]
    if row.kind == "bool":
        no = str(row.flag).startswith("--no-")
        given = [str(row.flag)] if option == "1" else [f"--{'' if no else 'no-'}{str(row.flag)[5 if no else 2 :]}"]
    assert flag_environment(parse_args(["-np", "1", *given, "true"])) == expected
    value = environment_text(option != "1") if row.yaml_inverted else option
    assert read_config(config(tmp_path, row, f"'{value}'")) == expected
    on_host = JobOnHost(expected, "h1", 2, "127.0.0.1:1", token="token", is_own=True)
    places = [PlacedRank(rank=rank, local_rank=rank, local_size=2, cross_size=1) for rank in range(2)]
    assert [rank_environment(on_host, place)[row.env] for place in places] == [*expected.values()] * 2


def test_defaults_of_table_and_engine_are_the_same() -> None:
    assert _core.complete_options(engine_options(Settings())) == _core.complete_options({})


@pytest.mark.parametrize("row", ENGINE, ids=lambda row: row.name)
def test_every_engine_row_changes_the_engine(row: Setting) -> None:
    before = _core.complete_options({})
    # NCCL has at least one stream.
    given = {row.env: other_than_default(row) if row.name != "num_nccl_streams" else "2"}
    after = _core.complete_options(engine_options(resolve(given)))
    assert {name for name in before if before[name] != after[name]} == {row.engine}


@pytest.mark.parametrize("row", [row for row in LIVE if not row.engine], ids=lambda row: row.name)
def test_other_rows_change_no_option_that_has_a_row(row: Setting) -> None:
    of_others = {"cpu_operations", "gpu_operations", *(f"gpu_{name}" for name in GPU_OPERATION_NAMES)}
    decides = {*of_others, "wire", "min_size"}  # an elastic job keeps connections
    given = {row.name: "gloo"} if row.name in of_others else {}
    given = given or {row.name: other_than_default(row)}
    after = engine_options(resolve({}, given))
    assert (after != engine_options(Settings())) == (row.name in decides)


def test_the_engine_knows_no_other_option() -> None:
    with pytest.raises(ValueError, match="Unknown engine option 'staging_buffer_byte'"):
        _core.complete_options({"staging_buffer_byte": 4096})


@pytest.mark.parametrize("row", [row for row in ENGINE if row.kind == "int"], ids=lambda row: row.name)
def test_the_engine_accepts_what_the_table_does(row: Setting) -> None:
    for limit in (row.minimum, row.maximum):
        options = engine_options(resolve({row.env: str(limit)}))
        _core.Engine(rank=0, size=1, epoch=1, labels=["rank 0 on host here"], options=options).close()


def test_coordinator_and_members_have_the_same_limits() -> None:
    assert Limits() == Limits(Settings().keepalive_timeout_seconds, Settings().reattach_grace_seconds)
    for name in ("keepalive_timeout_seconds", "reattach_grace_seconds"):
        assert (_seconds(str(ROWS[name].minimum)), _seconds(str(ROWS[name].maximum))) == (0.001, 10_000_000)


def test_init_documents_the_variables_of_its_arguments() -> None:
    rows = [ROWS[name] for name in inspect.signature(hvd.init).parameters if name in ROWS]
    assert len(rows) >= 8
    assert [row.env for row in rows if row.env not in str(hvd.init.__doc__)] == []


def test_the_page_in_docs_is_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == markdown(), "python docs/tools/settings_page.py > docs/settings.md"
    assert [row.env for row in SETTINGS if f"`{row.env}`" not in page] == []


def test_sources_name_settings_only_and_read_them_by_their_row() -> None:
    known = {row.env for row in SETTINGS}
    for folder in ("clients", "worker", "coordinator", "csrc"):
        for path in [path for ending in ("py", "cc", "h") for path in (ROOT / folder).rglob(f"*.{ending}")]:
            text = path.read_text()
            # C++ also has constants of such names; those of settings stand in the sentences.
            said = text if path.suffix == ".py" else " ".join(re.findall(r'"[^"\n]*"', text))
            for name in set(re.findall(r"HOROVOD_[A-Z0-9_]*[A-Z0-9]", said)):
                assert name in known or any(one.startswith(f"{name}_") for one in known), f"{path}: {name}"
            assert not re.search(r"(environ\S*[\[(]|getenv\()\s*\"HOROVOD_", text), path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("STAGING_BUFFER_BYTE", "STAGING_BUFFER_BYTES"),
        ("FUSION_THRESHOLD_MB", "FUSION_THRESHOLD"),
        ("LOGLEVEL", "LOG_LEVEL"),
    ],
)
def test_a_misspelt_variable_is_told(given: str, meant: str) -> None:
    sentence = f"HOROVOD_{given} is not a setting; did you mean HOROVOD_{meant}?"
    assert unread({f"HOROVOD_{given}": "1", "HOROVOD_SIZE": "1", "PATH": "/bin"}) == [sentence]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["X_LOOP"], "HOROVOD_X_LOOP is not a setting of this version of Horovod: nothing reads it."),
        (
            ["X_LOOP", "BGT_X"],
            "HOROVOD_BGT_X and HOROVOD_X_LOOP are not settings of this version of Horovod: nothing reads them.",
        ),
    ],
)
def test_a_variable_that_nothing_reads_is_told(given: list[str], sentence: str) -> None:
    assert unread({f"HOROVOD_{name}": "1" for name in given}) == [sentence]


def test_variables_of_the_build_and_of_other_launchers_are_not_told() -> None:
    others = ("WITH_GLOO", "WITHOUT_GLOO", "NCCL_HOME", "NCCL_LIB", "GPU", "SPARK_START_TIMEOUT", "TEST_TIER")
    assert unread({PARENT_WORLD: "1", **{f"HOROVOD_{name}": "1" for name in others}}) == []
