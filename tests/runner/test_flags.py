"""The command line: what is accepted, what it means, and the sentence for what is not."""

from __future__ import annotations

import pytest

from horovod.runner.flags import flag_environment, make_parser, parse_args, refusal

ALL_FLAGS = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --log-without-timestamp --log-with-timestamp --log-hide-timestamp
--no-log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun --set-num-threads --no-set-num-threads
"""


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


def test_every_flag_of_the_contract_exists() -> None:
    assert set(ALL_FLAGS.split()) <= make_parser()._option_string_actions.keys()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--fusion-threshold-mb", "64"], "HOROVOD_FUSION_THRESHOLD", str(64 << 20)),
        (["--fusion-threshold-mb=0"], "HOROVOD_FUSION_THRESHOLD", "0"),
        (["--cycle-time-ms", "2.5"], "HOROVOD_CYCLE_TIME", "2.5"),
        (["--cache-capacity", "0"], "HOROVOD_CACHE_CAPACITY", "0"),
        (["--hierarchical-allreduce"], "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
        (["--no-hierarchical-allreduce"], "HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
        (["--no-stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "1"),
        (["--stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "0"),
        (["--log-level", "DEBUG"], "HOROVOD_LOG_LEVEL", "debug"),
        (["--log-without-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
        (["--log-with-timestamp"], "HOROVOD_LOG_HIDE_TIME", "0"),
        (["--log-hide-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
        (["--start-timeout", "5"], "HOROVOD_START_TIMEOUT", "5.0"),
        (["--network-interfaces", "eth0, eth1"], "HOROVOD_NETWORK_INTERFACES", "eth0,eth1"),
        (["--network-interface", "eth0", "--network-interface", "eth1"], "HOROVOD_NETWORK_INTERFACES", "eth0,eth1"),
        (["--autotune-gaussian-process-noise", "0.5"], "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5"),
    ],
)
def test_flags_become_variables(argv: list[str], name: str, value: str) -> None:
    assert environment(*argv) == {name: value}


def test_what_is_not_given_is_not_passed_on() -> None:
    assert environment() == {}


@pytest.mark.parametrize("flag", ["--cycle-time-ms", "--fusion-threshold-mb", "--cache-capacity", "--start-timeout"])
def test_negative_values(flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} must be >= 0, not -3"):
        environment(flag, "-3")


def test_values_are_checked_by_the_table() -> None:
    with pytest.raises(ValueError, match="--log-level='loud' is not usable: expected one of trace, debug"):
        environment("--log-level", "loud")
    with pytest.raises(ValueError, match=r"--autotune-gaussian-process-noise='2'.* from 0 to 1"):
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
        (["--network-interface", "a, b"], "a,b"),  # as in earlier versions
        (["--network-interfaces", "c,d"], "c,d"),
        (["--network-interface", "a,b", "--network-interfaces", "b,c", "--network-interface", "d"], "a,b,d,c"),
    ],
)
def test_options_for_interfaces_add_up(argv: list[str], names: str) -> None:
    assert environment(*argv) == {"HOROVOD_NETWORK_INTERFACES": names}


def test_an_interface_without_a_name_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="--network-interface='' is not usable: expected names"):
        environment("--network-interface", ",")


def test_two_dashes_end_the_options() -> None:
    assert parse_args(["-np", "2", "--", "-odd-name", "-x"]).command == ["-odd-name", "-x"]


@pytest.mark.parametrize("argv", [["-p22"], ["-p", "22"], ["--ssh-port=22"], ["--ssh-p", "22"]])
def test_values_may_be_attached_and_names_shortened(argv: list[str]) -> None:
    args = parse_args(["-np", "2", *argv, "true", "x"])
    assert (args.ssh_port, args.command) == (22, ["true", "x"])


def test_slots_is_short_for_slots_per_host() -> None:
    assert parse_args(["-np", "2", "--slots", "4", "true"]).slots_per_host == 4


def test_two_values() -> None:
    args = parse_args(["-np", "2", "--blacklist-cooldown-range", "1", "5", "true"])
    assert (args.blacklist_cooldown_range, args.command) == ([1, 5], ["true"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-np", "2", "--verbos-e", "true"], "no option --verbos-e; did you mean --verbose"),
        (["-np", "2", "-z", "true"], "There is no option -z"),
        (["-np", "2", "--no", "true"], "Ambiguous option: --no"),
        (["true"], "-np is missing"),
        (["-np", "0", "true"], "-np must be >= 1, not 0"),
        (["-np", "65537", "true"], "-np must be at most 65536, not 65537"),
        (["-np", "two", "true"], "invalid int value: 'two'"),
        (["-np"], "expected one argument"),
        (["-np", "2"], "There is no command to run"),
        (["-np", "2", "-H", "a:1", "-hostfile", "f", "true"], "exclude each other"),
        (["-np", "2", "--gloo", "--mpi", "true"], "not allowed with argument"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in mistake(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--min-np", "1"],
        ["--max-num-proc", "4"],
        ["--slots", "2"],
        ["--reset-limit", "3"],
        ["--blacklist-cooldown-range", "1", "2"],
        ["--host-discovery-script", "./x"],
        ["--mpi"],
        ["--jsrun"],
        ["--mpi-args=-x"],
        ["--tcp"],
        ["--binding-args=x"],
    ],
)
def test_what_cannot_be_had_is_refused_by_name(argv: list[str]) -> None:
    sentence = refused(*argv)
    assert sentence is not None
    assert sentence.endswith(".")
    assert "leave it out" in sentence


@pytest.mark.parametrize(
    "argv", [["--gloo"], ["--autotune"], ["--no-autotune"], ["--disable-cache"], ["--cycle-time-ms", "1"], ["-p", "2"]]
)
def test_what_changes_nothing_is_accepted(argv: list[str]) -> None:
    assert refused(*argv) is None


def test_help_says_what_has_no_effect() -> None:
    text = " ".join(make_parser().format_help().split())
    assert "--autotune no effect: there are no cycles to tune" in text
    assert "--fusion-threshold-mb MB operations are fused" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import horovod

    with pytest.raises(SystemExit) as ended:
        parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{horovod.__version__}\n"


def test_check_build_needs_nothing_else() -> None:
    assert parse_args(["--check-build"]).check_build
    assert parse_args(["-cb"]).check_build
