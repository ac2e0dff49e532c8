"""The command line: what is accepted, what it means, and the sentence for what is not."""

from __future__ import annotations

import re

import pytest
from error_codes import ends_with
from event_words import NO_EFFECT

from horovod.base.errors import LaunchCode, SettingCode
from horovod.launch.command_line.flags import flag_environment, make_parser, parse_args, refusal

pytestmark = pytest.mark.filterwarnings("ignore:--.* has no effect:DeprecationWarning")


def environment(*argv: str) -> dict[str, str]:
    return flag_environment(parse_args(["-np", "1", *argv, "true"]))


def refused(*argv: str) -> str | None:
    return refusal(parse_args(["-np", "1", *argv, "true"]))


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("horovodrun: ")
    assert sentence.count("\n") == 1
    return sentence


def test_what_is_not_given_is_not_passed_on() -> None:
    assert environment() == {}


def test_values_are_checked_by_the_table() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "--log-level='loud'", "trace, debug")):
        environment("--log-level", "loud")
    facts = ["--autotune-gaussian-process-noise='2'", "0 to 1"]
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, *facts)):
        environment("--autotune-gaussian-process-noise", "2")


def test_the_program_keeps_its_arguments() -> None:
    command = ["python", "train.py", "--no", "--auto", "-np", "7", "--", "-v", "--log-level"]
    args = parse_args(["-np", "2", "--verbose", *command])
    assert (args.command, args.num_proc, args.verbose) == (command, 2, True)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--network-interface", "a"], "a"),
        (["--network-interface", "a", "--network-interface", "b"], "a,b"),
        (["--network-interface", "a, b"], "a,b"),  # deprecated
        (["--network-interfaces", "c,d"], "c,d"),
        (["--network-interface", "a,b", "--network-interfaces", "b,c", "--network-interface", "d"], "a,b,d,c"),
    ],
)
@pytest.mark.filterwarnings("ignore:several names in one --network-interface:DeprecationWarning")
def test_options_for_interfaces_add_up(argv: list[str], names: str) -> None:
    assert environment(*argv) == {"HOROVOD_NETWORK_INTERFACES": names}


@pytest.mark.filterwarnings("ignore:several names in one --network-interface:DeprecationWarning")
def test_an_interface_without_a_name_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "--network-interface=''")):
        environment("--network-interface", ",")


def test_two_dashes_end_the_options() -> None:
    assert parse_args(["-np", "2", "--", "-odd-name", "-x"]).command == ["-odd-name", "-x"]


@pytest.mark.parametrize("argv", [["-p22"], ["-p", "22"], ["--ssh-port=22"], ["--ssh-p", "22"]])
def test_values_may_be_attached_and_names_shortened(argv: list[str]) -> None:
    args = parse_args(["-np", "2", *argv, "true", "x"])
    assert (args.ssh_port, args.command) == (22, ["true", "x"])


def test_two_values() -> None:
    args = parse_args(["-np", "2", "--blacklist-cooldown-range", "1", "5", "true"])
    assert (args.blacklist_cooldown_range, args.command) == ([1, 5], ["true"])


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["-np", "2", "--verbos-e", "true"], ["--verbos-e", "--verbose"]),
        (["-np", "2", "-z", "true"], ["-z"]),
        (["-np", "2", "--no", "true"], ["--no", "--no-autotune"]),  # which of those that begin so?
        (["true"], ["-np 2"]),  # the example
        (["-np", "two", "true"], ["-np", "'two'"]),
        (["-np"], ["rgument -np"]),
        (["-np", "2"], ["train.py"]),  # the example
        (["-np", "2", "--gloo", "--mpi", "true"], ["--gloo", "--mpi"]),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: list[str], facts: list[str]) -> None:
    assert re.search(ends_with(LaunchCode.WRONG_COMMAND_LINE, *facts), mistake(capsys, *argv))


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["-H", "a:1", "-hostfile", "f"], ["-H ", "-hostfile"]),
        (["-H", "a:1", "--host-discovery-script", "s"], ["-H ", "--host-discovery-script"]),
    ],
)
def test_hosts_are_named_in_one_way(capsys: pytest.CaptureFixture[str], argv: list[str], facts: list[str]) -> None:
    sentence = mistake(capsys, "-np", "2", *argv, "true")
    assert re.search(ends_with(LaunchCode.CONFLICTING_OPTIONS, *facts), sentence)


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        (["--mpi"], "`mpirun -np N ...`"),
        (["--jsrun"], "`jsrun ...`"),
        (["--mpi-args=-x"], "mpirun"),
        (["--binding-args=x"], "--thread-affinity"),
    ],
)
def test_what_cannot_be_had_says_what_to_use_instead(argv: list[str], instead: str) -> None:
    sentence = refused(*argv)
    assert sentence is not None
    assert re.search(ends_with(LaunchCode.UNSUPPORTED_OPTION, f"{argv[0].partition('=')[0]} ", instead), sentence)


@pytest.mark.parametrize(
    "argv",
    [
        *(["--gloo"], ["--autotune"], ["--no-autotune"], ["--disable-cache"], ["--cycle-time-ms", "1"], ["-p", "2"]),
        *(["--tcp"], ["--min-np", "1"], ["--reset-limit", "1"]),
    ],
)
def test_what_changes_nothing_is_accepted(argv: list[str]) -> None:
    assert refused(*argv) is None


@pytest.mark.parametrize(("count", "limit"), [("0", "1"), ("65537", "65536")])
def test_how_many_processes_there_can_be(count: str, limit: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "-np", f" {limit}, ", f" {count}.")):
        parse_args(["-np", count, "true"])


def test_help_says_what_has_no_effect() -> None:
    text = " ".join(make_parser().format_help().split())
    assert f"--autotune {NO_EFFECT}" in text
    assert f"--fusion-threshold-mb MB {NO_EFFECT}" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import horovod

    with pytest.raises(SystemExit) as ended:
        parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{horovod.__version__}\n"


def test_check_build_needs_nothing_else() -> None:
    assert parse_args(["--check-build"]).check_build
    assert parse_args(["-cb"]).check_build
