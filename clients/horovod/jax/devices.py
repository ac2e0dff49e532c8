"""Whether an array is on a GPU, and its way through the host's memory where it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.base.errors import OperationCode, coded


def is_on_gpu(array: Any) -> bool:
    # Those of one array are all of one platform.
    return isinstance(array, jax.Array) and next(iter(array.sharding.device_set)).platform == "gpu"


def in_host_memory(array: Any) -> jax.Array:
    """The array, or a copy of it there. NumPy's arrays become JAX's."""
    if isinstance(array, jax.Array) and not is_on_gpu(array):
        return array
    return jax.device_put(array, cpu())


def placed_as(like: Any, result: jax.Array) -> jax.Array:
    """Copies `result` from the host memory to the device of `like`; to the default device if `like` is no JAX array.

    Arrays that are not committed to a device stay so: JAX moves them to others that are.
    """
    if isinstance(like, jax.Array):
        if not is_on_gpu(like):
            return result
        if like.committed:
            return jax.device_put(result, like.sharding)
    elif jax.default_backend() == "cpu":
        return result
    return jnp.asarray(np.asarray(result))


def cpu() -> jax.Device:
    """JAX's device for the host's memory. Raises ValueError, with what to do, where a setting has excluded it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            coded(
                OperationCode.UNSUPPORTED_DEVICE,
                f"This call goes through the host's memory, and JAX has no CPU here ({error}). Add it to "
                "JAX_PLATFORMS after the GPU's platform: JAX_PLATFORMS=cuda,cpu.",
            )
        ) from error
