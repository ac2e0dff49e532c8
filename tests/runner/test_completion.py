"""Completion scripts, in the shells that they are for."""

from __future__ import annotations

import argparse
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import DEADLINE_S

from horovod.launch.__main__ import run_commandline
from horovod.launch.command_line.completion import SHELLS, options_of, script
from horovod.launch.command_line.flags import make_parser

Ask = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def commands() -> dict[str, argparse.ArgumentParser]:
    """Such as may stand in place of the options."""
    parser = argparse.ArgumentParser(prog="horovodrun tell", add_help=False)
    parser.add_argument("--aloud", action="store_true", help="it's [loud]")
    parser.add_argument("--form", choices=("json", "table"))
    return {"tell": parser}


def have(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: {shell})")


@pytest.fixture(params=["bash", "fish"])
def ask(request: pytest.FixtureRequest, tmp_path: Path, commands: dict[str, argparse.ArgumentParser]) -> Ask:
    """ask(line) is what the shell offers at the end of the line."""
    shell = request.param
    have(shell)
    path = tmp_path / "completion"
    path.write_text(script(shell, make_parser(), commands))
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    program = {
        "bash": f'source {path}; COMP_LINE=$1 COMP_POINT=${{#1}}; _horovodrun; printf "%s\\n" "${{COMPREPLY[@]}}"',
        "fish": f"source {path}; complete -C $argv[1]",
    }[shell]
    start = {"bash": ["bash", "--norc", "-c", program, "bash"], "fish": ["fish", "-N", "-c", program]}[shell]
    environ = {**os.environ, "HOME": str(tmp_path)}

    def offered(line: str) -> list[str]:
        done = subprocess.run([*start, line], capture_output=True, text=True, cwd=tmp_path, env=environ)
        # bash: "compopt: not currently executing completion function"
        assert not [line for line in done.stderr.splitlines() if "compopt" not in line], done.stderr
        words = [text.partition("\t")[0] for text in done.stdout.splitlines() if text]
        return [word.rpartition("=")[2] if shell == "fish" and word.startswith("--") else word for word in words]

    return offered


def test_what_is_offered(ask: Ask) -> None:
    assert ask("horovodrun --log-lev") == ["--log-level"]
    assert sorted(ask("horovodrun -np 2 --verbose --log-level ")) == sorted(
        ["trace", "debug", "info", "warning", "error", "fatal"]
    )
    assert ask("horovodrun --log-level=in") == ["info"]
    assert ask("horovodrun -np 2 -H h1:2,h2:2 --slots") == ["--slots-per-host"]
    assert ask("horovodrun --blacklist-cooldown-range 1 2 --timeline-file") == ["--timeline-filename"]
    assert "lo" in ask("horovodrun --network-interface ")
    assert ask("horovodrun --output-filename a-") in (["a-folder"], ["a-folder/"])
    assert "a-file" in ask("horovodrun --config-file a-")
    assert ask("horovodrun --no-autot") == [], "what --help hides"


def test_the_program_is_not_ours(ask: Ask) -> None:
    assert "sh" in ask("horovodrun -np 2 s")
    assert ask("horovodrun -np 2 no-such-program --log-lev") == []
    assert ask("horovodrun -np 2 -- no-such-program --log-lev") == []
    assert ask("horovodrun --no-autotune no-such-program --log-lev") == []


def test_commands_in_place_of_options(ask: Ask) -> None:
    assert "tell" in ask("horovodrun te")
    assert ask("horovodrun tell --alo") == ["--aloud"]
    assert ask("horovodrun tell --form ") == ["json", "table"]
    assert ask("horovodrun tell --log-lev") == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key(shell: str, tmp_path: Path, commands: dict[str, argparse.ArgumentParser]) -> None:
    have(shell)
    path = tmp_path / "completion"
    path.write_text(script(shell, make_parser(), commands))
    environ = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb", "PS1": "$ "}
    start = {
        "bash": (["bash", "--norc", "--noprofile", "-i"], f"source {path}"),
        "zsh": (["zsh", "-f", "-i"], f"autoload -U compinit && compinit -u -D; source {path}"),
    }
    command, first = start[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(command[0], command, environ)
    try:
        os.write(terminal, f"{first}; horovodrun() {{ echo \"<$*>\"; }}; echo re''ady\n".encode())
        until(terminal, b"ready\r")
        os.write(terminal, b"horovodrun -np 2 --timeline-filen\tx --log-level tra\ttrue\n")
        shown = until(terminal, b"true>\r")
        assert b"<-np 2 --timeline-filename x --log-level trace true>" in shown.replace(b"\r\n", b"\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal: int, end: bytes) -> bytes:
    """What appears on the terminal, up to `end`."""
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    while end not in shown:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], shown
        shown += os.read(terminal, 4096)
    return shown


def test_every_shown_option_is_in_every_script(commands: dict[str, argparse.ArgumentParser]) -> None:
    shown = [one for one in options_of(make_parser()) if not one.hidden]
    for shell in SHELLS:
        text = script(shell, make_parser(), commands)
        for one in shown:
            for name in one.names:
                assert name.lstrip("-") in text


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        run_commandline(["--completion", shell])
        assert f"{shell} completion of horovodrun" in capsys.readouterr().out
