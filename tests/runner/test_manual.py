"""The manuals say what the three programs do: their options, files, examples."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from error_codes import ends_with
from launcher_page import PAGES, with_options

from horovod.base.errors import LaunchCode
from horovod.base.protocol import __version__
from horovod.coordinator.__main__ import make_parser as coordinator_parser
from horovod.launch import commands
from horovod.launch.__main__ import run_commandline
from horovod.launch.asked import USAGE
from horovod.launch.command_line.config_file import read_config
from horovod.launch.command_line.flags import COMMANDS, flag_environment, make_parser, parse_args, refusal
from horovod.worker.agent.__main__ import make_parser as agent_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launcher.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_options_are_those_of_the_parser(page: str) -> None:
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    assert with_options(text, page) == text, "python docs/tools/launcher_page.py docs"


@pytest.mark.parametrize("make", [make_parser, coordinator_parser, agent_parser])
def test_every_option_has_a_meaning_and_an_honest_value(make: Callable[[], argparse.ArgumentParser]) -> None:
    for action in make()._actions:
        assert action.help, action.option_strings
        if action.option_strings and action.nargs != 0 and action.help is not argparse.SUPPRESS:
            assert action.metavar or action.choices, action.option_strings


@pytest.mark.parametrize("program", ["horovod.launch", "horovod.coordinator", "horovod.worker.agent"])
def test_each_program_tells_its_version(program: str) -> None:
    command = [sys.executable, "-m", program, "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{__version__}\n"


def test_help_lists_the_commands_with_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_commandline(["help"])
    assert not ended.value.code
    page = capsys.readouterr().out
    assert set(COMMANDS) == {*commands.parsers(), "help"}
    for name, text in COMMANDS.items():
        assert f"  {name:8}{text}\n" in page
    assert "--transport {auto,shm,tcp}" in page
    assert re.search(r"\(default:\s+60\s+seconds\)", page)
    with pytest.raises(SystemExit) as ended:
        run_commandline(["help", "stop"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: horovodrun stop ")


@pytest.mark.parametrize(("word", "meant"), [("sbmit", "submit"), ("pss", "ps"), ("helpp", "help")])
def test_a_misspelt_command_is_told(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_commandline([word, "job"])
    assert ended.value.code == USAGE
    said = capsys.readouterr().err
    assert re.search(ends_with(LaunchCode.WRONG_COMMAND_LINE, word, f"did you mean {meant}?", "-np 2"), said.strip())


@pytest.mark.parametrize("argv", [["python", "train.py"], ["-H", "h1:2", "sbmit"]])
def test_a_program_without_np_is_no_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_commandline(argv)
    assert "did you mean" not in capsys.readouterr().err


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
    assert set(line.removeprefix("horovodrun ").removesuffix(" ...").split(" | ")) == set(COMMANDS)


def test_a_page_without_the_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        with_options("# horovodrun\n", "launcher.md")


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
