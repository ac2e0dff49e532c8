"""horovodrun from the outside: what ranks are told, what one sees of them, and what the exit code says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with
from event_words import tells
from launching import LAUNCHER

from horovod.base.errors import ErrorCode, LaunchCode, SettingCode, code_of

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

SHOW = """
names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME".split()
print(*(os.environ["HOROVOD_" + name] for name in names))
"""


def by_rank(output: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in output.splitlines())


def test_ranks_know_their_place(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "3", *program(SHOW))
    name = socket.gethostname()
    assert (done.returncode, done.stderr) == (0, "")
    assert by_rank(done.stdout) == {f"[{rank}]<stdout>": f"{rank} 3 {rank} 3 0 1 {name}" for rank in range(3)}


def test_two_names_of_this_machine_are_two_hosts(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "3", "-H", "127.0.0.1:2,127.0.0.2:2", *program(SHOW))
    assert by_rank(done.stdout) == {
        "[0]<stdout>": "0 3 0 2 0 2 127.0.0.1",
        "[1]<stdout>": "1 3 1 2 0 1 127.0.0.1",
        "[2]<stdout>": "2 3 0 1 1 2 127.0.0.2",
    }


def test_ranks_share_a_coordinator_and_a_token_that_nobody_can_guess(horovodrun: Run, program: Program) -> None:
    source = "print(os.environ['HOROVOD_COORDINATOR'], os.environ['HOROVOD_TOKEN'], os.environ['PYTHONUNBUFFERED'])"
    runs = [by_rank(horovodrun("-np", "2", *program(source)).stdout) for _ in range(2)]
    first, second = (set(run.values()) for run in runs)
    assert len(first) == len(second) == 1
    address, token, unbuffered = first.pop().split()
    assert address.startswith("127.0.0.1:")
    assert (len(token) >= 32, unbuffered) == (True, "1")
    assert token not in second.pop()


def test_stdout_and_stderr_stay_apart(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "1", *program("print('out'); print('err', file=sys.stderr)"))
    assert (done.stdout, done.stderr) == ("[0]<stdout>:out\n", "[0]<stderr>:err\n")


def test_a_last_line_without_end_is_shown(horovodrun: Run, program: Program) -> None:
    done = horovodrun(
        "-np", "2", *program("sys.stdout.write(f'one\\nlast of {rank}'); sys.stdout.flush(); os._exit(0)")
    )
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0]<stdout>:last of 0", "[0]<stdout>:one", "[1]<stdout>:last of 1", "[1]<stdout>:one"]


def test_bytes_that_are_no_text_pass_through(program: Program) -> None:
    source = r"os.write(1, b'\xff\xfe caf\xc3\xa9\n')"
    done = subprocess.run([*LAUNCHER, "-np", "1", *program(source)], capture_output=True, timeout=60)
    assert done.stdout == b"[0]<stdout>:\xff\xfe caf\xc3\xa9\n"


def test_large_output_is_complete_and_in_order(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "2", *program("for i in range(100_000): sys.stdout.write(f'{i} of {rank}\\n')"))
    lines = done.stdout.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<stdout>:{i} of {rank}" for i in range(100_000)]
    assert len(lines) == 200_000


def test_a_line_larger_than_any_buffer_is_cut_and_complete(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "1", *program("sys.stdout.write('x' * 3_000_000 + '\\n')"))
    pieces = [line.removeprefix("[0]<stdout>:") for line in done.stdout.splitlines()]
    assert "".join(pieces) == "x" * 3_000_000
    assert len(pieces) == 3


def test_output_files(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    command = program("print('out', rank); sys.stderr.write('err\\r100%')")
    done = horovodrun("-np", "2", "--output-filename", str(tmp_path / "logs"), *command)
    assert done.returncode == 0
    for rank in range(2):
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_bytes() == b"out %d\n" % rank
        assert (tmp_path / f"logs/rank.{rank}/stderr").read_bytes() == b"err\r100%"
    assert "[1]<stdout>:out 1" in done.stdout


def test_timestamps(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "1", "-prefix-timestamp", *program("print('x')"))
    assert done.stdout.endswith("[0]<stdout>:x\n")
    assert len(done.stdout) == len("Thu Feb 29 01:02:03 2024[0]<stdout>:x\n")


def test_flags_beat_the_file_which_beats_the_environment(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("params: {cycle_time_ms: 1.5, cache_capacity: 15}\n")
    names = ["HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD"]
    show = program(f"print(*(os.environ[name] for name in {names}))")
    environ = dict.fromkeys(names, "25")
    done = horovodrun("-np", "1", "--config-file", str(config), "--cycle-time-ms", "3.5", *show, environ=environ)
    assert done.stdout == "[0]<stdout>:3.5 15 25\n"


def test_interfaces_reach_nccl_unless_the_user_has_told_it_others(horovodrun: Run, program: Program) -> None:
    show = program("print(os.environ['HOROVOD_NETWORK_INTERFACES'], os.environ['NCCL_SOCKET_IFNAME'])")
    flags = ["--network-interface", "eth0,eth1", "--network-interfaces", "ib0"]
    assert horovodrun("-np", "1", *flags, *show).stdout == "[0]<stdout>:eth0,eth1,ib0 eth0,eth1,ib0\n"
    done = horovodrun("-np", "1", *flags, *show, environ={"NCCL_SOCKET_IFNAME": "=ib1"})
    assert done.stdout == "[0]<stdout>:eth0,eth1,ib0 =ib1\n"


def test_a_cluster_that_is_named_in_the_environment_alone_is_not_used_and_that_is_said(
    horovodrun: Run, program: Program
) -> None:
    named = {"HOROVOD_COORDINATOR": "127.0.0.1:1"}
    done = horovodrun("-np", "1", *program("print('here')"), environ=named)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:here\n")
    assert tells(done.stderr, "HOROVOD_COORDINATOR", "`horovodrun --coordinator 127.0.0.1:1 ...`")
    within = {**named, "HOROVOD_RANK": "0"}  # a rank's own: nobody meant it
    assert horovodrun("-np", "1", *program(""), environ=within).stderr == ""


def test_the_first_failure_is_the_exit_code(horovodrun: Run, program: Program) -> None:
    code = 3
    source = f"print(os.getpid())\nif rank == 1: sys.exit({code})\nwait_for_signals()"
    # Long enough for the others to say their numbers; that they are given 3 s is test_agent.py's business.
    done = horovodrun("-np", "3", *program(source), graces={"failure_grace_s": 1.0})
    pid = by_rank(done.stdout)["[1]<stdout>"]
    assert done.returncode == code
    facts = [f"Rank 1 on host {socket.gethostname()} (pid {pid})", f"exit code {code};", "ranks 0 and 2"]
    assert re.search(ends_with(LaunchCode.RANK_FAILED, *facts), done.stderr)
    assert done.stderr.count("\n") == 1


def test_a_rank_ended_by_a_signal(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "2", *program("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 137
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 0 on host", "signal 9 (SIGKILL)"), done.stderr)


def test_the_others_may_report_before_they_are_stopped(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    os.mkfifo(gone)
    source = f"""
import select
if rank == 0:
    print(os.getpid(), file=open({str(gone)!r}, "w"), flush=True)
    os._exit(5)
peer = os.pidfd_open(int(open({str(gone)!r}).readline()))  # readable from its end on; a pipe is closed earlier
select.select([peer], [], [])
print("a peer is gone", file=sys.stderr)
sys.exit(7)
"""
    done = horovodrun("-np", "2", *program(source))
    assert done.returncode == 5
    assert "[1]<stderr>:a peer is gone\n" in done.stderr
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "exit code 5;", "rank 1 ", "exit code 7"), done.stderr)


def test_a_rank_that_ends_well_does_not_stop_the_others(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    os.mkfifo(gone)
    source = f"""
if rank == 0:
    pipe = os.open({str(gone)!r}, os.O_WRONLY)
    os._exit(0)
with open({str(gone)!r}) as pipe:
    pipe.read()
print("done")
"""
    done = horovodrun("-np", "2", *program(source))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1]<stdout>:done\n", "")


def test_a_command_that_cannot_be_started(horovodrun: Run, tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print()\n")
    cases = {
        "no-such-command": (127, "PATH"),
        str(tmp_path / "none"): (127, "none"),
        str(plain): (126, "chmod +x"),
        str(tmp_path): (126, "folder"),
    }
    for command, (code, fact) in cases.items():
        done = horovodrun("-np", "2", command)
        assert done.returncode == code
        assert re.search(ends_with(LaunchCode.COMMAND_UNUSABLE, repr(command), fact), done.stderr)
        assert done.stderr.count("\n") == 1


def test_a_script_without_interpreter_is_said_by_its_rank(horovodrun: Run, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = horovodrun("-np", "1", str(script))
    assert done.returncode == 127
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[0]<stderr>:")]
    assert re.search(ends_with(LaunchCode.COMMAND_UNUSABLE, script, "No such file"), line)


@pytest.mark.parametrize(
    ("argv", "code", "fact"),
    [
        (["-np", "2", "--no-such-option", "true"], LaunchCode.WRONG_COMMAND_LINE, "--no-such-option"),
        (["-np", "2", "--detach", "true"], LaunchCode.CONFLICTING_OPTIONS, "--coordinator"),
        (
            ["-np", "2", "--host-discovery-script", "no-such-program", "true"],
            SettingCode.INVALID_SETTING,
            "--host-discovery-script",
        ),
        (["-np", "2", "--mpi", "true"], LaunchCode.UNSUPPORTED_OPTION, "--mpi"),
        (["-np", "2", "--config-file", "/no/such/file", "true"], LaunchCode.WRONG_CONFIG_FILE, "/no/such/file"),
        (["-np", "2", "--output-filename", "/dev/null/x", "true"], LaunchCode.OUTPUT_UNUSABLE, "'/dev/null/x'"),
        (["-np", "2", "-H", "a:b", "true"], SettingCode.INVALID_HOSTS, "'a:b'"),
        (
            ["-np", "3", "-H", "localhost:2", "true"],
            SettingCode.TOO_FEW_SLOTS,
            "Requested more processes (3) than there are available slots (2)",
        ),
        (["-np", "2", "--coordinator", "h1", "true"], SettingCode.INVALID_SETTING, "--coordinator='h1'"),
        (["-np", "2", "--cycle-time-ms", "-1", "true"], SettingCode.INVALID_SETTING, "--cycle-time-ms must be >= 0"),
        (["-np", "2", "--start-timeout", "x", "true"], SettingCode.INVALID_SETTING, "--start-timeout='x'"),
    ],
)
def test_mistakes_are_one_sentence(horovodrun: Run, argv: list[str], code: ErrorCode, fact: str) -> None:
    done = horovodrun(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("horovodrun: ")
    assert done.stderr.count("\n") == 1
    assert re.search(ends_with(code, fact), done.stderr)


def test_a_bad_variable_is_one_sentence(horovodrun: Run) -> None:
    done = horovodrun("-np", "1", "true", environ={"HOROVOD_SPIN_US": "many"})
    assert done.returncode == 2
    assert re.search(ends_with(SettingCode.INVALID_SETTING, "HOROVOD_SPIN_US='many'"), done.stderr)


def test_verbose_shows_tracebacks(horovodrun: Run) -> None:
    done = horovodrun("-np", "1", "--verbose", "-H", "a:b", "true")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_version_and_help(horovodrun: Run) -> None:
    import horovod

    assert horovodrun("--version").stdout == f"{horovod.__version__}\n"
    done = horovodrun("--help")
    assert done.returncode == 0
    assert "--fusion-threshold-mb" in done.stdout


IMPORTED = """
import sys
from horovod.launch.__main__ import run_commandline
try:
    run_commandline(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
unneeded = "horovod._core", "horovod.common", "horovod.common.basics", "torch", "numpy", *{of_a_job}
print([name for name in unneeded if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "of_a_job"),
    [(["--version"], ("grpc", "google.protobuf")), (["-np", "2", sys.executable, "-c", "pass"], ())],
    ids=["version", "job"],
)
def test_the_launcher_imports_neither_the_engine_nor_the_public_api(
    arguments: list[str], of_a_job: tuple[str, ...]
) -> None:
    source = IMPORTED.format(of_a_job=of_a_job)
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_files_in_the_current_directory_do_not_reach_the_launcher(installed: Run) -> None:
    """They are there for the programs that it starts, as always. --check-build is in test_check_build.py."""
    done = installed("-np", "2", sys.executable, "-c", "import mine; print(mine.answer)")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1]<stdout>:42" in done.stdout


def test_structured_lines_of_launcher_and_ranks(horovodrun: Run) -> None:
    script = "import os, sys; print('out', os.environ['HOROVOD_RANK']); sys.exit(int(os.environ['HOROVOD_RANK']))"
    done = horovodrun("-np", "2", "--log-format", "json", sys.executable, "-c", script)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((line["rank"], line["message"]) for line in lines) == [(0, "out 0"), (1, "out 1")]
    (said,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (said["level"], said["logger"]) == ("error", "horovodrun")
    assert "rank 1" in said["message"].lower()
    assert code_of(said["message"]) is LaunchCode.RANK_FAILED
