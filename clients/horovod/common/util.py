"""Small helpers that scripts import from horovod.common.util."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from horovod.common import basics
from horovod.common.exceptions import HorovodVersionMismatchError

__all__ = [
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod can be used with a framework: "torch". One engine serves them all, so it needs that framework
    and its part of Horovod to be installed; neither is imported."""
    name = "torch" if ext_base_name in ("torch", "pytorch") else ext_base_name
    try:
        available = all(find_spec(module) is not None for module in (name, "horovod._core", f"horovod.{name}"))
    except ModuleNotFoundError:
        available = False
    if verbose:
        print(f"Horovod for {name} is {'' if available else 'not '}available.")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", "tensorflow") sees a GPU."""
    if ext_base_name not in ("torch", "tensorflow"):
        raise ValueError(f"gpu_available({ext_base_name!r}) is not usable: expected 'torch' or 'tensorflow'.")
    available = False
    with contextlib.suppress(ImportError):
        framework: Any = importlib.import_module(ext_base_name)
        if ext_base_name == "torch":
            available = bool(framework.cuda.is_available())
        else:
            available = bool(framework.config.list_physical_devices("GPU"))
    if verbose:
        print(f"{ext_base_name} sees {'a' if available else 'no'} GPU.")
    return available


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI is compiled in."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Whether Horovod can run without MPI: always True."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number, or 0 without NCCL."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM DDL is compiled in."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Whether oneCCL is compiled in."""
    return basics.ccl_built()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError when the native engine, which every framework uses, is not installed."""
    if find_spec("horovod._core") is None:
        raise ImportError(
            f"Extension {ext_name} has not been built: the native engine horovod._core is missing. Reinstall Horovod."
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Nothing is built against a framework's version, so `version` always fits; an import error stays what it is."""
    if isinstance(exception, HorovodVersionMismatchError):
        raise exception


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """`items` in n consecutive parts whose lengths differ by at most one; the first ones are the longer ones."""
    if n < 1:
        raise ValueError(f"split_list(..., {n}) is not usable: expected at least 1 part.")
    length, longer = divmod(len(items), n)
    starts = [i * length + min(i, longer) for i in range(n + 1)]
    return [items[start:end] for start, end in itertools.pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """True for 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


check_num_rank_power_of_2 = num_rank_is_power_2  # its name in horovod.tensorflow


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables inside the block (None unsets one) and puts the old values back after it."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def __getattr__(name: str) -> Any:
    """Names of earlier releases. They stand in compatibility.py, because they need further imports."""
    if name not in ("_cache", "is_version_greater_equal_than"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.common import compatibility

    return getattr(compatibility, name)


def is_iterable(x: object) -> bool:
    """Whether iter(x) works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True
