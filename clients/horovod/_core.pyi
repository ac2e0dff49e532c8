"""The native engine (built from csrc/). Private: horovod.worker makes engines, horovod.common.ops submits operations.

Numbers (dtypes, operation types, reduce operations) equal the enums of horovod.protos.v1; a test compares them.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, final

from typing_extensions import CapsuleType

_Addresses = tuple[int, int, int, tuple[int, ...]] | tuple[int, int, int, tuple[int, ...], int, int]

__all__ = [
    "C_API",
    "MAX_DIMENSIONS",
    "MAX_IDS",
    "MAX_NAME_LENGTH",
    "MAX_TENSORS",
    "OP_TRAITS",
    "Copier",
    "DType",
    "DeviceKind",
    "Engine",
    "Handle",
    "JoinPhase",
    "OpSpec",
    "OpType",
    "Output",
    "ReduceOp",
    "Segment",
    "TensorReader",
    "complete_options",
    "copy_kernel",
    "cuda_obstacle",
    "gloo_obstacle",
    "isa",
    "nccl_version",
    "on_impatience",
    "partners",
    "set_current_engine",
    "set_error_types",
    "stand_in",
]

# Named "horovod._core.C_API": a const HorovodApi* (csrc/bindings/c_api.h), valid as long as the process.
C_API: Final[CapsuleType]

def set_current_engine(engine: Engine | None) -> None:
    """Which engine HorovodApi.current_engine() returns; None: none. It is not kept alive."""

MAX_IDS: Final[int]  # the coordinator's numbers of operations are below this
# Of one operation: characters of its name, tensors, dimensions of each.
MAX_NAME_LENGTH: Final[int]
MAX_TENSORS: Final[int]
MAX_DIMENSIONS: Final[int]

# What each type of operation is, by its name: the rows of csrc/collectives/op_types.h.
OP_TRAITS: Final[dict[str, dict[str, bool]]]

class OpType(IntEnum):
    ALLREDUCE = ...
    ALLGATHER = ...
    BROADCAST = ...
    ALLTOALL = ...
    REDUCESCATTER = ...
    BARRIER = ...

class ReduceOp(IntEnum):
    """How a reduction combines what the ranks bring; hvd.Average is ReduceOp.AVERAGE, and so on."""

    AVERAGE = ...
    SUM = ...
    ADASUM = ...
    MIN = ...
    MAX = ...
    PRODUCT = ...

class DType(IntEnum):
    UINT8 = ...
    INT8 = ...
    INT16 = ...
    INT32 = ...
    INT64 = ...
    FLOAT16 = ...
    BFLOAT16 = ...
    FLOAT32 = ...
    FLOAT64 = ...
    BOOL = ...
    UINT16 = ...
    FLOAT8_E4M3FN = ...
    FLOAT8_E5M2 = ...
    UINT32 = ...
    UINT64 = ...

class DeviceKind(IntEnum):
    CPU = ...
    GPU = ...

class JoinPhase(IntEnum):
    OPEN = ...
    ENDING = ...
    OVER = ...

@final
class OpSpec:
    """What a call says of an operation beside its name and tensors. Immutable and of no world: make it once."""

    def __init__(
        self,
        type: int,  # noqa: A002
        *,
        op: int = ...,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        process_set: int = 0,
    ) -> None:
        """type: an OpType. op: a ReduceOp, of allreduce and reducescatter; SUM by default. root: of a broadcast, a rank
        of the world. process_set: the number under which Engine.add_process_set registered it, 0 for the world.
        ValueError for numbers that mean nothing.
        """
    @property
    def type(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def prescale(self) -> float: ...
    @property
    def postscale(self) -> float: ...
    @property
    def root(self) -> int: ...
    @property
    def process_set(self) -> int: ...

def isa() -> str:
    """Instruction set of the reduction kernels: portable, avx2 or avx512."""

def gloo_obstacle() -> str:
    """Why operations can't run on Gloo (the engine's option `gloo`) and how to get it; "" when they can."""

def nccl_version(file: str) -> tuple[int, str]:
    """NCCL's version code and "", or 0 and why there is none. file: libnccl.so.2, "" for the system's."""

def cuda_obstacle(file: str) -> str:
    """Why there is no NVIDIA driver, or ""; asks for no GPU. file: libcuda.so.1, "" for the system's."""

def copy_kernel(file: str, capability: int) -> tuple[bytes, str]:
    """The kernel that packs small tensors, compiled for GPUs of a compute capability (90 is 9.0), and "", or why it
    can't be. Asks for no GPU. file: libnvrtc.so.12, "" for the system's.
    """

def set_error_types(internal_error: type[Exception]) -> None:
    """The exception class that operations raise for every failure but bad arguments (which are ValueError)."""

def complete_options(options: Mapping[str, int]) -> dict[str, int]:
    """All options of an engine that is given `options`, the others by default. ValueError for a name that is none."""

def partners(
    rank: int,
    size: int,
    *,
    hosts: Sequence[int] = (),
    placement: Sequence[int] = (),
    options: Mapping[str, int] = ...,
) -> list[int]:
    """The ranks to which `rank` of a world over sockets needs connections, ascending: all others, or some of them where
    the world has more than the option `full_mesh_members`.

    hosts: of each rank, equal for ranks that share memory; empty where none do. placement: the same for ranks of one
    machine. Both as the engine is given them. ValueError for numbers that fit to no
    world.
    """

def on_impatience(function: Callable[[int, int, int], None] | None) -> None:
    """Called by threads in run() and result(), or in join() before they have joined, that wait longer than a
    millisecond, again and again; None: no more.

    With the number of the wait, how long it has lasted in microseconds, and the process set of the operation, unless
    that runs already. The function may submit operations; what it raises, those calls raise.
    """

def stand_in(does: bool) -> None:
    """Whether this thread now runs a call for which another thread waits: they count as one of the process's threads
    where the engine tells whether all of them are blocked.
    """

@final
class Copier:
    """What packs small tensors on a GPU, without a world: for benchmarks, which time the kernel by itself."""

    def __init__(self, *, ordinal: int, one_kernel: bool, cuda_file: str, nvrtc_file: str) -> None:
        """one_kernel: False copies one span after another. ValueError where there is no such GPU."""
    @property
    def stream(self) -> int:
        """The CUDA stream on which it copies, of its own: non-blocking and of the highest priority."""
    @property
    def obstacle(self) -> str:
        """Why spans are copied one by one though one_kernel was wanted, known after a copy(); "" if they aren't."""
    def copy(self, copies: Sequence[tuple[int, int, int]], times: int = 1) -> None:
        """Queues `times` times the copies (from, to, bytes), which don't overlap. Waits for nothing."""

@final
class Segment:
    """This process's shared-memory segment, made before it joins a world so that peers can be told where it is."""

    def __init__(self, *, in_process: bool = False, options: Mapping[str, int] = ...) -> None: ...
    @property
    def address(self) -> str:
        """Opaque; what peers pass as `segment_addresses`."""
    def await_attached(self, peers: int, timeout_seconds: float) -> int:
        """Sleeps until engines of `peers` peers have opened it or the time is over; how many have."""

@final
class Output:
    """Memory that the engine allocated for a result; supports the buffer protocol (bytes) where it is the host's."""

    shape: tuple[int, ...]
    dtype: int
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def dlpack(self) -> CapsuleType:
        """Hands the memory over as a DLPack capsule with dtype (of float8: uint8) and shape; nothing remains here."""

@final
class TensorReader:
    """How the engine reads a framework's tensors.

    Objects of just these types (no subclasses) are read through DLPack's exchange functions in C, where the first type
    has the attribute `__dlpack_c_exchange_api__`. For all others, and for what those functions can't say or the engine
    can't take so, `describe` returns the tuple of addresses that Engine.submit explains, or raises. Where those
    functions make tensors too, results in the host's memory are tensors instead of Output, but for float8.

    `owner` returns what owns the memory of a tensor; it is referenced until the operation is over, so that the memory
    stays although the tensor may get another one meanwhile. `address` returns where the memory of such an owner begins;
    when that has changed before a handle's result() returns, the owner was told to give the memory back, which no
    reference prevents, and result() raises ValueError. `negated` returns whether the values of a tensor are those in
    its memory with the other sign; such tensors are described.
    """

    def __init__(
        self,
        types: Sequence[type],
        describe: Callable[[Any], _Addresses],
        owner: Callable[[Any], object] | None = None,
        address: Callable[[Any], int] | None = None,
        negated: Callable[[Any], bool] | None = None,
    ) -> None: ...

@final
class Handle:
    """One operation in flight; made by Engine.submit."""

    @property
    def device(self) -> int | None:
        """The GPU that its tensors are on; None for the host's memory, and after the end."""
    def done(self) -> bool:
        """True when result() would return at once. ValueError when result() has returned or raised already."""

    def result(self, stream: int | None = None) -> Any:
        """Waits for the end of the operation, and ends the handle: later calls return None at once.

        Returns what `finish` makes of the results in engine memory: a list of Output (allgather, reducescatter), for
        alltoall with the received splits, else None. Without `finish`: `keep`, or those results when it is None.
        Of an operation on a GPU: what is queued on `stream` (default: that of the submission) from now on finds the
        result; the host does not wait for it, unless the option async_completion is 0.
        Raises the internal error. Signals (Ctrl-C) are seen within 0.1 s; an exception of their handlers leaves the
        operation running and the handle usable.
        """

@final
class Unfinished:
    """An operation that was started and does not run yet."""

    @property
    def process_set(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def awaited(self) -> bool:
        """By a thread of the script."""

    @property
    def number(self) -> int:
        """Of all operations that this rank has started."""

class BlockedReport:
    """What a rank holds that does not get on."""

    @property
    def started(self) -> int:
        """Operations so far."""

    @property
    def all_threads(self) -> bool:
        """Every thread of the script that has ever waited or polled is blocked; no graph has operations in flight."""

    @property
    def moving(self) -> bool:
        """A batch runs, or an operation is being withdrawn: what the rest says is about to change."""

    @property
    def cut_short(self) -> bool:
        """There are more unfinished ones than these."""

    @property
    def cpu_us(self) -> int:
        """Time of processors that this process has used so far."""

    @property
    def executed(self) -> dict[int, int]:
        """By process set: how many operations of its order log this rank has run."""

    @property
    def unfinished(self) -> list[Unfinished]:
        """Oldest first."""

    @property
    def unnamed(self) -> dict[tuple[int, str], int]:
        """How many unnamed operations were started, by process set and kind, such as "allreduce.noname"."""

class Engine:
    """One member of one world. All methods may be called from any thread; blocking ones release the GIL."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        epoch: int,
        labels: Sequence[str],
        segment: Segment | None = None,
        segment_addresses: Sequence[str] = (),
        sockets: Mapping[int, Sequence[int]] | None = None,
        hosts: Sequence[int] = (),
        placement: Sequence[int] = (),
        options: Mapping[str, int] = ...,
        cuda_file: str = "",
        nccl_file: str = "",
        nvrtc_file: str = "",
        wire_keys: Mapping[int, bytes] = ...,
    ) -> None:
        """Connects. labels[r] names rank r in messages ("rank 1 (pid 4242) on host node-b").

        With `segment` and every rank's address: shared memory. With `sockets` (rank -> connected, authenticated
        descriptors, owned by the engine from now on): TCP. Neither is needed when size is 1. With both and `hosts`,
        one number for each rank: TCP between hosts, shared memory between ranks of equal numbers; a rank that is alone
        needs no segment. placement: one number for each rank, equal on one host whether or not its ranks share memory;
        () is one host. options: fields of csrc/base/config.h by name. cuda_file, nccl_file and nvrtc_file: what to
        load for GPU tensors, see runtime/devices.py; "" is the system's. wire_keys: by descriptor, where the option
        wire is not 0; see worker/runtime/handshake.py.
        """

    # -- operations ------------------------------------------------------------------------------------------------
    def submit(
        self,
        spec: OpSpec,
        name: str,
        tensors: Sequence[_Addresses | object],
        keep: object = None,
        reader: TensorReader | None = None,
        splits: Sequence[int] | None = None,
        finish: Callable[[Any], Any] | None = None,
        wait_follows: bool = False,
        unawaited: bool = False,
    ) -> Handle:
        """Starts an operation.

        tensors: (input address, output address or 0, dtype, shape) each; or with `reader` a tensor that is changed in
        place, or a pair of one and a tensor for the result, which the caller alone has, None where the engine allocates
        that. Their memory must stay alive until the operation is over; so long the handle, or the engine when nobody
        has that any more, references `keep` and what owns the memory of the tensors that `reader` has read. splits: of
        an alltoall, the rows for each member of the set; None is equal parts. A name that ends in ".noname" marks an
        unnamed operation: such operations match by their order. wait_follows: the caller calls result() next, so no
        background thread is woken. unawaited: it may stand for long and nobody waits for it, so the coordinator is
        not told of it. finish: see Handle.result. On a GPU the tuples go on with the number of the GPU and
        the CUDA stream (0 for the default one) whose work by now makes the tensors ready; such an operation is done
        when it is queued there, and all that is referenced until the GPU has worked it off.
        Raises ValueError (bad argument, duplicate name) or the internal error (the epoch is over).
        """

    def run(
        self,
        spec: OpSpec,
        name: str,
        tensors: Sequence[_Addresses | object],
        keep: object = None,
        reader: TensorReader | None = None,
        splits: Sequence[int] | None = None,
    ) -> list[Output] | tuple[list[Output], list[int]] | None:
        """submit() and result() in one. If a signal cuts it short, `keep` is referenced until the operation is over."""

    def c_engine(self) -> CapsuleType:
        """Named "horovod.engine": a HorovodEngine* for HorovodApi, valid as long as the capsule."""

    def join(self, device: int = -1) -> int:
        """Contributes zeros to the other ranks' allreduces until every rank of the world has called join().

        Returns the rank that called it last. device: the GPU on which zeros for GPU tensors are made, if this rank has
        not used a GPU yet.
        """

    # -- process sets -----------------------------------------------------------------------------------------------
    def add_process_set(
        self,
        number: int,
        ranks: Sequence[int],
        *,
        segment: Segment | None = None,
        segment_addresses: Sequence[str] = (),
        sockets: Mapping[int, Sequence[int]] | None = None,
        hosts: Sequence[int] = (),
        wire_keys: Mapping[int, bytes] = ...,
    ) -> None:
        """Registers a subset of the world, whose operations are then submitted with `process_set=number`.

        Every rank calls it with the same number, which is not used again, and the same ascending ranks. Members give a
        new segment of their own and the addresses of all members' in the order of `ranks`, or sockets by rank, or both
        and `hosts` in that order; other ranks give none. In a set, `root` of a broadcast is a rank of the world, splits
        are by place in the set. Does not wait for the other ranks.
        """

    def remove_process_set(self, number: int) -> None:
        """Forgets the set; what still runs in it fails on this rank and its peers. An unknown one is ignored."""

    def pending(self, process_set: int) -> int:
        """Operations of this rank that are under way in the set; 0 for an unknown one."""

    # -- negotiation: drained and fed by the coordinator session ----------------------------------------------------
    def next_outbox(self, timeout_ms: int) -> list[tuple[str, object]] | None:
        """Blocks for what must go to the coordinator, or to the log; [] on timeout, None after close().

        Items: ("announce", op), ("blocked", op), ("recalled", (process_set, [ids])), ("join", (rounds that were over,
        no zeros of this rank are under way any more)), ("note", (is it worth saying aloud, a sentence for the log)),
        ("lost", (the rank that this engine found to be lost, has its process ended)),
        where op is a tuple (name, type, [(dtype, shape)], reduce_op, prescale, postscale, root, process_set, device);
        that of "blocked" ends with the number of this very submission and the seconds for which it has been in flight.
        """

    def apply_plan(self, process_set: int, name: str, id: int, operation: tuple[object, ...] | None = None) -> None:  # noqa: A002
        """operation: (type, [(dtype, shape)], reduce_op, prescale, postscale, device), for a rank that has joined. An
        id that is not below MAX_IDS ends the epoch.
        """

    def apply_error(self, process_set: int, name: str, sentence: str) -> None: ...
    def apply_failures(
        self, errors: Sequence[tuple[int, str, str]], recalls: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        """What apply_error and apply_recall do with each of these, as if at once: a thread that hears of its error
        can't start another operation under an id that is recalled.

        errors: process set, name and sentence of each. recalls: process set and ids.
        """
    def blocked_report(self) -> BlockedReport:
        """What this rank holds now."""

    def apply_join(self, rounds_over: int, ranks: Sequence[int], phase: int, sentence: str) -> None:
        """Who has joined by now, in order; phase: a JoinPhase; sentence: for errors of what can't run."""

    def apply_recall(self, process_set: int, ids: Sequence[int]) -> None: ...

    # -- life --------------------------------------------------------------------------------------------------------
    def peer_left(self, rank: int, sentence: str) -> None:
        """The coordinator says that `rank` left in order; operations that still need it fail with the sentence."""

    def abort(self, sentence: str) -> None:
        """Ends the epoch: every pending and later operation fails with the sentence, peers are told; the first wins."""

    def lost_peer(self) -> tuple[int, bool] | None:
        """The rank that this engine itself found to be lost, and whether its process ended; None: it found none."""
    def check(self) -> None:
        """Raises the internal error with the cause once the epoch is over, or a peer has left."""

    def check_results(self) -> None:
        """Raises the internal error with the cause where operations on a device may have ended without their results.

        Call it once the device has nothing left to do: callers go on before their operations on a device are over.
        """

    def close(self, sentence: str = "", keep: bool = False) -> str:
        """Leaves in order: finishes what is agreed, tells the peers, fails the rest. Idempotent.

        keep: with the option keeps_connections, connections stay open for the next epoch: kept_sockets().

        "", or a sentence: a thread did not come back from an operation within the option close_timeout_ms, so what it
        may use, tensors included, is kept until the process ends.
        """

    def kept_sockets(self) -> dict[int, int]:
        """Once, after close(): the rank and the descriptor of each connection that was kept, which are the caller's."""

    # -- timeline (csrc/engine/timeline.h) ---------------------------------------------------------------------------
    def start_timeline(self, path: str, mark_cycles: bool, since_epoch_us: int) -> None:
        """Records to a new file, after completing the current one. ValueError when it can't be written.

        since_epoch_us: the time of day, for the file's header.
        """

    def stop_timeline(self) -> tuple[bool, str]:
        """Completes the file. Whether there was one, and a sentence when something is missing from it."""

    def forget_timeline(self) -> None:
        """In a forked child: closes the copy of the file without writing to it."""

    def known(self) -> int:
        """Of how many kinds of operations (names and signatures) something is kept. Bounded by the number of ids."""

    def counters(self) -> dict[str, int]:
        """Monotonic counts: submitted, announced, agreed, batches, bytes; waited_us: for other ranks to start;
        sleeps: of the driver in shared memory; gathers: how often the background thread let more operations come before
        it started some."""
