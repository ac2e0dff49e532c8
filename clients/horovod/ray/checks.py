"""Checks of the arguments of executors, in the driver, before anything starts: each check raises, or returns None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from horovod.base.errors import LaunchCode, SettingCode, coded


def check_settings(settings: Any, made_by: str, attributes: Sequence[str]) -> None:
    """made_by: the class whose create_settings() makes them. attributes: those that they must have."""
    if lacking := [name for name in attributes if not hasattr(settings, name)]:
        raise _invalid(
            f"settings must be those of {made_by}.create_settings(), not {settings!r}, which has no {lacking[0]}."
        )


def check_call(fn: Any, args: Any = None, kwargs: Any = None, callbacks: Any = None) -> None:
    """Checks the arguments of run() and its like."""
    check_callable("fn", fn)
    _check_arguments("args", args, "kwargs", kwargs)
    if callbacks is None:
        return
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        advice = " Put it into a list." if callable(callbacks) else ""
        raise _invalid(f"callbacks must be a list of functions, not {callbacks!r}.{advice}")
    for place, callback in enumerate(callbacks):
        check_callable(f"callbacks[{place}]", callback)


def check_callable(name: str, given: Any) -> None:
    if not callable(given):
        raise _invalid(f"{name} must be a function, or something else that can be called, not {given!r}.")


def check_start(executable_cls: Any, executable_args: Any, executable_kwargs: Any, extra_env_vars: Any) -> None:
    """Checks the arguments of start()."""
    if executable_cls is not None and not callable(executable_cls):
        raise _invalid(f"executable_cls must be a class, of which each worker makes an object, not {executable_cls!r}.")
    _check_arguments("executable_args", executable_args, "executable_kwargs", executable_kwargs)
    if executable_cls is None and (executable_args or executable_kwargs):
        raise conflict("executable_args and executable_kwargs need executable_cls, the class that takes them.")
    _check_names("extra_env_vars", extra_env_vars)


def check_gpus(use_gpu: bool, gpus_per_worker: Any) -> None:
    if gpus_per_worker is None:
        return
    if not use_gpu:
        raise conflict("gpus_per_worker is given, but use_gpu is False: use_gpu=True gives workers GPUs.")
    if isinstance(gpus_per_worker, float) and 0 < gpus_per_worker < 1:
        raise _invalid(
            f"gpus_per_worker must be at least 1, not {gpus_per_worker:g}: NCCL refuses ranks that share a "
            "GPU. Use one worker per GPU, with a larger batch."
        )
    if isinstance(gpus_per_worker, bool) or not isinstance(gpus_per_worker, int) or gpus_per_worker < 1:
        raise _invalid(f"gpus_per_worker must be at least 1, and an integer, not {gpus_per_worker!r}.")


def check_cpus(cpus_per_worker: Any, use_gpu: bool) -> None:
    is_number = isinstance(cpus_per_worker, int | float) and not isinstance(cpus_per_worker, bool)
    if not is_number or cpus_per_worker < 0 or not (cpus_per_worker or use_gpu):
        least = "a number >= 0" if use_gpu else "a number > 0, or use_gpu=True"
        raise _invalid(f"cpus_per_worker must be {least}, not {cpus_per_worker!r}.")


def check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise _invalid(f"{name} must be an integer >= 1, not {count!r}.")


def check_max_failures(max_failures: Any) -> None:
    if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
        raise _invalid(f"max_failures must be an integer >= 0, not {max_failures!r}.")


def check_resources(resources: Any, label_selector: Any) -> None:
    """resources_per_worker and label_selector."""
    _check_names("resources_per_worker", resources)
    for name, amount in (resources or {}).items():
        if name in ("CPU", "GPU"):
            raise conflict(f"resources_per_worker has {name}: {name.lower()}s_per_worker says how many there are.")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
            raise _invalid(f"resources_per_worker[{name!r}] must be a number > 0, not {amount!r}.")
    _check_names("label_selector", label_selector)
    for name, value in (label_selector or {}).items():
        if not isinstance(value, str):
            raise _invalid(f"label_selector[{name!r}] must be a string, not {value!r}.")


def conflict(sentence: str) -> ValueError:
    return ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))


def _check_arguments(args_name: str, args: Any, kwargs_name: str, kwargs: Any) -> None:
    if args is not None and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise _invalid(f"{args_name} must be a list of arguments, not {args!r}: give [{args!r}] for one argument.")
    _check_names(kwargs_name, kwargs)


def _check_names(name: str, given: Any) -> None:
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        raise _invalid(f"{name} must be a dict whose keys are strings, not {given!r}.")


def _invalid(sentence: str) -> ValueError:
    return ValueError(coded(SettingCode.INVALID_SETTING, sentence))
