"""What all frameworks say of a collective's arguments and errors, written once.

A public function keeps its `def`, whose signature editors and type checkers read, and of its docstring a summary, what
is its own, and an example. `complete` adds the sections Args, Returns and Raises from the tables below, in the words of
the framework: `help()` shows them, and so do the pages of the API (docs/tools/whole_docstrings.py), for which sources
are read and nothing but this module is imported. What a function does follows from its name:
`grouped_allreduce_async_` is allreduce, of several tensors, asynchronous and in place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Words:
    """How a framework says it."""

    modules: tuple[str, ...]  # where its collectives are: modules, or packages with their modules
    one: str  # a tensor, an array
    given: str  # what may be passed as one
    dtypes: str
    errors: Mapping[str, str]  # by class, the REASONS for which it is raised, with commas between
    has_complex: bool = False
    end: str = ""  # a sentence behind the errors
    instead: dict[str, str] = field(default_factory=dict)  # of an entry of the tables
    more: Mapping[str, str] = field(default_factory=dict)  # behind an entry; both by "function.entry" or "entry"
    result: str = ""  # the noun for a new one, if that is not `one`


# -- the table of arguments: by name, or by operation and name where operations differ ---------------------------------
ARGUMENTS: Final[dict[str, str]] = {
    "allreduce.tensor": (
        "{given}, of one shape and dtype on all ranks; {dtypes}{complex_reduced} or (except with Average) bool."
    ),
    "reducescatter.tensor": (
        "{given}, with at least one dimension, of one shape and dtype on all ranks; {dtypes}{complex} or (except"
        " with Average) bool."
    ),
    "allgather.tensor": (
        "{given}, with at least one dimension; {dtypes}{complex} or bool. The shape may differ between ranks in "
        "the first dimension only, which may be 0."
    ),
    "broadcast.tensor": "{given}, of one shape and dtype on all ranks; {dtypes}{complex} or bool.",
    "alltoall.tensor": (
        "{given}, of a shape in which all dimensions but the first agree on all ranks; {dtypes}{complex} or bool."
    ),
    "tensors": (
        "each with a shape and dtype as `tensor` of `{operation}`; they may differ within the list, which may be empty."
    ),
    "average": "deprecated, use op.",
    "allreduce.op": (
        "hvd.Average (the default), Sum, Min, Max, Product, or Adasum (docs/algorithms.md), which takes "
        "floating-point {one}s in the global process set."
    ),
    "reducescatter.op": "hvd.Average or hvd.Sum.",
    "sparse_allreduce.op": "hvd.Average (entries are divided by the number of ranks) or hvd.Sum.",
    "name": "matches the call across ranks; without one, calls match by their order.",
    "sparse_allreduce.name": "required; two operations `<name>.indices` and `<name>.values` are started.",
    "prescale_factor": "multiplies the {one} before the reduction.",
    "postscale_factor": "multiplies the result.",
    "compression": "how the {one} travels, for example hvd.Compression.fp16.",
    "root_rank": "a rank of the world, also with a process set, of which it must be a member.",
    "splits": (
        "how many rows go to each rank, as many whole numbers as there are ranks; rows beyond their sum are not "
        "sent. None: equal parts."
    ),
    "process_set": "the ranks that take part.",
    "priority": "accepted without effect, since calls run at once.",
    "device_dense": 'device of the operation; "" is where TensorFlow puts it.',
    "device_sparse": "the same for tf.IndexedSlices.",
    "ignore_name_scope": "the name does not begin with TensorFlow's name scope.",
    "device": (
        "the index of this rank's GPU, or -1. A joined rank makes its zeros on the same kind of device as the "
        "other ranks' {one}s, so this is needed only if these are on GPUs and this rank has not reduced one "
        "on its GPU yet."
    ),
}
_IN_FLIGHT: Final = "It must not be changed before {waits} has returned."

# -- results: of an operation that returns a new tensor, its contents; of every other one, the text of the section -----
RESULTS: Final[dict[str, str]] = {
    "allreduce": "of the shape and dtype of {argument}",
    "reducescatter": (
        "with this rank's rows of the result, of the dtype of {argument}; if the rows can't be divided equally, the "
        "first ranks have one more"
    ),
    "allgather": "with the rows of all ranks in the order of ranks, of the dtype of {argument}",
    "broadcast": "with the values of `root_rank`, of the shape and dtype of {argument}",
    "alltoall": "with the rows that ranks sent to this rank, in the order of ranks, of the dtype of {argument}",
}
WHOLE_RESULTS: Final[dict[str, str]] = {
    "sparse_allreduce": "A function without arguments. It waits for the result and returns it: a new sparse {one}.",
    "barrier": "None, when all ranks of `process_set` have called it.",
    "join": "The rank that joined last, an int.",
}
_RECEIVED: Final = "and how many rows came from each rank, int32"

# -- the table of reasons for errors: each, a pattern of the names of the functions that have it, and the words --------
_DATA: Final = "all|broadcast|scatter"
_REDUCES: Final = "^(grouped_)?allreduce"
REASONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("unfit", _DATA, "{one}s that can't be sent"),
    ("expanded", "_$", "an expanded {one}, of which several elements are one place in memory"),
    ("layout", "sparse", "a {one} of another layout"),
    ("variables", "broadcast_$", "not all are resource variables, or not all reference variables (of v1 graphs)"),
    ("scalar", "allgather|alltoall", "a scalar"),
    ("no rows", "scatter", "a scalar, which has no rows"),
    ("choice", "broadcast", "a root that is not a rank of the set"),
    ("choice", "alltoall", "splits that do not fit"),
    ("reduction", _REDUCES, "an op that does not exist, or not for this {one}"),
    ("reduction", "scatter", "an op that does not exist"),
    ("reduction", "sparse", "another op"),
    ("undefined", _REDUCES, "hvd.Adasum in a smaller process set"),
    ("undefined", "scatter|sparse", "hvd.Adasum"),
    ("slices", _REDUCES, "a reduction that tf.IndexedSlices do not have"),
    ("other reductions", "scatter", "hvd.Min, Max and Product"),
    ("graph", "barrier", "in a tf.function or a v1 graph"),
    ("in flight", _DATA, "a name that is in flight already"),
    ("set", f"{_DATA}|barrier", "a process set that is not registered, or of which this rank is no member"),
    ("disagreement", _DATA, "the ranks do not agree (the message says in what)"),
    ("devices", "grouped", "{one}s on several devices"),
    ("no world", "", "before hvd.init()"),
    ("loss", "", "a rank was lost"),
    ("leaves", "join", "a rank leaves without joining"),
    ("device", "join", "`device` is no integer"),
)

# -- the table of frameworks -------------------------------------------------------------------------------------------
_ALL_DTYPES: Final = (
    "integers of 8 to 64 bits, signed or not, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64"
)
_SYNCHRONIZED: Final = "Errors after the start are raised by {waits}."
_ERRORS: Final = {
    "ValueError": "unfit, expanded, layout, no rows, choice, reduction, in flight, set",
    "NotImplementedError": "undefined",
    "HorovodInternalError": "disagreement, scalar, other reductions, devices, loss, leaves",
    "TypeError": "device",
}
_OF_ARRAYS: Final = {  # which are no views with strides, and on one device
    "ValueError": "unfit, layout, no rows, choice, reduction, in flight, set",
    "HorovodInternalError": "disagreement, scalar, other reductions, loss, leaves",
}

TORCH: Final = Words(
    modules=("horovod.torch.ops",),
    one="tensor",
    given="dense, with any strides",
    dtypes=_ALL_DTYPES,
    has_complex=True,
    errors=_ERRORS,
    instead={
        "sparse_allreduce.tensor": (
            "sparse COO, of the same shape and dtype on all ranks; the number of entries may differ, also be zero."
        ),
    },
    more={
        "allreduce.tensor": "Contiguous tensors of real numbers travel without a copy.",
        "grouped_allreduce.tensors": "All are on one device.",
        "splits": "Or an int32 tensor of them.",
    },
)
TENSORFLOW: Final = Words(
    modules=("horovod.tensorflow.ops",),
    one="tensor",
    given="a tensor, or a value that tf.convert_to_tensor accepts",
    dtypes=_ALL_DTYPES,
    errors={
        "ValueError": "reduction, no rows, variables",
        "NotImplementedError": "undefined, slices, graph",
        "tf.errors.InvalidArgumentError": "unfit, choice, in flight, set",
        "tf.errors.FailedPreconditionError": "disagreement, scalar, no world",
        "tf.errors.AbortedError": "other reductions",
        "tf.errors.UnknownError": "loss",
    },
    instead={
        "name": (
            "matches the call across ranks; without a name, eager calls match by their order, and calls in a "
            "function by the name of `tensor`."
        ),
        "broadcast_.variables": (
            "tf.Variable, or keras.Variable on TensorFlow; each of one shape and dtype on all ranks."
        ),
        "broadcast_.name": "matches the call across ranks; without one, calls match by their order.",
        "join.returns": "The rank that joined last, an int32 scalar.",
    },
    more={
        "allreduce.tensor": "Of tf.IndexedSlices, rows of all ranks are gathered; the result is one, too.",
        "grouped_allreduce.tensors": "tf.IndexedSlices among them are gathered one by one.",
    },
)
JAX: Final = Words(
    modules=("horovod.jax.reductions", "horovod.jax.rows", "horovod.jax.functions"),
    one="array",
    given="a jax.Array on a CPU or on a GPU with CUDA, a tracer, or a value that jax.numpy.asarray accepts",
    dtypes=_ALL_DTYPES,
    errors=_ERRORS | _OF_ARRAYS,
    end="If the argument is a tree, the message has the path of the array. A compiled function raises "
    "jax.errors.JaxRuntimeError with the message of HorovodInternalError when the script reads a result.",
    instead={
        "name": (
            "matches the call across ranks; without a name, calls match by their order, separately for calls "
            "in compiled functions and outside of them."
        ),
    },
    more={
        **dict.fromkeys(
            ("allreduce.tensor", "allgather.tensor", "broadcast.tensor", "reducescatter.tensor"),
            "Or a pytree of these (a list is one, too), of the same keys on all ranks, and without None. NumPy's "
            "arrays of 64 bits stay NumPy's unless jax_enable_x64 is set, as JAX would make 32 bits of them.",
        ),
        "allgather.tensor": "Or a pytree of these. In a compiled function the first dimension must not differ.",
        "alltoall.tensor": "In a compiled function the first one agrees as well.",
        "allreduce.op": "The derivatives of others than Average and Sum exist in reverse mode only.",
        **dict.fromkeys(
            ("allreduce.returns", "allgather.returns", "broadcast.returns", "reducescatter.returns"),
            "Of a pytree, the tree of the results.",
        ),
    },
)
MXNET: Final = Words(
    modules=("horovod.mxnet.mpi_ops", "horovod.mxnet.asynchronous"),
    one="array",
    given="an mx.nd.NDArray or mx.np.ndarray, dense, in the host's memory",
    dtypes="integers of 8, 32 and 64 bits, float16, bfloat16, float32, float64",
    errors=_ERRORS | _OF_ARRAYS,
    end="Each is also an mxnet.MXNetError (horovod.mxnet.errors).",
    instead={
        "sparse_allreduce.tensor": (
            "of the storage type row_sparse, of one shape and dtype on all ranks, which may have other rows, or none."
        )
    },
)
KERAS: Final = Words(
    modules=("horovod._keras.api",),
    one="value",
    result="tensor of Keras's backend,",
    given="a number, an array or a tensor",
    dtypes="a dtype that the framework of Keras's backend reduces",
    errors={},
    end="Raises the errors of the function with the same name in the framework of Keras's backend.",
    instead={
        "allreduce.value": "a number, an array or a tensor, of one shape and dtype on all ranks.",
        "reducescatter.value": "an array or a tensor with at least one dimension, of one shape and dtype on all ranks.",
        "allgather.value": "an array or a tensor, of shapes that differ in the first dimension only.",
        "broadcast.value": "a number, an array or a tensor, of one shape and dtype on all ranks.",
    },
)
FRAMEWORKS: Final = (TORCH, TENSORFLOW, JAX, MXNET, KERAS)

_NAME: Final = re.compile(
    "(?:grouped_)?(allreduce|allgather|broadcast|alltoall|reducescatter|sparse_allreduce(?=_async)|barrier|join)(?:_async)?_?"
)
_WIDTH: Final = 112  # of a line, besides its indentation


def operation_of(name: str) -> str:
    """Of the function of this name; "" where that is no collective."""
    found = _NAME.fullmatch(name)
    return found[1] if found is not None else ""


def words_of(module: str) -> Words | None:
    """The framework whose collectives are in a module."""
    return next((one for one in FRAMEWORKS if any(f"{module}.".startswith(f"{part}.") for part in one.modules)), None)


def complete(words: Words, namespace: Mapping[str, Any]) -> None:
    """Gives the collectives in a namespace of a framework their whole docstrings."""
    for name, function in namespace.items():
        if operation_of(name) and function.__doc__ is not None:  # python -OO has no docstrings
            code = inspect.unwrap(function).__code__
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            function.__doc__ = whole(words, name, names, inspect.cleandoc(function.__doc__))


def whole(words: Words, name: str, arguments: Iterable[str], docstring: str) -> str:
    """The docstring of a collective, with its arguments, result and errors. KeyError: the tables lack an argument."""
    said = [f"{argument}: {described(words, name, argument)}" for argument in arguments]
    raised = [f"{error}: {reasons}." for error in words.errors if (reasons := reasons_of(words, name, error))]
    before, returns, after = docstring.partition("\n\nReturns:\n")
    sections = [before]
    if said:
        sections.append("Args:\n" + "\n".join(map(_wrapped, said)))
    if not returns:
        after = _wrapped(returned(words, name, next(iter(arguments), "")))
    sections.append(f"Returns:\n{after}")
    if raised:
        sections.append("Raises:\n" + "\n".join(map(_wrapped, raised)))
    ends = [_SYNCHRONIZED] if "_async" in name else []
    ends += [words.end] if words.end else []
    if ends:
        sections.append(_wrapped(_in_words(" ".join(ends), words, operation_of(name)), indent=""))
    return "\n\n".join(sections)


def described(words: Words, name: str, argument: str) -> str:
    """What an argument is. KeyError: the tables do not say it."""
    operation = operation_of(name)
    table = {**ARGUMENTS, **words.instead}
    keys = [f"{name}.{argument}", f"{operation}.{argument}", argument]
    parts = [table[next((key for key in keys if key in table), argument)]]
    parts += [words.more[key] for key in keys if key in words.more][:1]
    if "_async" in name and argument in ("tensor", "tensors"):
        parts.append(_IN_FLIGHT)
    return _in_words(" ".join(parts), words, operation)


def returned(words: Words, name: str, argument: str) -> str:
    """What a function returns, of which the first argument has the name `argument`."""
    operation = operation_of(name)
    parts = [words.more[f"{name}.returns"]] if f"{name}.returns" in words.more else []
    if operation in WHOLE_RESULTS:
        return _in_words(" ".join([words.instead.get(f"{name}.returns", WHOLE_RESULTS[operation]), *parts]), words)
    is_grouped, is_async = name.startswith("grouped_"), "_async" in name
    if name.endswith("_"):
        text = "the {one}s of `tensors`, with the results" if is_grouped else f"`{argument}`, with the result"
        text += " in them" if is_grouped else " in it"
    elif is_grouped:
        container = "tuple" if is_async else "list"
        text = f"a {container} of new {{one}}s in the order of `tensors`, each {RESULTS[operation]}"
    else:
        text = f"a new {words.result or words.one} {RESULTS[operation]}"
    if operation == "alltoall":
        text = f"a pair of {text}, {_RECEIVED}" if is_async else f"{text}; with `splits` a pair of it {_RECEIVED}"
    if is_async:
        text = f"a handle. `synchronize(handle)` returns {text}"
    text = text.replace("{argument}", "its entry in `tensors`" if is_grouped else f"`{argument}`")
    return _in_words(" ".join([f"{text[0].upper()}{text[1:]}.", *parts]), words)


def reasons_of(words: Words, name: str, error: str) -> str:
    """When a function raises an error; "" where it never does."""
    found = [
        text
        for reason in words.errors[error].split(", ")
        for one, functions, text in REASONS
        if one == reason and re.search(functions, name)
    ]
    return _in_words("; ".join(found), words)


def _in_words(text: str, words: Words, operation: str = "") -> str:
    if "{" not in text:
        return text
    return text.format(
        one=words.one,
        given=words.given,
        dtypes=words.dtypes,
        operation=operation,
        waits="the returned function" if operation == "sparse_allreduce" else "`synchronize`",
        complex=", complex" if words.has_complex else "",
        complex_reduced=", complex (Average and Sum only)" if words.has_complex else "",
    )


def _wrapped(text: str, indent: str = "    ") -> str:
    """In lines; textwrap takes ten times as long, at every start of a program."""
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) > _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent * 2
        line += f"{word} "
    return "\n".join([*lines, line.rstrip()])
