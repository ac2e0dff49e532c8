"""`horovod.run`: a Python function on several processes, its results by rank.

What is given is checked here; a launcher of launchers.py runs the job, in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod.base.errors import ErrorCode, LaunchCode, SettingCode, coded
from horovod.base.settings import MAX_SIZE, ROWS, resolve
from horovod.launch.asked import AskedFunction, Stoppable, renamed
from horovod.launch.command_line.flags import interface_variable
from horovod.launch.console.streams import PythonStreams
from horovod.launch.elastic import times
from horovod.launch.elastic.request import ElasticRequest
from horovod.launch.launchers import launcher_of_function
from horovod.rendezvous.hosts import HostSlots, fill, parse_hostfile, parse_hosts
from horovod.worker.agent.output import Console

_ELASTIC_NAMES = {name: name for name in ("num_proc", *(field.name for field in fields(ElasticRequest)))}

if TYPE_CHECKING:
    from horovod.launch.elastic.discovery import HostDiscovery


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    host_discovery: HostDiscovery | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` in `num_proc` processes that form one world, and returns their results by rank.

    >>> horovod.run(train, args=(0.1,), num_proc=2)  # def train(rate): hvd.init(); ...; return accuracy
    [0.97, 0.97]

    func: anything that cloudpickle can ship; it calls hvd.init() itself. Its modules are found where the caller finds
        them, along sys.path as it is at the time of the call; folders that another host doesn't have are left out.
    hosts, hostfile: "h1:2,h2:4" or a file with lines "h1 slots=2"; other hosts are reached by ssh (ssh_port,
        ssh_identity_file), which must work without a password.
    start_timeout: seconds that all processes may take to start and join.
    output_filename: folder that also gets what each rank prints. It is shown on sys.stdout and sys.stderr as they are
        at the time of the call, in a notebook under the cell; ranks have an empty stdin.
    executable: the Python to run, default the one that runs now.
    verbose: print what the launcher does. disable_cache, use_gloo: accepted without effect. use_mpi, mpi_args: refused,
        since this build has no MPI.

    min_num_proc asks for an elastic job: processes that fail are replaced, and it goes on with as few as that and grows
        up to max_num_proc. func is written for it (hvd.elastic.run). The results are those of the last world's ranks.
    host_discovery_script, or host_discovery, an object like a horovod.runner.elastic.discovery.HostDiscovery, finds the
        hosts of an elastic job while it runs. slots: of a host that is printed without a number. reset_limit: how often
        hosts may come, go or fail; with hosts, how many processes may be replaced. cooldown_range: the least and the
        most seconds after which a host that failed is used again; without it never.

    Raises ValueError for arguments that make no sense together, and RuntimeError when a host can't be used or a rank
    fails, naming the rank and with its traceback; the other ranks are then stopped. An elastic job fails when too few
    processes are left, or when it was changed more often than reset_limit.
    np, min_np, max_np and network_interface are deprecated names; network_interface adds to network_interfaces.
    """
    num_proc = renamed("np", np, "num_proc", num_proc)
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    interfaces = _names(renamed("network_interface", network_interface, "network_interfaces", None))
    interfaces += _names(network_interfaces)
    if hosts is not None and hostfile is not None:
        raise _refused(LaunchCode.CONFLICTING_OPTIONS, "hosts and hostfile exclude each other: give one of them.")
    if use_gloo and use_mpi:
        raise _refused(LaunchCode.CONFLICTING_OPTIONS, "use_gloo and use_mpi exclude each other: give one of them.")
    if use_mpi or mpi_args:
        sentence = "There is no MPI in this build: leave use_mpi and mpi_args out, horovod.run needs none."
        raise _refused(LaunchCode.UNSUPPORTED_OPTION, sentence)
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise _refused(SettingCode.INVALID_SETTING, f"num_proc must be an integer >= 1, not {num_proc!r}.")
    if num_proc > MAX_SIZE:
        raise _refused(SettingCode.INVALID_SETTING, f"num_proc must be at most {MAX_SIZE}, not {num_proc}.")
    if not callable(func):
        raise _refused(SettingCode.INVALID_SETTING, f"func must be callable, not {type(func).__name__}.")
    found = parse_hosts(hosts) if hosts else parse_hostfile(hostfile) if hostfile else None
    request = ElasticRequest(
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script, host_discovery
    )
    if request.finds_hosts and found is not None:
        sentence = "host_discovery_script and host_discovery exclude hosts and hostfile: they find the hosts."
        raise _refused(LaunchCode.CONFLICTING_OPTIONS, sentence)
    request.check(num_proc, len(found) if found is not None else None, _ELASTIC_NAMES)
    replacement = request.replacement(num_proc)
    if given := request.without_effect():
        reason = "nothing finds the hosts of this job" if request.elastic else "this job has a fixed size"
        warnings.warn(f"{', '.join(given)}: no effect, as {reason}.", UserWarning, stacklevel=2)
    found = found or (HostSlots("localhost", num_proc),)
    room = replacement.slots(sum(one.slots for one in found)) if replacement is not None else 0
    names = fill(found, max(num_proc, room))
    environ = dict(os.environ)
    if start_timeout is not None:
        setting = ROWS["start_timeout_seconds"]
        environ[setting.env] = setting.from_option(start_timeout, "start_timeout")
    if network_interface is not None or network_interfaces is not None:
        environ |= interface_variable(interfaces, "network_interfaces")
    resolve(environ)
    directory = Path(output_filename) if output_filename else None
    supply = request.supply()
    if supply is not None:
        setting = ROWS["elastic_timeout_seconds"]
        environ.setdefault(setting.env, str(times.ELASTIC_TIMEOUT_SECS))
    asked = AskedFunction(
        (func, tuple(args), dict(kwargs or {})),
        () if supply is not None else names,
        num_proc,
        environ,
        executable,
        bool(verbose),
        ssh_port,
        ssh_identity_file,
        replacement,
        supply,
    )
    size = replacement.greatest(len(names)) if replacement is not None else len(names)
    refused: list[OSError] = []
    in_thread = functools.partial(
        _run_in_thread, size=size, directory=directory, verbose=bool(verbose), refused=refused.append
    )
    try:
        return launcher_of_function(asked).run_function(asked, in_thread)
    finally:
        for error in refused[:1]:
            warnings.warn(
                f"horovod.run: the ranks' output could not be written ({error.strerror}).", RuntimeWarning, stacklevel=2
            )


def _run_in_thread(
    work: Callable[[Console, Callable[[Stoppable], None]], None],
    size: int,
    directory: Path | None,
    verbose: bool,
    refused: Callable[[OSError], None],
) -> None:
    """Runs a job in a thread of its own: the caller's may have an event loop already, as in a notebook. refused: called
    if the output of ranks can't be written.
    """
    running: list[tuple[Stoppable, asyncio.AbstractEventLoop]] = []
    errors: list[BaseException] = []
    interrupted = threading.Event()
    streams = PythonStreams(served=True)
    streams.writer.failed = lambda descriptor, error: refused(error)
    console = Console(streams.writer, descriptors=streams.descriptors, directory=directory, size=size)

    def on_start(job: Stoppable) -> None:
        running.append((job, asyncio.get_running_loop()))
        if interrupted.is_set():
            job.stop(signal.SIGINT)

    def body() -> None:
        try:
            work(console, on_start)
        except BaseException as error:
            errors.append(error)
        finally:
            console.close(timeout_s=1)

    if verbose:
        console.note(f"horovod.run: starting {size} processes")
    thread = threading.Thread(target=body, name="horovod-run")
    thread.start()
    while thread.is_alive():
        try:
            streams.serve(thread)
        except KeyboardInterrupt:
            interrupted.set()
            for job, loop in running[-1:]:
                loop.call_soon_threadsafe(job.stop, signal.SIGINT)
    if interrupted.is_set():
        raise KeyboardInterrupt
    if errors:
        raise errors[0]


def _refused(code: ErrorCode, sentence: str) -> ValueError:
    return ValueError(coded(code, sentence))


def _names(given: Sequence[str] | str | None) -> list[str]:
    return given.split(",") if isinstance(given, str) else list(given or ())
