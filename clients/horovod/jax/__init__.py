"""Horovod for JAX:

>>> import horovod.jax as hvd
>>> hvd.init()
>>> params = hvd.broadcast_parameters(params, root_rank=0)
>>> optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
>>> opt_state = optimizer.init(params)

Everything public is a name of this module. All of it works outside of compiled functions, and the collectives of arrays
work under jax.jit and its like as well.
"""

from typing import TYPE_CHECKING

try:
    from jax import typeof  # noqa: F401  (the youngest name that this needs)
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.jax needs JAX, which is not installed ({error}). Install it with: pip install 'horovod[jax]'"
    ) from error
except ImportError as error:
    raise ImportError(
        f"horovod.jax needs a newer JAX than the installed one ({error}). Install it with: pip install "
        "--upgrade 'horovod[jax]'"
    ) from error

from horovod import _core  # noqa: F401  (a missing native engine must fail here, not in hvd.init)
from horovod.common import names as _names
from horovod.common import signatures as _signatures
from horovod.common.basics import is_homogeneous as is_homogeneous
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.names import *  # noqa: F403
from horovod.common.ops import faces as _faces
from horovod.jax import derivatives as _derivatives  # noqa: F401  (the rules of the primitive)
from horovod.jax import elastic as elastic
from horovod.jax import functions as _functions
from horovod.jax import reductions as _reductions
from horovod.jax import rows as _rows
from horovod.jax.compression import Compression as Compression
from horovod.jax.functions import *  # noqa: F403
from horovod.jax.functions import shutdown as shutdown  # in place of the shared one
from horovod.jax.reductions import *  # noqa: F403
from horovod.jax.rows import *  # noqa: F403
from horovod.jax.training import DistributedOptimizer as DistributedOptimizer
from horovod.jax.training import grad as grad
from horovod.jax.training import value_and_grad as value_and_grad

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*_names.__all__, *_functions.__all__, *_reductions.__all__, *_rows.__all__]  # noqa: PLE0604
    __all__ += ["Compression", "DistributedOptimizer", "HorovodInternalError", "elastic", "grad", "is_homogeneous"]
    __all__ += ["value_and_grad"]

_faces.complete(_faces.JAX, globals())
_signatures.name_reductions(globals())
