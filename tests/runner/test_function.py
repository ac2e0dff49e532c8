"""horovod.run: functions out, results and exceptions back."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from error_codes import ends_with
from event_words import DEPRECATED, NO_EFFECT
from launching import still_alive
from resources import descriptors, eventually

import horovod
from horovod.base.errors import ErrorCode, LaunchCode, SettingCode
from horovod.launch import launchers, task


def by_value(function: Any) -> Any:
    """As if it stood in the user's script: shipped by value, because the ranks cannot import this test module."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


def whoami(prefix: str, *, suffix: str = "") -> str:
    return f"{prefix}{os.environ['HOROVOD_RANK']}/{os.environ['HOROVOD_SIZE']}{suffix}"


def test_results_come_by_rank() -> None:
    assert horovod.run(by_value(whoami), ("rank ",), {"suffix": "!"}, num_proc=3) == [f"rank {r}/3!" for r in range(3)]


def test_a_closure_and_a_large_result() -> None:
    size = 3_000_000
    results = horovod.run(by_value(lambda: os.environ["HOROVOD_RANK"].encode() * size), num_proc=2)
    assert results == [b"0" * size, b"1" * size]


def test_a_function_of_a_module_that_only_this_process_can_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_module.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here_module  # type: ignore[import-not-found]

    assert horovod.run(only_here_module.answer) == [42]


def test_it_works_inside_an_event_loop() -> None:
    import asyncio

    async def notebook() -> list[str]:
        return horovod.run(by_value(whoami), ("",))

    assert asyncio.run(notebook()) == ["0/1"]


def test_it_works_in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(horovod.run(by_value(whoami), ("",), num_proc=2)))
    thread.start()
    thread.join()
    assert results == [["0/2", "1/2"]]


def test_a_launcher_of_the_list_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that takes it; one for command lines alone is passed over."""
    here = types.SimpleNamespace(
        takes_function=lambda asked: set(asked.names) == {"pod"},
        run_function=lambda asked, in_thread: [asked.call, asked.processes, asked.environ["HOROVOD_START_TIMEOUT"]],
    )
    monkeypatch.setitem(sys.modules, "launcher_here", here)
    monkeypatch.setitem(sys.modules, "launcher_of_commands", types.SimpleNamespace())
    monkeypatch.setattr(launchers, "LAUNCHERS", ["launcher_of_commands", "launcher_here", *launchers.LAUNCHERS])
    asked = horovod.run(whoami, ("a",), {"suffix": "b"}, num_proc=2, hosts="pod:2", start_timeout=7)
    assert asked == [(whoami, ("a",), {"suffix": "b"}), 2, "7.0"]
    assert horovod.run(by_value(whoami), ("",)) == ["0/1"]


def fail_on_one() -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        raise LookupError("no such batch")
    signal.pause()


def test_an_exception_names_its_rank_and_shows_its_traceback() -> None:
    facts = ["Rank 1", "LookupError: no such batch\n", "Traceback (most recent call last)", "in fail_on_one"]
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FUNCTION_RAISED, *facts)):
        horovod.run(by_value(fail_on_one), num_proc=2)


def test_the_earliest_exception_is_the_one_that_is_told(tmp_path: Path) -> None:
    """Also when the rank that raised it is the last to end."""
    raised, ended = str(tmp_path / "raised"), str(tmp_path / "ended")
    os.mkfifo(raised)
    os.mkfifo(ended)

    class CauseError(Exception):
        def __str__(self) -> str:  # called when the exception has been caught
            if not self.args:
                self.args = ("at last",)
                open(raised, "w").close()
                with open(ended) as pipe:
                    pipe.read()  # until the peer is gone
            return "at last"

    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise CauseError
        open(raised).close()
        os.open(ended, os.O_WRONLY)  # open until this process ends
        raise KeyError("the consequence")

    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FUNCTION_RAISED, "Rank 1", "CauseError: at last")):
        horovod.run(by_value(fail), num_proc=2)


def end_badly(how: str) -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit 3":
            sys.exit(3)
        os._exit(0)


@pytest.mark.parametrize(
    ("how", "facts"), [("killed", ["(pid ", "(SIGKILL)"]), ("exit 3", ["(pid ", "code 3"]), ("exit 0", ["code 0"])]
)
def test_a_rank_that_ends_without_an_answer(how: str, facts: list[str]) -> None:
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "Rank 1", *facts)):
        horovod.run(by_value(end_badly), (how,), num_proc=2)


def test_a_result_that_cannot_be_sent_names_its_rank_and_its_entry() -> None:
    facts = (
        "Rank 0",
        "UnpicklableResultError",
        "an object of type dict",
        "['model'][1] is of type _thread.lock",
        "can't be",
    )
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FUNCTION_RAISED, *facts)):
        horovod.run(by_value(lambda: {"loss": 0.5, "model": (1, threading.Lock())}))


def look_at_descriptors() -> tuple[list[str], list[str]]:
    """What is open here besides the standard three, and in a program that the function starts."""
    import subprocess

    def names(text: str) -> list[str]:
        return sorted(line.split(" -> ")[1] for line in text.splitlines() if "horovod-run" in line)

    mine = subprocess.run(["ls", "-l", f"/proc/{os.getpid()}/fd"], stdout=subprocess.PIPE, text=True, check=True)
    child = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], stdout=subprocess.PIPE, text=True, close_fds=False, check=True
    )
    return names(mine.stdout), names(child.stdout)


def test_a_result_that_the_caller_can_not_read_names_its_rank() -> None:
    result = task.Result(b"conly_there\nSomething\n.")
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "rank 3", "No module named 'only_there'")):
        task.value_of(3, result)


def test_an_interpreter_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not run bytecode that is not its own."""
    monkeypatch.setattr(task, "PYTHON", (3, 7))
    facts = (
        "Rank 0",
        "comes from Python 3.7",
        f"this process is Python {sys.version_info.major}.{sys.version_info.minor}",
    )
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.FUNCTION_RAISED, *facts)):
        horovod.run(len, ([],), np=1)


def test_what_travels_is_in_no_folder_and_ends_with_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = descriptors()
    for mine, of_its_child in horovod.run(by_value(look_at_descriptors), num_proc=2):
        assert len(mine) == 1, "the file of its own result"
        assert of_its_child == []
    assert list(tmp_path.iterdir()) == []
    assert eventually(lambda: descriptors() <= before)


def test_a_caller_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    source = """
import horovod
def work():
    import signal
    print("up", flush=True)
    signal.pause()
horovod.run(work, num_proc=2)
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        assert "up" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert still_alive(family) == []
    assert list(tmp_path.iterdir()) == []


def test_files_in_the_current_directory_are_the_functions_business(tmp_path: Path) -> None:
    """A json.py there, or a folder called horovod, must not reach what Horovod itself imports."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "horovod", "pickle", "struct", "cloudpickle", "typing", "signal", "grpc"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    (here / "mine.py").write_text("answer = 42\n")
    (tmp_path / "caller.py").write_text("""
import horovod
def work():
    import mine
    return mine.answer
if __name__ == "__main__":
    print(horovod.run(work, num_proc=2))
""")
    run = subprocess.run(
        [sys.executable, str(tmp_path / "caller.py")], cwd=here, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.stdout, run.returncode) == ("[42, 42]\n", 0), run.stderr


@pytest.mark.parametrize("started", ["script", "module", "stdin"])
def test_ranks_import_what_the_caller_imports(tmp_path: Path, started: str) -> None:
    """From the script's folder or the current one, PYTHONPATH, relative entries, archives and site-packages, in the
    caller's order. Each place has the modules of all places before it too.
    """
    places = ["script", "relative", "variable", "archive.zip", "appended"]
    for number, place in enumerate(places):
        folder = tmp_path / place.removesuffix(".zip")
        folder.mkdir()
        for name in places[: number + 1]:
            (folder / f"of_{name.removesuffix('.zip')}.py").write_text(f"found = {place!r}\n")
    archive = zipfile.PyZipFile(str(tmp_path / "archive.zip"), "w")
    for file in (tmp_path / "archive").iterdir():
        archive.write(file, file.name)
    archive.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("script", "relative", "variable", "archive", "appended"):  # not on the path of a script
        (elsewhere / f"of_{name}.py").write_text("found = 'elsewhere'\n")
    source = f"""
import os, sys
sys.path.insert(1, os.path.join("..", "relative"))
sys.path.insert(3, {str(tmp_path / "archive.zip")!r})
sys.path.append({str(tmp_path / "appended")!r})
sys.path.append(3)  # imports ignore it
import horovod
def work():
    if "HOROVOD_RANK" in os.environ:
        os.chdir("/")
    import of_script, of_relative, of_variable, of_archive, of_appended
    return [module.found for module in (of_script, of_relative, of_variable, of_archive, of_appended)]
if __name__ == "__main__":
    found = horovod.run(work, num_proc=2)
    print(found[0] == found[1] == work(), *found[0])
"""
    (tmp_path / "script" / "caller.py").write_text(source)
    command, folder = {
        "script": ([sys.executable, "../script/caller.py"], elsewhere),
        "module": ([sys.executable, "-m", "caller"], tmp_path / "script"),
        "stdin": ([sys.executable], tmp_path / "script"),  # as in a notebook, the first entry is empty
    }[started]
    run = subprocess.run(
        command,
        cwd=folder,
        input=source if started == "stdin" else None,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "variable")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout == "True script relative variable archive.zip appended\n", run.stderr


def test_a_rank_of_another_environment_has_its_own_packages_before_those_of_the_caller() -> None:
    caller = task.ImportPath("/venv", ("/script", "/shared"), ("/venv/lib", "/venv/site", "/added"))
    assert caller.followed_by(task.ImportPath("/venv", ("/shared", "/own"), ("/venv/lib", "/venv/site"))) == [
        *("/script", "/shared", "/own", "/venv/lib", "/venv/site", "/added")
    ]
    assert caller.followed_by(task.ImportPath("/other", ("/own",), ("/other/lib", "/other/site"))) == [
        *("/script", "/shared", "/own", "/other/lib", "/other/site", "/venv/lib", "/venv/site", "/added")
    ]


def test_an_environment_with_hooks_of_editable_packages(tmp_path: Path) -> None:
    """They stand in .pth files of site-packages, which the ranks' interpreter reads as the caller's has."""
    version = "python{}.{}".format(*sys.version_info)
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv" / "bin").mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    (site / "editable.pth").write_text("import editable_finder\n")
    (site / "editable_finder.py").write_text(f"""
import importlib.machinery, importlib.util, sys
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "under_work":
            return importlib.util.spec_from_file_location(name, {str(tmp_path / "source.py")!r})
sys.meta_path.append(Finder)
""")
    (tmp_path / "source.py").write_text("answer = 42\n")
    source = """
import horovod, under_work
def work():
    import under_work
    return under_work.answer
print(horovod.run(work, num_proc=2))
"""
    run = subprocess.run([str(python), "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "[42, 42]\n", run.stderr


def test_output_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    horovod.run(by_value(print), ("hello",), num_proc=2, output_filename=str(tmp_path / "logs"))
    assert [(tmp_path / f"logs/rank.{r}/stdout").read_text() for r in range(2)] == ["hello\n"] * 2


def test_another_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "my-python"
    python.write_text(f'#!/bin/sh\nMARK=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert horovod.run(by_value(lambda: os.environ.get("MARK")), executable=str(python)) == ["yes"]


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, LaunchCode.CONFLICTING_OPTIONS, ["hosts ", "hostfile"]),
        ({"use_gloo": True, "use_mpi": True}, LaunchCode.CONFLICTING_OPTIONS, ["use_gloo", "use_mpi"]),
        ({"use_mpi": True}, LaunchCode.UNSUPPORTED_OPTION, ["use_mpi"]),
        ({"mpi_args": "-x"}, LaunchCode.UNSUPPORTED_OPTION, ["mpi_args"]),
        ({"num_proc": 0}, SettingCode.INVALID_SETTING, ["num_proc", "not 0."]),
        ({"num_proc": 10**8}, SettingCode.INVALID_SETTING, ["num_proc", "65536", "not 100000000."]),
        ({"cooldown_range": (0, 5)}, SettingCode.INVALID_SETTING, ["cooldown_range", "1 to 3600", "not 0 5."]),
        (
            {"hosts": "a:1", "host_discovery_script": "s"},
            LaunchCode.CONFLICTING_OPTIONS,
            ["host_discovery_script", "hostfile"],
        ),
        (
            {"num_proc": 3, "hosts": "localhost:2"},
            SettingCode.TOO_FEW_SLOTS,
            ["Requested more processes (3) than there are available slots (2)"],
        ),
        ({"hosts": "localhost"}, SettingCode.INVALID_HOSTS, ["'localhost'"]),
        ({"start_timeout": -1}, SettingCode.INVALID_SETTING, ["start_timeout must be >= 0"]),
        ({"num_proc": 2, "min_num_proc": 1, "hosts": "a:2"}, LaunchCode.CONFLICTING_OPTIONS, ["1 is given"]),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], code: ErrorCode, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(code, *facts)):
        horovod.run(print, **arguments)


def test_what_only_elastic_jobs_need_has_no_effect_on_others() -> None:
    with pytest.warns(UserWarning, match=f"max_num_proc, slots: {NO_EFFECT}"):
        assert horovod.run(by_value(whoami), ("",), num_proc=1, max_num_proc=2, slots=1) == ["0/1"]


SIGNATURE = """
func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None,
cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None,
ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None,
mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None,
host_discovery=None
"""


def test_the_parameters_are_those_of_earlier_versions_and_one_of_ours_behind_them() -> None:
    parameters = inspect.signature(horovod.run).parameters.values()
    shown = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    assert ", ".join(shown) == " ".join(SIGNATURE.split())


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("np", 1, "num_proc"),
        ("min_np", 1, "min_num_proc"),
        ("max_np", 1, "max_num_proc"),
        ("network_interface", "lo", "network_interfaces"),
    ],
)
def test_old_names_are_deprecated(old: str, value: Any, new: str) -> None:
    said = pytest.warns(DeprecationWarning, match=f"^{old} {DEPRECATED}.* {new}")
    with said, pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS)):
        horovod.run(print, hosts="a:1", hostfile="f", **{old: value})


def test_old_names_still_work() -> None:
    with pytest.warns(DeprecationWarning, match=f"np {DEPRECATED}.* num_proc"):
        assert horovod.run(by_value(whoami), ("",), np=2) == ["0/2", "1/2"]


def test_ctrl_c_stops_the_ranks_and_is_raised() -> None:
    source = """
import horovod, os, signal, sys
def wait():
    print("ready", flush=True)
    signal.pause()
horovod.run(wait, num_proc=2)
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == [f"[{r}]<stdout>:ready\n" for r in range(2)]
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # how Python ends after a KeyboardInterrupt
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert still_alive(family) == []
