"""What each rank of `horovod.run` runs, and how the function gets there and the result back.

On the caller's host both travel in files that have no name (memfd_create(2)): the caller makes them, the ranks inherit
their descriptors, and the kernel frees them with the last process that holds one. So nothing is left behind, however a
process ends, and no other user can open them. One file holds the function, and one for each rank its result: complete
or not at all. Where ranks are on other hosts both travel over the coordinator (coordinator/services/exchange.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from horovod.base.errors import EngineCode, LaunchCode, OperationCode, coded, without_code
from horovod.base.settings import ROWS, resolve

if TYPE_CHECKING:
    import grpc

_LENGTH = struct.Struct("<Q")  # the length of what follows; 0 until all of it is there

_LONGEST_PLACE = 100  # characters of the expression that says where an entry is

BY_COORDINATOR = "--by-coordinator"  # the argument of a rank that uses the coordinator instead of descriptors

# The program of a rank. Nothing is imported from the current directory before the function runs: a json.py there is
# the function's business. (Python has -P for that, but only since 3.11.)
PROGRAM = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
    "from horovod.launch.task import main; sys.exit(main(sys.argv[1:]))"
)


# Functions travel as bytecode, which another version of Python may misread, or crash on.
PYTHON = sys.version_info[:2]


def packed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The bytes of a call that ranks fetch. First come the version of Python and the import path of the caller, which
    a rank looks at before it unpickles the function.
    """
    call: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    return pickle.dumps((PYTHON, ImportPath.of_this_process())) + call


@dataclass(frozen=True)
class ImportPath:
    """Where a process finds modules: sys.path in two parts, each in its order."""

    prefix: str  # sys.prefix: the environment of the process
    first: tuple[str, ...]  # the script's folder, PYTHONPATH, and whatever else comes before the standard library
    rest: tuple[str, ...]  # the standard library, site-packages, and what was added after them

    @classmethod
    def of_this_process(cls) -> ImportPath:
        """Relative entries become absolute ones: ranks may have another current folder."""
        entries = []
        for entry in sys.path:
            with contextlib.suppress(OSError):  # the current folder is gone, and nothing can be imported from it
                if isinstance(entry, str):  # imports ignore others
                    entries.append(os.path.abspath(entry))
        library = os.path.dirname(os.__file__)
        zipped = os.path.join(os.path.dirname(library), "python{}{}.zip".format(*PYTHON))
        at = min((entries.index(place) for place in (zipped, library) if place in entries), default=len(entries))
        return cls(sys.prefix, tuple(entries[:at]), tuple(entries[at:]))

    def followed_by(self, own: ImportPath) -> list[str]:
        """The path of a rank whose caller has this one. own: what the rank has without a caller.

        All modules come from where the caller has them. If the rank is of another environment, because of
        `executable` or on another host, its own packages come before those of the caller's environment.
        """
        theirs = {*self.first, *self.rest}
        if own.prefix == self.prefix:
            entries = [*self.first, *(entry for entry in own.first if entry not in theirs), *self.rest, *own.rest]
        else:
            entries = [*self.first, *own.first, *own.rest, *self.rest]
        return list(dict.fromkeys(entries))


@dataclass(frozen=True)
class Result:
    """What one rank returned. `error` is "Type: message", None after success; `value` is pickled."""

    value: bytes
    error: str | None = None
    traceback: str = ""
    at_s: float = 0.0  # time.monotonic() of the error: one clock for the whole host
    epoch: int = 0  # of the last world in which the process was; 0: in none
    rank: int = -1  # its rank in that world


class Exchange:
    """The caller's end. Close it when the ranks have ended."""

    def __init__(self, count: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """OSError when so many files can't be open."""
        self._function = -1
        self._results: list[int] = []
        try:
            self._function = os.memfd_create("horovod-run")
            write(self._function, packed(function, args, kwargs))
            for _ in range(count):
                self._results.append(os.memfd_create("horovod-run"))
        except BaseException:
            self.close()
            raise

    def descriptors(self, rank: int) -> tuple[int, int]:
        """The descriptors that the rank inherits."""
        return self._function, self._results[rank]

    def command(self, python: str) -> list[str]:
        """The command of every rank."""
        return [python, "-c", PROGRAM, str(self._function), ",".join(map(str, self._results))]

    def result(self, rank: int) -> Result | None:
        """What the rank left, if it came to that."""
        content = read(self._results[rank])
        return Result(*pickle.loads(content)) if content else None  # noqa: S301  (only our own ranks can write it)

    def close(self) -> None:
        for descriptor in (self._function, *self._results):
            if descriptor >= 0:
                os.close(descriptor)
        self._function, self._results = -1, []

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(descriptor: int, content: bytes) -> None:
    """The length comes last: a reader sees all of the content or nothing."""
    view, at = memoryview(content), _LENGTH.size
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    os.pwrite(descriptor, _LENGTH.pack(len(content)), 0)


def read(descriptor: int) -> bytes:
    """Empty when nothing is there. All processes share the position in the file, so it is neither used nor moved."""
    head = os.pread(descriptor, _LENGTH.size, 0)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    return b"".join(_pieces(descriptor, length))


def _pieces(descriptor: int, length: int) -> Iterator[bytes]:
    at = _LENGTH.size
    while length:
        piece = os.pread(descriptor, min(length, 1 << 30), at)
        if not piece:
            raise EOFError(coded(EngineCode.INTERNAL, "The file of horovod.run is shorter than it says."))
        yield piece
        length, at = length - len(piece), at + len(piece)


class UnpicklableResultError(TypeError):
    """The function has returned something that can't be sent to the caller."""


def unpicklable(value: Any, error: Exception) -> UnpicklableResultError:
    """The error for a result that pickle refuses with `error`. It names the entry that is at fault."""
    place, part = _unpicklable_part(value)
    at_fault = f" (its entry {place} is of type {_type_name(part)})" if place else ""
    sentence = (
        f"the function has returned an object of type {_type_name(value)}{at_fault}, and that result can't be sent to "
        f"the caller, since pickle refuses it: {without_code(error).strip().rstrip('.')}. Return something that pickle "
        "can take, such as numbers, arrays, a state_dict or the path of a file."
    )
    return UnpicklableResultError(coded(OperationCode.UNPICKLABLE, sentence))


def _unpicklable_part(value: Any) -> tuple[str, Any]:
    """Where in containers the object is that pickle refuses, as an index expression, and that object."""
    place, part = "", value
    while entries := _entries(part):
        refused = next(((key, entry) for key, entry in entries if not _is_picklable(entry)), None)
        if refused is None or len(place) > _LONGEST_PLACE:  # a container that holds itself has no end
            break
        place, part = f"{place}[{refused[0]!r}]", refused[1]
    return place, part


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def no_result(rank: int, host: str) -> str:
    """The sentence for a rank that ended well and left none."""
    return coded(
        LaunchCode.RANK_FAILED,
        f"Rank {rank} on host {host} ended with exit code 0 before the function returned: there is no result. Does the "
        "function call sys.exit or os._exit?",
    )


def value_of(rank: int, result: Result) -> Any:
    """What a rank returned. RuntimeError where the caller can't read it."""
    try:
        return pickle.loads(result.value)  # noqa: S301
    except Exception as error:
        sentence = (
            f"The return value of rank {rank} can't be unpickled here ({type(error).__name__}: {error}). Its "
            "type must come from a module that the caller has too, in the same version."
        )
        raise RuntimeError(coded(LaunchCode.RANK_FAILED, sentence)) from error


def of_last_world(arrived: Mapping[int, Result]) -> list[Any]:
    """What the ranks of an elastic job's last world returned, in order. arrived: by slot. RuntimeError for none."""
    done = [(slot, result) for slot, result in sorted(arrived.items()) if result.error is None]
    epoch = max((result.epoch for _, result in done), default=0)
    last_world = [(result.rank, slot, result) for slot, result in done if result.epoch == epoch]
    if not last_world:
        sentence = (
            "All processes ended with exit code 0 before the function returned: there is no result. Does the function "
            "call sys.exit or os._exit?"
        )
        raise RuntimeError(coded(LaunchCode.RANK_FAILED, sentence))
    return [value_of(rank, result) for rank, _, result in sorted(last_world, key=lambda one: one[:2])]


def raised(rank: int, host: str, result: Result) -> str:
    """What to say of a rank whose function raised. The code stands in a line of its own: behind the last line of the
    traceback it would look like a part of the exception's text.
    """
    error = without_code(result.error or "")
    return f"Rank {rank} on host {host} raised {error}\n\n{result.traceback}[{LaunchCode.FUNCTION_RAISED}]"


class _Files:
    """A rank's end on the caller's host."""

    def __init__(self, arguments: list[str]) -> None:
        self._function, results = int(arguments[0]), arguments[1].split(",")
        self._result = int(results[int(os.environ[ROWS["rank"].env])])
        for descriptor in (self._function, self._result):
            os.set_inheritable(descriptor, False)  # processes that the function starts are not to inherit them

    def fetch_function(self) -> bytes:
        content = read(self._function)
        os.close(self._function)
        return content

    def send_result(self, content: bytes) -> None:
        write(self._result, content)


class _Coordinator:
    """A rank's end on another host. Each call has a channel of its own: the function may fork in between."""

    def __init__(self) -> None:
        self._settings = resolve()

    def fetch_function(self) -> bytes:
        from horovod.coordinator.services.exchange import FETCH

        with self._channel() as channel:
            fetch: Any = channel.unary_stream(FETCH)
            return b"".join(fetch(b"", **self._options()))

    def send_result(self, content: bytes) -> None:
        from horovod.coordinator.services.exchange import DELIVER, PIECE_BYTES

        pieces = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
        with self._channel() as channel:
            deliver: Any = channel.stream_unary(DELIVER)
            deliver(pieces, **self._options())

    def _channel(self) -> grpc.Channel:
        from horovod.worker.runtime.channel import open_channel
        from horovod.worker.runtime.tls import ClientTls

        assert self._settings.coordinator is not None
        return open_channel(self._settings.coordinator, ClientTls.of(self._settings))

    def _options(self) -> dict[str, Any]:
        from horovod.coordinator.services.exchange import JOB, RANK
        from horovod.worker.runtime.token import Credential

        assert self._settings.coordinator is not None
        credential = Credential(self._settings.coordinator, self._settings.token, self._settings.tls_ca is not None)
        metadata = (*credential.metadata(), (JOB, self._settings.job), (RANK, str(self._settings.rank)))
        return {"metadata": metadata, "wait_for_ready": True, "timeout": self._settings.progress_timeout_seconds}


def _last_world() -> tuple[int, int]:
    """Epoch and rank of the last world of this process, which may have left it; 0 and -1 where it was in none."""
    context = sys.modules.get("horovod.worker.runtime.context")
    last = context.last_world() if context is not None else None
    return (last.epoch, last.rank) if last is not None else (0, -1)


def _of_another_python(of_caller: tuple[int, int]) -> str:
    theirs, ours = (".".join(map(str, version)) for version in (of_caller, PYTHON))
    sentence = (
        f"The function comes from Python {theirs}, and this process is Python {ours} ({sys.executable}). "
        f"Functions are sent as bytecode, which differs between versions: run the ranks with Python {theirs}."
    )
    return coded(LaunchCode.HOST_INSTALLATION, sentence)


def main(arguments: list[str]) -> int:
    """Runs the function; the exit code."""
    caller = _Coordinator() if arguments == [BY_COORDINATOR] else _Files(arguments)
    try:
        stream = io.BytesIO(caller.fetch_function())
        python, of_caller = pickle.load(stream)  # noqa: S301
        if python != PYTHON:
            raise RuntimeError(_of_another_python(python))
        path = of_caller.followed_by(ImportPath.of_this_process())
        # Last comes the current directory, for functions that find modules only there.
        if not getattr(sys.flags, "safe_path", False) and os.getcwd() not in path:
            path.append(os.getcwd())
        sys.path[:] = path
        function, args, kwargs = pickle.load(stream)  # noqa: S301
        value = function(*args, **kwargs)
        try:
            content = cloudpickle.dumps(value)
        except Exception as error:
            raise unpicklable(value, error) from None
        result = Result(content, None, "", 0.0, *_last_world())
    except Exception as error:
        at_s = time.monotonic()
        # A peer that noticed may end first and have this rank stopped, which must not cut its account short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        result = Result(b"", f"{type(error).__name__}: {error}", traceback.format_exc(), at_s)
    # The result is sent as a tuple: this module is `__main__` here, so the caller could not unpickle its class.
    caller.send_result(pickle.dumps(astuple(result)))
    return 0 if result.error is None else 1
