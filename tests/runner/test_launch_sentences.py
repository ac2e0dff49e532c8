"""The sentences of errors of launchers, whole, with their codes. Other tests name the code and the facts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import LAUNCHER

import horovod
from horovod import __version__
from horovod.base import certificates
from horovod.launch import commands, task
from horovod.launch.__main__ import run_commandline
from horovod.launch.command_line.config_file import read_config
from horovod.launch.console.standard_input import refusal_elsewhere
from horovod.launch.hosts.agents import NO_HOROVOD, NO_PYTHON, OTHER_VERSION, explain
from horovod.launch.ssh import Ssh
from horovod.worker.agent.cores_and_gpus import pinned
from horovod.worker.agent.supervisor import Slot


def _exactly(sentence: str) -> str:
    return rf"\A{re.escape(sentence)}\Z"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["-np", "2", "--verbos-e", "true"],
            "There is no option --verbos-e; did you mean --verbose? (see horovodrun --help). [wrong-command-line]",
        ),
        (
            ["-np", "2"],
            (
                "There is no command to run: write it last, for example horovodrun -np 2 python train.py (see "
                "horovodrun --help). [wrong-command-line]"
            ),
        ),
        (
            ["-np", "two", "true"],
            "Argument -np/--num-proc: invalid int value: 'two' (see horovodrun --help). [wrong-command-line]",
        ),
        (
            ["-np", "2", "-H", "a:1", "-hostfile", "f", "true"],
            (
                "-H and -hostfile exclude each other: name the hosts in one of them (see horovodrun --help). "
                "[conflicting-options]"
            ),
        ),
        (
            ["-np", "2", "--detach", "true"],
            (
                "--detach is for jobs on registered agents: name their coordinator with --coordinator host:port. "
                "[conflicting-options]"
            ),
        ),
        (["-np", "0", "true"], "-np must be >= 1, not 0. [invalid-setting]"),
        (
            ["-np", "2", "--mpi", "true"],
            (
                "--mpi is not usable: there is no MPI in this build. Write `mpirun -np N ...` in place of horovodrun: "
                "the processes that it starts form a world by themselves. [unsupported-option]"
            ),
        ),
        (
            ["-np", "2", "--host-discovery-script", "true", "--coordinator", "h1:29400", "true"],
            (
                "--host-discovery-script and --coordinator exclude each other: a job on registered agents grows onto "
                "agents that register later, and --host-discovery-script has this launcher start agents. "
                "[conflicting-options]"
            ),
        ),
        (
            ["-np", "2", "--min-np", "3", "true"],
            "--min-np must be at most -np, 2, not 3. [conflicting-options]",
        ),
        (
            ["-np", "2", "--blacklist-cooldown-range", "9", "1", "true"],
            (
                "--blacklist-cooldown-range must be two numbers of seconds from 1 to 3600, the smaller one first, not "
                "9 1. [invalid-setting]"
            ),
        ),
        (
            ["-np", "2", "no-such-command-anywhere"],
            "The command 'no-such-command-anywhere' was not found on PATH. [command-unusable]",
        ),
        (["-np", "2", "/dev"], "The command '/dev' is a folder. [command-unusable]"),
        (
            ["-np", "2", "--output-filename", "/dev/null/x", "true"],
            (
                "--output-filename '/dev/null/x' is not usable as the folder for output: Not a directory "
                "(/dev/null/x/rank.0). [output-unusable]"
            ),
        ),
        (
            ["-np", "2", "--config-file", "/no/such.yaml", "true"],
            "The configuration file '/no/such.yaml' cannot be read: No such file or directory. [wrong-config-file]",
        ),
    ],
)
def test_command_lines(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_commandline(argv)
    assert capsys.readouterr().err == f"horovodrun: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"hosts": "a:1", "hostfile": "f"},
            "hosts and hostfile exclude each other: give one of them. [conflicting-options]",
        ),
        (
            {"use_mpi": True},
            (
                "There is no MPI in this build: leave use_mpi and mpi_args out, horovod.run needs none. "
                "[unsupported-option]"
            ),
        ),
        ({"num_proc": 0}, "num_proc must be an integer >= 1, not 0. [invalid-setting]"),
        (
            {"num_proc": 2, "min_num_proc": 1, "hosts": "a:2"},
            (
                "An elastic job on a fixed list of hosts needs at least 2 hosts, but 1 is given. Name more, or find "
                "hosts with a program (host_discovery_script). [conflicting-options]"
            ),
        ),
    ],
)
def test_arguments_of_run(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=_exactly(sentence)):
        horovod.run(print, **arguments)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("params: {cycle_time: 1}", "has the unknown key 'params.cycle_time'; did you mean 'cycle_time_ms'?."),
        ("params: 3", "has 'params' with the value 3: expected keys below it."),
        ("controller: mpi", "asks for the controller 'mpi', which is not built: leave the key out or write gloo."),
        ("- a", "holds list: expected sections such as `params:` with keys below."),
    ],
)
def test_configuration_files(text: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    sentence = f"The configuration file {str(path)!r} {end} [wrong-config-file]"
    with pytest.raises(ValueError, match=_exactly(sentence)):
        read_config(path)


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [
        (NO_PYTHON, ["/opt/python"], "there is no Python there: neither /opt/python nor python3 [host-installation]"),
        (
            NO_HOROVOD,
            ["No module named 'horovod'"],
            (
                f"Horovod is not installed there: No module named 'horovod'. Install version {__version__} for the "
                "Python that ssh finds [host-installation]"
            ),
        ),
        (
            OTHER_VERSION,
            ["0.99.1"],
            f"Horovod has version 0.99.1 there, but {__version__} here: install the same on both [host-installation]",
        ),
        (
            255,
            ["Host key verification failed."],
            (
                "its host key is not known. Connect once by `ssh b` and compare it, or take unknown keys with "
                "--ssh-host-keys accept-new [ssh-host-key]"
            ),
        ),
        (
            255,
            ["@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @"],
            (
                "its host key is another one than in known_hosts. If that is as it should be, `ssh-keygen -R b` "
                "forgets the old one [ssh-host-key]"
            ),
        ),
        (
            255,
            ["u@b: Permission denied (publickey)."],
            (
                "it refuses the key (u@b: Permission denied (publickey).). `ssh b` must work without a password; -i "
                "names another key [ssh-login-refused]"
            ),
        ),
        (
            255,
            ["ssh: Could not resolve hostname b"],
            "its name is not known here (ssh: Could not resolve hostname b) [unknown-host]",
        ),
        (
            255,
            ["connect to host b port 22: Connection refused"],
            (
                "it can't be reached (connect to host b port 22: Connection refused). -p names another port of sshd "
                "[unknown-host]"
            ),
        ),
        (255, [], "ssh failed: ssh said nothing [no-agent-on-host]"),
        (-9, [], "its agent ended with -9: it said nothing [no-agent-on-host]"),
        (
            1,
            ["horovod-worker: This host does not reach the launcher at any of a:1. [unknown-host]"],
            (
                "its agent ended with 1: horovod-worker: This host does not reach the launcher at any of a:1. "
                "[unknown-host]"
            ),
        ),
    ],
)
def test_hosts_without_an_agent(code: int, said: list[str], why: str) -> None:
    assert explain(Ssh(), "b", code, said) == why


def _few_gpus() -> None:
    pinned([Slot(rank, ["true"], {"CUDA_VISIBLE_DEVICES": "0"}) for rank in range(2)])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            _few_gpus,
            (
                "Each of 2 processes is to have a GPU of its own (HOROVOD_PIN_GPUS), but there are 1 (0): "
                "CUDA_VISIBLE_DEVICES is '0'. Start fewer processes, or leave --pin-gpus out and let the program "
                "choose. A GPU that is divided (MIG) counts as one: name its parts in CUDA_VISIBLE_DEVICES. "
                "[too-few-gpus]"
            ),
        ),
        (
            lambda: certificates.make(Path("/no/such"), ["a"], 0),
            "--days must be from 1 to 3650, not 0. [invalid-setting]",
        ),
        (
            lambda: commands._certs(commands._parser().parse_args(["certs", "/no/such"])),
            (
                "--hosts is missing: name the hosts and addresses of the coordinator, like node-a,10.0.0.1. "
                "[wrong-command-line]"
            ),
        ),
    ],
)
def test_calls(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=_exactly(sentence)):
        call()


def test_a_program_on_stdin() -> None:
    assert refusal_elsewhere(["python", "-"]) == (
        "'python -' reads its program from stdin, which reaches only ranks that horovodrun starts on this host "
        "itself. Write it to a file that every host can read, and run that. [program-on-stdin]"
    )
    done = subprocess.run(
        [*LAUNCHER, "-np", "2", "python3", "-"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == (
        "horovodrun: 'python3 -' reads its program from stdin, and there is nothing on stdin: no rank would run "
        "anything. [program-on-stdin]\n"
    )


def test_ranks_of_run() -> None:
    assert task.no_result(1, "b") == (
        "Rank 1 on host b ended with exit code 0 before the function returned: there is no result. Does the function "
        "call sys.exit or os._exit? [rank-failed]"
    )
    result = task.Result(b"", "HorovodInternalError: Rank 0 was lost. [peer-lost]", "Traceback ...\n")
    assert task.raised(1, "b", result) == (
        "Rank 1 on host b raised HorovodInternalError: Rank 0 was lost.\n\nTraceback ...\n[function-raised]"
    )
