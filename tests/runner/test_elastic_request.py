"""What may be asked of an elastic job: checked to the last number, although their sizes are fixed yet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from error_codes import ends_with
from event_words import DEPRECATED, NO_EFFECT, tells

from horovod.base.errors import ErrorCode, LaunchCode, SettingCode
from horovod.base.settings import SETTINGS, variables
from horovod.launch.__main__ import run_commandline
from horovod.launch.elastic.request import ElasticRequest, Replacement, Supply, write_policy
from horovod.protos.v1 import jobs_pb2
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript

NAMES = {
    name: name
    for name in (
        *("num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range"),
        *("host_discovery_script", "host_discovery"),
    )
}


def check(num_proc: int = 4, host_count: int | None = None, **given: Any) -> ElasticRequest:
    request = ElasticRequest(**given)
    request.check(num_proc, host_count, NAMES)
    return request


def test_what_makes_a_job_elastic() -> None:
    assert check(min_num_proc=4).elastic
    assert check(host_discovery_script="true").elastic
    assert not check(max_num_proc=8, slots=2, reset_limit=1, cooldown_range=(1, 3600)).elastic


def test_limits_are_allowed() -> None:
    check(min_num_proc=4, max_num_proc=4, host_count=2, reset_limit=0, cooldown_range=(3600, 3600))
    check(min_num_proc=4, host_count=1)  # its size is fixed


@pytest.mark.parametrize(
    ("given", "code", "facts"),
    [
        ({"min_num_proc": -1}, SettingCode.INVALID_SETTING, ["min_num_proc", "-1"]),
        ({"reset_limit": True}, SettingCode.INVALID_SETTING, ["reset_limit", "True"]),
        ({"min_num_proc": 5}, LaunchCode.CONFLICTING_OPTIONS, ["min_num_proc", "num_proc, 4,", "not 5"]),
        (
            {"min_num_proc": 1, "max_num_proc": 3},
            LaunchCode.CONFLICTING_OPTIONS,
            ["max_num_proc", "c, 4,", "not 3"],
        ),
        ({"min_num_proc": 1, "host_count": 1}, LaunchCode.CONFLICTING_OPTIONS, ["1 is given", "host_discovery_script"]),
        ({"reset_limit": 1 << 32}, SettingCode.INVALID_SETTING, ["reset_limit", "2 ** 32", "4294967296"]),
        ({"cooldown_range": (0, 5)}, SettingCode.INVALID_SETTING, ["cooldown_range", "1 to 3600", "0 5"]),
        ({"cooldown_range": (1, 3601)}, SettingCode.INVALID_SETTING, ["cooldown_range", "1 3601"]),
        ({"cooldown_range": (5, 1)}, SettingCode.INVALID_SETTING, ["cooldown_range", "5 1"]),
        ({"cooldown_range": (5,)}, SettingCode.INVALID_SETTING, ["cooldown_range", "not 5."]),
        (
            {"host_discovery_script": "true", "host_discovery": FixedHosts({})},
            LaunchCode.CONFLICTING_OPTIONS,
            ["host_discovery_script and host_discovery"],
        ),
        ({"host_discovery": {"h1": 2}}, SettingCode.INVALID_SETTING, ["find_available_hosts_and_slots", "dict"]),
        ({"host_discovery_script": "./nowhere"}, SettingCode.INVALID_SETTING, ["host_discovery_script", "'./nowhere'"]),
    ],
)
def test_what_cannot_be(given: dict[str, Any], code: ErrorCode, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(code, *facts)):
        check(**given)


def test_a_script_that_is_no_program(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("echo h1:1\n")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, script, "chmod +x")):
        check(host_discovery_script=str(script))


def test_slots_of_found_hosts_have_no_effect_where_none_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--min-np", "2", "--slots-per-host", "1")
    assert code == 127  # the program that is not there
    assert tells(text.splitlines()[0], "horovodrun: --slots-per-host", NO_EFFECT)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_commandline(["-np", "2", *argv, "no-such-program-anywhere"])
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_equal_sizes_mean_that_failed_processes_are_replaced() -> None:
    assert check(max_num_proc=4).replacement(4) is None
    assert check(min_num_proc=4).replacement(4) == Replacement(12, (4, 4), since_progress=True)
    assert check(min_num_proc=4, max_num_proc=4, reset_limit=0).replacement(4) == Replacement(0, (4, 4))


def test_other_sizes_are_those_of_an_elastic_job() -> None:
    assert check(min_num_proc=3).replacement(4) == Replacement(12, (3, None), since_progress=True)
    assert check(min_num_proc=0, max_num_proc=4).replacement(4) == Replacement(12, (1, 4), since_progress=True)
    several = check(min_num_proc=4, max_num_proc=5, reset_limit=1).replacement(4)
    assert several == Replacement(1, (4, 5))
    assert [several.slots(room) for room in (4, 5, 9)] == [4, 5, 5]


def test_the_command_says_that_a_job_without_named_hosts_does_not_grow(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--min-np", "1", "--max-np", "4")
    assert code == 127  # the program that is not there
    assert tells(text.splitlines()[0], "horovodrun: --max-np", NO_EFFECT, "2 slots")


def test_hosts_that_are_found_make_sizes_change() -> None:
    found = check(host_discovery_script="true x y", slots=2, cooldown_range=(1, 2), reset_limit=5)
    assert found.replacement(4) == Replacement(None, (4, None), supplied=True)
    supply = found.supply()
    assert supply is not None
    assert isinstance(supply.source, HostDiscoveryScript)
    assert (supply.cooldown_range, supply.reset_limit) == ((1, 2), 5)
    assert found.without_effect() == []
    fixed = FixedHosts({"a": 1})
    given = check(host_discovery=fixed, min_num_proc=2, max_num_proc=4)
    assert given.elastic
    assert given.replacement(4) == Replacement(None, (2, 4), supplied=True)
    assert given.supply() == Supply(fixed)
    assert check(min_num_proc=1).supply() is None


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["-H", "h1:2", "--host-discovery-script", "true"], LaunchCode.CONFLICTING_OPTIONS),
        (["--coordinator", "h1:29400", "--host-discovery-script", "true"], LaunchCode.CONFLICTING_OPTIONS),
        (["--host-discovery-script", "no-such-program"], SettingCode.INVALID_SETTING),
        (["--host-discovery-script", "'unclosed"], SettingCode.INVALID_SETTING),
        (["--host-discovery-script", "/tmp"], SettingCode.INVALID_SETTING),
        (["--host-discovery-script", "false"], LaunchCode.DISCOVERY_FAILED),
        (["--host-discovery-script", "echo two words"], SettingCode.INVALID_HOSTS),
        (["--host-discovery-script", "echo h1"], SettingCode.INVALID_HOSTS),
        (["--host-discovery-script", "true", "--elastic-timeout", "0"], LaunchCode.DISCOVERY_FAILED),
    ],
)
def test_the_command_refuses_what_finds_no_hosts(
    capsys: pytest.CaptureFixture[str], options: list[str], code: ErrorCode
) -> None:
    status, text = said(capsys, *options)
    assert status in (1, 2)
    assert re.search(ends_with(code, "h1" if "h1" in options else ""), text.splitlines()[-1])


def test_the_command_checks_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--min-np", "1", "--blacklist-cooldown-range", "9", "1")
    assert code == 2
    assert re.search(ends_with(SettingCode.INVALID_SETTING, "--blacklist-cooldown-range", "9 1"), text)


def test_options_that_a_job_of_fixed_size_does_not_need_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--max-np", "4", "--reset-limit", "3")
    told = text.splitlines()[0]
    assert tells(told, "horovodrun: --max-np and --reset-limit", NO_EFFECT, "--min-np", "--host-discovery-script")
    assert code == 127, "and the job goes on, to its command, which does not exist"


def test_deprecated_options_are_named_and_taken(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--log-hide-timestamp")
    assert tells(text.splitlines()[0], "horovodrun: --log-hide-timestamp", DEPRECATED, "--log-without-timestamp")
    assert code == 127


def test_hosts_and_their_number_come_from_lsf(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "localhost 2")
    with pytest.raises(SystemExit) as ended:
        run_commandline(["no-such-program-anywhere"])
    assert ended.value.code == 127
    with pytest.raises(SystemExit):
        run_commandline(["-np", "3", "true"])
    assert tells(capsys.readouterr().err, "(3)", "(2)", f"[{SettingCode.TOO_FEW_SLOTS}]")


def test_settings_reach_the_policy_by_their_names() -> None:
    """A name that only one side has would be a setting without effect (docs/adr/0119-rules-by-name.md)."""
    fields = jobs_pb2.Policy.DESCRIPTOR.fields_by_name
    named = {row.name.removeprefix("elastic_") for row in SETTINGS if row.name.startswith("elastic_")}
    assert named - set(fields) == {"timeout_seconds"}  # which the policy calls patience_seconds
    spec = jobs_pb2.JobSpec()
    given = variables(elastic_timeout_seconds=7.0, elastic_keeps_slots=True, elastic_leave_seconds=8.0)
    write_policy(spec, ElasticRequest(min_num_proc=1).replacement(2), given)
    assert (spec.policy.patience_seconds, spec.policy.keeps_slots, spec.policy.leave_seconds) == (7, True, 8)
