"""What each of two ranks runs with an installed wheel: `horovodrun -np 2 python smoke_job.py FRAMEWORK...`.

A step or a sum with exact numbers for each framework. It is a file by itself: nothing of the checkout is on its path.
"""

from __future__ import annotations

import ctypes
import struct
import sys


def no_framework() -> str:
    """Objects, and sums of each width by the kernels for this processor, without NumPy."""
    import horovod.common.basics as hvd
    from horovod._core import DType, OpType, isa
    from horovod.common.ops.objects import allgather_object
    from horovod.common.ops.specs import reduction
    from horovod.worker.runtime.context import current

    hvd.init()
    assert allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]
    kinds = {"FLOAT16": "e", "FLOAT32": "f", "FLOAT64": "d", "INT8": "b", "INT32": "i", "INT64": "q"}
    for name, letter in kinds.items():
        count = 1037  # whole vectors of every width, and a rest
        mine = bytearray(struct.pack(f"{count}{letter}", *((hvd.rank() + n) % 30 for n in range(count))))
        summed = bytearray(len(mine))
        places = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (mine, summed)]
        spec = reduction(OpType.ALLREDUCE, hvd.Sum, 1.0, 1.0, 0)
        current().engine.run(spec, f"allreduce.{name}", ((*places, DType[name], (count,)),), (mine, summed))
        expected = [sum((rank + n) % 30 for rank in range(hvd.size())) for n in range(count)]
        assert list(struct.unpack(f"{count}{letter}", summed)) == expected, name
    return f"kernels {isa()}"


def torch() -> str:
    import torch

    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((4, 3), float(hvd.rank() + step))).sum().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    # An error of the engine's C++, beside PyTorch's, which is built with another library.
    said = ""
    try:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="unequal")
    except Exception as error:
        said = str(error)
    assert "unequal" in said
    return torch.__version__


def tensorflow() -> str:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()

    @tf.function
    def summed(value: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(value, op=hvd.Sum)

    assert summed(tf.fill([5], float(hvd.rank() + 1))).numpy().tolist() == [3.0] * 5
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable * float(hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(tape)
    assert tape.gradient(loss, [variable])[0].numpy() == 1.5
    return str(tf.__version__)


def keras() -> str:
    import keras
    import numpy as np

    import horovod.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    x = np.full((8, 3), 1.0 + hvd.rank())
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    first, second = hvd.allgather_object(model.get_weights()[0].tolist())
    assert first == second
    return str(keras.__version__)


def jax() -> str:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    hvd.init()
    assert hvd.allreduce(jnp.full(5, hvd.rank() + 1.0), op=hvd.Sum).tolist() == [3.0] * 5
    compiled = jax.jit(lambda value: hvd.allreduce(value, op=hvd.Sum, name="compiled"))
    assert compiled(jnp.full(5, hvd.rank() + 1.0)).tolist() == [3.0] * 5
    return str(jax.__version__)


def mxnet() -> str:
    import mxnet as mx

    import horovod.mxnet as hvd

    hvd.init()
    summed = hvd.allreduce(mx.nd.full((5,), hvd.rank() + 1.0), average=False)
    assert summed.asnumpy().tolist() == [3.0] * 5
    return str(mx.__version__)


def lightning() -> str:
    import lightning

    import horovod.lightning

    assert horovod.lightning.HorovodStrategy
    return str(lightning.__version__)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print(f"SMOKE {one}: {globals()[one]()}", flush=True)
