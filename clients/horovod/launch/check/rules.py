"""The rules of `horovodrun --check`: where each applies, which code it finds, its sentence and the remedy.

A rule says nothing where it is not sure: what a variable holds is not known, so most go by full names (script.py) and
by names that nothing else has. tests/older_scripts.py has code for each, which tests find and, where it is said to
fail, run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from horovod.base.errors import without_code
from horovod.base.settings import SETTINGS, unread
from horovod.launch.check.script import Script, keyword_of, text_of

Found = Iterable[int]  # lines


@dataclass(frozen=True)
class Rule:
    """One row."""

    name: str  # for tests
    find: Callable[[Script], Found]
    sentence: str
    remedy: str
    applies: Callable[[Script], bool] = lambda script: True


def rules_of(script: Script) -> Iterator[tuple[int, str, str]]:
    """Line, sentence and remedy of each thing that is found."""
    for rule in RULES:
        if rule.applies(script):
            for line in sorted(set(rule.find(script))):
                yield line, rule.sentence, rule.remedy
    yield from missing_modules(script)
    yield from settings_in(script)


# What finds.


def used(pattern: str) -> Callable[[Script], Found]:
    """Names whose whole full name matches."""
    return lambda script: (line for name, line in script.uses() if re.fullmatch(pattern, name))


def given(pattern: str, *keywords: str) -> Callable[[Script], Found]:
    """Calls of a function with such a full name, with one of the keywords."""

    def find(script: Script) -> Found:
        for call in script.calls:
            if re.fullmatch(pattern, script.name(call.func)):
                yield from (one.value.lineno for one in call.keywords if one.arg in keywords)

    return find


def method(*names: str, keywords: tuple[str, ...] = ()) -> Callable[[Script], Found]:
    """Calls of methods of such names, with one of the keywords where there are some."""

    def find(script: Script) -> Found:
        for call in script.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                if not keywords:
                    yield call.lineno
                yield from (one.value.lineno for one in call.keywords if one.arg in keywords)

    return find


def called_without(pattern: str, *keywords: str, arguments: int = 1) -> Callable[[Script], Found]:
    """Calls of a function with such a full name, without the keywords and with at most `arguments` arguments."""

    def find(script: Script) -> Found:
        for call in script.calls:
            if not re.fullmatch(pattern, script.name(call.func)) or len(call.args) > arguments:
                continue
            if not any(one.arg is None or one.arg in keywords for one in call.keywords):
                yield call.lineno

    return find


def weights_files(script: Script) -> Found:
    """Names of weights files that Keras 3 does not take."""
    for call in script.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "save_weights":
            path = text_of(call.args[0] if call.args else keyword_of(call, "filepath"))
            if path is not None and not path.endswith(".weights.h5"):
                yield call.lineno


def checkpoints(script: Script) -> Found:
    """Names of files that Keras 3's ModelCheckpoint does not take."""
    for call in script.calls:
        if not re.fullmatch(_KERAS + r"callbacks\.ModelCheckpoint", script.name(call.func)):
            continue
        path = text_of(call.args[0] if call.args else keyword_of(call, "filepath"))
        only = keyword_of(call, "save_weights_only")
        if path is None or (only is not None and not isinstance(only, ast.Constant)):
            continue
        ends = (".weights.h5",) if isinstance(only, ast.Constant) and only.value else (".keras", ".h5")
        if not path.endswith(ends):
            yield call.lineno


def communicators(script: Script) -> Found:
    """hvd.init and hvd.ProcessSet that are given a communicator of mpi4py."""
    from_mpi4py = {
        target.id
        for node in script.nodes
        if isinstance(node, ast.Assign) and "mpi4py" in _names_in(script, node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in script.calls:
        if not re.fullmatch(_HVD + r"(init|ProcessSet)", script.name(call.func)):
            continue
        for value in [*call.args, *(one.value for one in call.keywords)]:
            if isinstance(value, ast.List | ast.Tuple):
                continue
            plain = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            if "mpi4py" in _names_in(script, value) or plain & from_mpi4py:
                yield call.lineno


def _names_in(script: Script, value: ast.AST) -> set[str]:
    return {script.name(node).partition(".")[0] for node in ast.walk(value)}


def truthy(pattern: str, *keywords: str) -> Callable[[Script], Found]:
    """As `given`, but for keywords that are given False or None."""

    def find(script: Script) -> Found:
        for call in script.calls:
            if re.fullmatch(pattern, script.name(call.func)):
                for one in call.keywords:
                    if one.arg in keywords and not (isinstance(one.value, ast.Constant) and not one.value.value):
                        yield one.value.lineno

    return find


def spawned(script: Script) -> Found:
    """hvd.init() that each child of a DataLoader runs anew."""
    starts = {"spawn", "forkserver"}
    asks = any(
        text_of(keyword_of(call, "multiprocessing_context")) in starts
        or (
            script.name(call.func).endswith(("multiprocessing.set_start_method", "multiprocessing.get_context"))
            and call.args
            and text_of(call.args[0]) in starts
        )
        for call in script.calls
    )
    if asks:
        for node in script.outside_main():
            if isinstance(node, ast.Call) and re.fullmatch(_HVD + "init", script.name(node.func)):
                yield node.lineno


def read_variables(*names: str) -> Callable[[Script], Found]:
    """Where the environment is asked for one of them."""

    def find(script: Script) -> Found:
        for node in script.nodes:
            if isinstance(node, ast.Subscript):
                reads = isinstance(node.ctx, ast.Load) and script.name(node.value) == "os.environ"
                if reads and text_of(node.slice) in names:
                    yield node.lineno
            elif isinstance(node, ast.Call) and node.args and text_of(node.args[0]) in names:
                yield from [node.lineno] if script.name(node.func) in ("os.environ.get", "os.getenv") else []

    return find


# Where they look.


def _keras_3(script: Script) -> bool:
    """Whether it uses Keras, and does not ask for Keras 2."""
    if script.imports("tf_keras") or "TF_USE_LEGACY_KERAS" in script.text_constants:
        return False
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() not in ("1", "true") and any(
        re.fullmatch(r"(tensorflow\.|horovod\.|horovod\.tensorflow\.)?keras(\..*)?", name) for name, _ in script.uses()
    )


def _tensorflow(script: Script) -> bool:
    return script.imports("tensorflow")


def _torch(script: Script) -> bool:
    """Whether nothing else than Horovod starts its processes, such as a trainer that makes process groups itself."""
    others = ("ray", "pyspark", "lightning", "pytorch_lightning")
    return script.imports("horovod.torch") and not script.imports(*others)


def _torch_alone(script: Script) -> bool:
    """Whether it makes no process group of torch.distributed itself."""
    groups = used(r"torch\.distributed\.init_process_group")
    return _torch(script) and not any(True for _ in groups(script))


def _without_our_backend(script: Script) -> bool:
    """Whether its process groups, if it makes any, are not those of Horovod, over which torch reduces gradients."""
    return _torch(script) and not script.imports("horovod.torch.distributed")


def _horovod(script: Script) -> bool:
    return script.imports("horovod")


_KERAS: Final = r"(?:tensorflow\.)?keras\."
_HVD: Final = r"horovod\.(?:torch|tensorflow|tensorflow\.keras|keras|mxnet|jax)\."
_OPTIMIZER: Final = _KERAS + r"optimizers\.\w+"
_V1: Final = (
    r"Session|InteractiveSession|ConfigProto|GPUOptions|placeholder|get_variable|variable_scope|global_variables"
    r"|trainable_variables|global_variables_initializer|local_variables_initializer|get_default_graph"
    r"|reset_default_graph|set_random_seed|enable_eager_execution|random_uniform|truncated_normal|to_float|assign"
    r"|gfile|layers|app|flags|logging|python_io"
)
_V1_TRAIN: Final = (
    r"\w+Optimizer|MonitoredTrainingSession|SessionRunHook|StopAtStepHook|LoggingTensorHook|Saver|Supervisor"
    r"|get_or_create_global_step"
)
_LEGACY: Final = "or run with Keras 2: pip install tf_keras, TF_USE_LEGACY_KERAS=1, horovod.tensorflow.keras"

RULES: Final = (
    Rule(
        "experimental_run_tf_function",
        method("compile", keywords=("experimental_run_tf_function",)),
        "Keras 3 has no experimental_run_tf_function and compile() raises TypeError",
        "leave it out, Horovod needs it no longer",
        _keras_3,
    ),
    Rule(
        "compile arguments",
        method("compile", keywords=("sample_weight_mode", "target_tensors")),
        "Keras 3's compile() raises TypeError for this argument",
        f"leave it out, {_LEGACY}",
        _keras_3,
    ),
    Rule(
        "lr",
        given(_OPTIMIZER, "lr"),
        "Keras 3's optimizers refuse lr=",
        "write learning_rate=",
        _keras_3,
    ),
    Rule(
        "decay",
        given(_OPTIMIZER, "decay"),
        "Keras 3's optimizers ignore decay=, so the learning rate stays what it is",
        "pass learning_rate=keras.optimizers.schedules.InverseTimeDecay(...), or use "
        "hvd.callbacks.LearningRateScheduleCallback",
        _keras_3,
    ),
    Rule(
        "legacy optimizers",
        used(_KERAS + r"optimizers\.(legacy|experimental)\.\w+"),
        "Keras 3 has neither optimizers.legacy nor optimizers.experimental",
        f"write keras.optimizers.NAME, {_LEGACY}",
        _keras_3,
    ),
    Rule(
        "generators",
        method("fit_generator", "evaluate_generator", "predict_generator"),
        "Keras 3's models have no fit_generator, evaluate_generator and predict_generator",
        "write fit, evaluate and predict, which take generators too",
        _keras_3,
    ),
    Rule(
        "classes",
        method("predict_classes", "predict_proba"),
        "Keras 3's models have no predict_classes and predict_proba",
        "write predict(...), with .argmax(axis=-1) for classes",
        # scikit-learn's have them as well
        lambda script: _keras_3(script) and not script.imports("sklearn"),
    ),
    Rule(
        "workers",
        method("fit", "evaluate", "predict", keywords=("workers", "use_multiprocessing", "max_queue_size")),
        "Keras 3's fit, evaluate and predict raise TypeError for workers, use_multiprocessing and max_queue_size",
        "give them to the constructor of the keras.utils.PyDataset (Sequence)",
        _keras_3,
    ),
    Rule(
        "weights files",
        weights_files,
        "Keras 3 saves weights in files that end with .weights.h5 only, and raises ValueError for another name",
        "rename the file to NAME.weights.h5",
        _keras_3,
    ),
    Rule(
        "checkpoint files",
        checkpoints,
        "Keras 3's ModelCheckpoint raises ValueError for this file name",
        "end it with .keras, or with .weights.h5 if save_weights_only=True",
        _keras_3,
    ),
    Rule(
        "save_format",
        method("save", "save_weights", keywords=("save_format",)),
        "Keras 3's save() raises an error for save_format",
        "leave it out: NAME.keras says the format; model.export(DIR) writes a SavedModel",
        _keras_3,
    ),
    Rule(
        "sessions",
        used(
            r"(tensorflow\.(compat\.v1\.)?)?keras\.backend\."
            r"(get_session|set_session|placeholder|function|learning_phase|set_learning_phase)"
        ),
        "Keras 3 has no sessions: keras.backend lacks this",
        "leave it out; choose a GPU with tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU') and see that "
        "tf.config.experimental.set_memory_growth(gpu, True) stands before it",
        _keras_3,
    ),
    Rule(
        "backend functions",
        used(
            r"keras\.backend\.(mean|sum|square|sqrt|abs|exp|log|clip|get_value|set_value|eval|gradients|dot|expand_dims"
            r"|batch_set_value|batch_get_value|cast|variable|shape|int_shape)"
        ),
        "keras.backend of Keras 3 has no functions for tensors",
        "write keras.ops.NAME; optimizer.learning_rate.assign(value) for set_value",
        _keras_3,
    ),
    Rule(
        "modules",
        used(
            r"keras\.(engine|layers\.(core|merge|normalization|convolutional|embeddings|advanced_activations)"
            r"|utils\.(np_utils|generic_utils|vis_utils|multi_gpu_model)|preprocessing\.text"
            r"|preprocessing\.image\.ImageDataGenerator)(\..*)?"
        ),
        "Keras 3 has no such module or name",
        "import from keras.layers, keras.utils and keras.models; ImageDataGenerator from tf.keras.preprocessing.image",
        _keras_3,
    ),
    Rule(
        "layers",
        used(_KERAS + r"layers\.CuDNN(LSTM|GRU)"),
        "Keras 3 has no CuDNN layers",
        "write keras.layers.LSTM or GRU, which use cuDNN by themselves",
        _keras_3,
    ),
    Rule(
        "fused",
        given(_KERAS + r"layers\.BatchNormalization", "fused"),
        "Keras 3's BatchNormalization refuses fused=",
        "leave it out",
        _keras_3,
    ),
    Rule(
        "callback arguments",
        given(_KERAS + r"callbacks\.(TensorBoard|ModelCheckpoint)", "write_grads", "batch_size", "period"),
        "Keras 3's callback raises TypeError for this argument",
        "leave it out; use save_freq= instead of period=",
        _keras_3,
    ),
    Rule(
        "experimental_aggregate_gradients",
        method("apply_gradients", keywords=("experimental_aggregate_gradients",)),
        "Keras 3's apply_gradients() raises TypeError for experimental_aggregate_gradients",
        "leave it out: gradients that a hvd.DistributedGradientTape has reduced are not reduced again",
        _keras_3,
    ),
    Rule(
        "mixed precision",
        used(_KERAS + r"mixed_precision\.experimental\..*|tensorflow\.train\.experimental\.enable_mixed_precision_\w+"),
        "this way to mixed precision is gone",
        'write keras.mixed_precision.set_global_policy("mixed_float16")',
        _keras_3,
    ),
    Rule(
        "TensorFlow 1",
        used(rf"tensorflow\.({_V1})|tensorflow\.train\.({_V1_TRAIN})"),
        "TensorFlow 2 has no such name",
        "write tf.compat.v1.NAME, or `import tensorflow.compat.v1 as tf`",
        _tensorflow,
    ),
    Rule(
        "TensorFlow 1, gone",
        used(r"tensorflow\.(compat\.v1\.)?(contrib|estimator)"),
        "TensorFlow has no contrib and no estimator any more",
        "train with model.fit or a loop of your own",
        _tensorflow,
    ),
    Rule(
        "compat.v1 layers",
        used(r"tensorflow\.compat\.v1\.layers\.\w+"),
        "tf.compat.v1.layers does not work with Keras 3",
        f"write tf.keras.layers, {_LEGACY}",
        lambda script: _tensorflow(script) and "TF_USE_LEGACY_KERAS" not in script.text_constants,
    ),
    Rule(
        "communicators",
        communicators,
        "hvd.init() and hvd.ProcessSet take no communicator of mpi4py: there is no MPI in this version",
        "call hvd.init() without it (processes that mpirun started find each other), and hvd.ProcessSet([ranks])",
    ),
    Rule(
        "mpi_threads_supported",
        used(_HVD + "mpi_threads_supported"),
        "hvd.mpi_threads_supported() raises ValueError: there is no MPI in this version",
        "leave it out; mpi4py may be imported before or after hvd.init()",
    ),
    Rule(
        "MPI of run",
        truthy(r"horovod(\.runner|\.spark)?\.(run|run_elastic)", "use_mpi", "mpi_args", "extra_mpi_args"),
        "there is no MPI in this version: use_mpi and its arguments raise ValueError",
        "leave them out; to start with MPI, run `mpirun -np N python SCRIPT`",
    ),
    Rule(
        "spawned workers",
        spawned,
        "each spawned worker runs this module's hvd.init() again, which is refused",
        'put the code of the script, hvd.init() too, under `if __name__ == "__main__":`',
    ),
    Rule(
        "process groups",
        called_without(r"torch\.distributed\.init_process_group", "init_method", "rank", "store", arguments=1),
        "horovodrun sets no RANK, WORLD_SIZE and MASTER_ADDR, so init_process_group() raises ValueError",
        "leave it out, hvd.init() is enough; else pass init_method, rank=hvd.rank() and world_size=hvd.size()",
        lambda script: _torch(script) and "MASTER_ADDR" not in script.text_constants,
    ),
    Rule(
        "DistributedSampler",
        called_without(r"torch\.utils\.data\.(distributed\.)?DistributedSampler", "rank", arguments=2),
        "DistributedSampler asks torch.distributed for its rank, which has no process group",
        "pass num_replicas=hvd.size(), rank=hvd.rank()",
        _torch_alone,
    ),
    Rule(
        "ranks of torch.distributed",
        used(r"torch\.distributed\.(get_rank|get_world_size|barrier|all_reduce|broadcast|all_gather)"),
        "torch.distributed has no process group in a script that calls hvd.init() alone",
        "write the function of hvd: rank, size, barrier, allreduce, broadcast, allgather",
        _torch_alone,
    ),
    Rule(
        "DistributedDataParallel",
        used(r"torch\.nn\.parallel\.DistributedDataParallel"),
        "DistributedDataParallel reduces gradients itself, by torch.distributed",
        "wrap the optimizer with hvd.DistributedOptimizer and leave the model as it is",
        _without_our_backend,
    ),
    Rule(
        "SyncBatchNorm",
        used(r"torch\.nn\.SyncBatchNorm(\.convert_sync_batchnorm)?"),
        "torch.nn.SyncBatchNorm knows torch.distributed only: without a process group each rank normalizes alone",
        "write hvd.SyncBatchNorm",
        _torch_alone,
    ),
    Rule(
        "variables of mpirun",
        read_variables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"),
        "horovodrun starts no mpirun, so this variable is not set",
        "write hvd.rank(), hvd.local_rank() and hvd.size()",
        _horovod,
    ),
    Rule(
        "variables of torchrun",
        read_variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "torchrun sets this variable, horovodrun does not",
        "write hvd.rank(), hvd.local_rank() and hvd.size()",
        _horovod,
    ),
)

# Packages of the product beside clients/horovod: nothing that a script imports.
_INTERNAL: Final = ("base", "coordinator", "worker", "protos", "_core")
_PACKAGE: Final = Path(__file__).parents[2]


def missing_modules(script: Script) -> Iterator[tuple[int, str, str]]:
    """Imports of modules of earlier versions."""
    for node in script.nodes:
        modules = []
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for module in modules:
            top, *parts = module.split(".")
            if top == "horovod" and parts and parts[0] not in _INTERNAL and not _is_module(parts):
                remedy = (
                    "write `import horovod` and call horovod.run(...), or start the command horovodrun"
                    if parts[0] in ("run", "runner")
                    else "import the public name from horovod.torch, horovod.tensorflow, horovod.keras and so on"
                )
                yield node.lineno, f"this version has no module {module}", remedy  # type: ignore[attr-defined]


def _is_module(parts: list[str]) -> bool:
    place = _PACKAGE.joinpath(*parts)
    return place.with_suffix(".py").exists() or place.is_dir()


def settings_in(script: Script) -> Iterator[tuple[int, str, str]]:
    """Variables that the script sets: without effect, refused, or unknown."""
    for node in script.nodes:
        pairs: list[tuple[ast.AST | None, ast.AST | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(one.slice, node.value) for one in node.targets if isinstance(one, ast.Subscript)]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Call) and script.name(node.func) in ("os.environ.setdefault", "os.putenv"):
            pairs = list(zip(node.args[:1], node.args[1:2], strict=False))
        for key, value in pairs:
            name = text_of(key)
            if key is not None and name is not None and name.startswith("HOROVOD_"):
                for sentence, remedy in setting_faults(name, text_of(value)):
                    yield getattr(key, "lineno", 1), sentence, remedy


def setting_faults(name: str, text: str | None) -> Iterator[tuple[str, str]]:
    """Sentence and remedy for a variable that is set. text: None where it is not known."""
    setting = next((one for one in SETTINGS if one.env == name), None)
    if setting is None:
        yield from ((sentence.rstrip("."), "see docs/settings.md") for sentence in unread({name: ""}))
        return
    if text is not None and text.strip():
        try:
            setting.parse(text)
        except ValueError as error:
            yield without_code(error).rstrip("."), "see docs/settings.md"
            return
    if setting.no_effect:
        yield f"{name} has no effect: {setting.no_effect}", "leave it out"
