"""docs/launcher.md says what the launcher does: its options, its files, its examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from launcher_page import with_options

from horovod.launch import commands
from horovod.launch.command_line.config_file import read_config
from horovod.launch.command_line.flags import flag_environment, make_parser, parse_args, refusal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launcher.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_options_are_those_of_the_parser() -> None:
    assert with_options(TEXT) == TEXT, "python docs/tools/launcher_page.py docs/launcher.md"


def test_every_option_that_the_page_names_exists() -> None:
    """Also in what is written by hand."""
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]+(?=[\s`=,\"]|$)", " ".join(re.findall(r"`[^`\n]+`", TEXT))))
    foreign = {"-m", "-n", "-np"}
    prefixes = {"--slots"}
    parsers = [make_parser(), *commands.parsers().values()]
    assert named - foreign - prefixes <= {name for one in parsers for name in one._option_string_actions}


def test_the_synopsis_names_every_command() -> None:
    synopsis = TEXT.partition("## Synopsis")[2].partition("```\n\n")[0]
    (line,) = [line for line in synopsis.splitlines() if " | stop | " in line]
    assert set(line.removeprefix("horovodrun ").removesuffix(" ...").split(" | ")) == set(commands.NAMES)


def test_a_page_without_the_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        with_options("# horovodrun\n")


def test_the_file_of_settings_can_be_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "config.yaml").write_text(block)
    environ = read_config(tmp_path / "config.yaml")
    assert environ["HOROVOD_FUSION_THRESHOLD"] == str(64 << 20)
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "600.0"


def test_the_examples_are_commands_that_would_run() -> None:
    examples = TEXT.partition("## Examples")[2]
    commands = [line.partition("   #")[0] for line in examples.splitlines() if line.startswith("horovodrun ")]
    assert len(commands) > 4
    for command in commands:
        args = parse_args(shlex.split(command)[1:])
        assert args.check_build or args.command[:2] == ["python", "train.py"]
        flag_environment(args)
        assert refusal(args) is None


def test_every_exit_status_has_its_row() -> None:
    from horovod.launch import __main__ as launch
    from horovod.launch.console import control
    from horovod.worker.agent.gate import NOT_EXECUTABLE, NOT_FOUND

    table = TEXT.partition("## Exit status")[2].partition("\n## ")[0]
    codes = {
        launch.USAGE,
        launch.FAILED,
        launch._INTERRUPTED,
        control._PIPE_CLOSED,
        NOT_EXECUTABLE,
        NOT_FOUND,
        0,
        255,
    }
    assert codes <= {int(number) for number in re.findall(r"\b\d+\b", table)}
