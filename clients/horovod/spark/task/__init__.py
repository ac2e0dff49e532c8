"""For functions of `horovod.spark.run`: facts about the task in which they run."""

from __future__ import annotations

from horovod.base.settings import resolve

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark has given to this task, as Spark names them; [] if it gave none.

        >>> torch.cuda.set_device(int(get_available_devices()[0]))

    With HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1 it is always [], and hvd.local_rank() is the number of the GPU.
    """
    settings = resolve()
    return [] if settings.spark_use_local_rank_gpu_index else list(settings.spark_gpus or ())
