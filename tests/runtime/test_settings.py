"""The settings table: what it accepts, what it refuses and in which words, and that every row is complete."""

from __future__ import annotations

import dataclasses

import pytest
from error_codes import ends_with

from horovod.base import settings
from horovod.base.errors import SettingCode
from horovod.base.setting import split_address
from horovod.base.settings import SETTINGS, Settings, resolve
from horovod.coordinator.core.world import checks


def test_defaults_need_no_environment():
    defaults = resolve({})
    assert defaults == Settings()
    assert defaults.coordinator is None
    assert defaults.job == "default"
    assert defaults.fusion_threshold_bytes == 128 << 20
    assert defaults.start_timeout_seconds == 30


def test_explicit_beats_environment_and_none_means_not_given():
    environ = {"HOROVOD_SIZE": "4", "HOROVOD_JOB": "one"}
    assert resolve(environ, {"size": 2, "job": None}).size == 2
    assert resolve(environ, {"size": 2, "job": None}).job == "one"


def test_an_empty_variable_counts_as_unset():
    assert resolve({"HOROVOD_COORDINATOR": " ", "HOROVOD_SIZE": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HOROVOD_SIZE", "0", "an integer from 1 to 65536"),
        ("HOROVOD_SIZE", "two", "an integer from 1 to 65536"),
        ("HOROVOD_SIZE", "65537", "an integer from 1 to 65536"),
        ("HOROVOD_SIZE", "100000000", "an integer from 1 to 65536"),
        ("HOROVOD_RANK", "-1", "an integer from 0 to 65535"),
        ("HOROVOD_LOCAL_SIZE", "65537", "an integer from 1 to 65536"),
        ("HOROVOD_COORDINATOR", "node-a", "host:port"),
        ("HOROVOD_COORDINATOR", "node-a:0", "a port from 1 to 65535"),
        ("HOROVOD_COORDINATOR", "node-a:65536", "a port from 1 to 65535"),
        ("HOROVOD_COORDINATOR", "http://node-a:1", "IPv6 address in brackets"),
        ("HOROVOD_COORDINATOR", "user@node-a:1", "host:port"),
        ("HOROVOD_COORDINATOR", "::1:29400", "IPv6 address in brackets"),
        ("HOROVOD_TRANSPORT", "infiniband", "one of auto, shm, tcp"),
        ("HOROVOD_NETWORK_INTERFACES", " , ", "names separated by commas"),
        ("HOROVOD_START_TIMEOUT", "nan", "(seconds)"),
        ("HOROVOD_START_TIMEOUT", "inf", "(seconds)"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "(bytes)"),
        ("HOROVOD_AUTOTUNE", "maybe", "1 or 0"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.1", "from 0 to 1"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(variable, value, expected):
    with pytest.raises(
        ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{variable}={value.strip()!r}", expected)
    ):
        resolve({variable: value})


@pytest.mark.parametrize(
    ("name", "value"), [("size", 2.5), ("size", True), ("job", 3), ("job", ""), ("network_interfaces", [])]
)
def test_a_bad_argument_is_named(name, value):
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, f"{name}={value!r}")):
        resolve({}, {name: value})


def test_members_and_coordinator_agree_on_the_largest_world():
    assert settings.MAX_SIZE == checks.MAX_SIZE
    assert resolve({"HOROVOD_SIZE": str(checks.MAX_SIZE)}).size == checks.MAX_SIZE


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match=ends_with(SettingCode.UNKNOWN_SETTING, "sise")):
        resolve({}, {"sise": 2})


def test_a_token_is_never_printed():
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "token")) as caught:
        resolve({}, {"token": 271828})
    assert "271828" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("off", False), ("0", False)])
def test_switches(text, value):
    assert resolve({"HOROVOD_TIMELINE_MARK_CYCLES": text}).timeline_mark_cycles is value


def test_lists_come_from_text_and_from_sequences():
    assert resolve({"HOROVOD_NETWORK_INTERFACES": "eth0, eth1"}).network_interfaces == ("eth0", "eth1")
    assert resolve({}, {"network_interfaces": ["eth0"]}).network_interfaces == ("eth0",)


@pytest.mark.parametrize(
    ("text", "address"), [("node-a:29400", ("node-a", 29400)), ("[::1]:29400", ("::1", 29400)), ("h:1", ("h", 1))]
)
def test_addresses(text, address):
    assert split_address(text, "coordinator") == address


@pytest.mark.parametrize(
    ("text", "address"), [(":9400", "127.0.0.1:9400"), ("h:9400", "h:9400"), ("[::1]:9400", "[::1]:9400")]
)
def test_a_page_without_a_host_is_on_loopback(text, address):
    assert resolve({"HOROVOD_WEB_LISTEN": text}).web_listen == address


def test_every_row_is_complete_and_unique():
    assert [s.name for s in SETTINGS] == [f.name for f in dataclasses.fields(Settings)]
    for column in ("env", "flag", "yaml"):
        values = [getattr(s, column) for s in SETTINGS if getattr(s, column)]
        assert len(values) == len(set(values)), column
    for setting in SETTINGS:
        assert setting.env.startswith("HOROVOD_")
        assert setting.help
        assert not setting.help.endswith(".")
        assert bool(setting.choices) == (setting.kind == "choice")
        if setting.default is not None and setting.kind != "list":
            text = str(int(setting.default)) if setting.kind == "bool" else str(setting.default)
            assert setting.parse(text) == setting.default
