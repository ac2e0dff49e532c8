"""The one table of frameworks: what the rest of Horovod knows of them without importing any.

The list of `horovodrun --check-build`, the columns of docs/frameworks.md, the frameworks that a job file may ask for,
which code is a library's and not the script's, and what counts as a model are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Framework:
    name: str  # for people
    module: str  # horovod.<module>
    packages: tuple[str, ...]  # its own, and those that are used with it; none of their code is a user's script
    models: tuple[tuple[str, str], ...] = ()  # base classes of its models: package and name
    extends: str = ""  # the name of the framework whose API it uses; "": it has one of its own
    has_build_line: bool = True  # in --check-build


FRAMEWORKS: Final = (
    Framework("PyTorch", "torch", ("torch",), (("torch", "Module"),)),
    Framework("TensorFlow", "tensorflow", ("tensorflow",)),
    Framework(
        "Keras", "keras", ("keras", "tf_keras"), (("keras", "Layer"), ("tf_keras", "Layer")), has_build_line=False
    ),
    Framework("JAX", "jax", ("jax", "optax"), (("flax", "Module"),)),
    Framework("MXNet", "mxnet", ("mxnet",), (("mxnet", "Block"), ("mxnet", "BaseModule"))),
    Framework("Lightning", "lightning", ("lightning", "pytorch_lightning"), extends="PyTorch"),
)
WITH_AN_API: Final = tuple(one for one in FRAMEWORKS if not one.extends)
PACKAGES: Final = frozenset(package for one in FRAMEWORKS for package in one.packages)
