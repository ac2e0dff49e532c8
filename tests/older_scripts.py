"""Code for earlier versions, one piece for each rule of `horovodrun --check`, and what happens when it runs today.

test_check.py finds it; tests/extended/tensorflow/test_older_scripts.py runs it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Older(NamedTuple):
    """What `code` does at its line with the mark `#!`."""

    code: str
    raises: str = ""  # name of the exception; "": it acts otherwise, or fails only in a job


TF: Final = "import tensorflow as tf\nmodel = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])\n"
COMPILED: Final = TF + "model.compile('sgd', 'mse')\nx = y = __import__('numpy').zeros((2, 2))[:, :1] * [[0.0, 0.0]]\n"
TORCH: Final = "import torch\nimport torch.distributed as dist\nimport horovod.torch as hvd\nhvd.init()\n"

OLDER: Final = {
    "experimental_run_tf_function": Older(
        TF + "model.compile('sgd', 'mse', experimental_run_tf_function=False) #!", "TypeError"
    ),
    "compile arguments": Older(TF + "model.compile('sgd', 'mse', sample_weight_mode='temporal') #!", "TypeError"),
    "lr": Older("from keras.optimizers import Adam\nAdam(lr=0.1) #!", "ValueError"),
    "decay": Older("from tensorflow.keras import optimizers\noptimizers.SGD(0.1, decay=1e-3) #!"),
    "legacy optimizers": Older(TF + "tf.keras.optimizers.legacy.SGD(0.1) #!", "ImportError"),
    "generators": Older(COMPILED + "model.fit_generator([(x, y)]) #!", "AttributeError"),
    "classes": Older(COMPILED + "model.predict_classes(x) #!", "AttributeError"),
    "workers": Older(COMPILED + "model.fit(x, y, workers=2) #!", "TypeError"),
    "weights files": Older(TF + "model.save_weights('weights.h5') #!", "ValueError"),
    "checkpoint files": Older(TF + "tf.keras.callbacks.ModelCheckpoint('checkpoint-{epoch}') #!", "ValueError"),
    "save_format": Older(TF + "model.save('saved', save_format='tf') #!", "ValueError"),
    "sessions": Older("from tensorflow.keras import backend as K\nK.set_session(None) #!", "AttributeError"),
    "backend functions": Older("import keras.backend as K\nK.mean([1.0]) #!", "AttributeError"),
    "modules": Older("from keras.layers.core import Dense #!", "ImportError"),
    "layers": Older("from tensorflow.keras import layers\nlayers.CuDNNLSTM(2) #!", "AttributeError"),
    "fused": Older(TF + "tf.keras.layers.BatchNormalization(fused=True) #!", "ValueError"),
    "callback arguments": Older(TF + "tf.keras.callbacks.TensorBoard(batch_size=2) #!", "TypeError"),
    "experimental_aggregate_gradients": Older(
        TF + "model.compile('sgd', 'mse')\n"
        "model.optimizer.apply_gradients([], experimental_aggregate_gradients=False) #!",
        "TypeError",
    ),
    "mixed precision": Older(TF + "tf.keras.mixed_precision.experimental.set_policy('float16') #!", "AttributeError"),
    "TensorFlow 1": Older("import tensorflow as tf\ntf.ConfigProto() #!", "AttributeError"),
    "TensorFlow 1, gone": Older("import tensorflow.compat.v1 as tf\ntf.estimator.Estimator #!", "AttributeError"),
    "compat.v1 layers": Older("import tensorflow as tf\ntf.compat.v1.layers.dense #!", "AttributeError"),
    "communicators": Older(
        "import horovod.torch as hvd\nfrom mpi4py import MPI\nhvd.init(comm=MPI.COMM_WORLD) #!", "ValueError"
    ),
    "mpi_threads_supported": Older(TORCH + "assert hvd.mpi_threads_supported() #!", "ValueError"),
    "MPI of run": Older("import horovod\nhorovod.run(print, num_proc=1, use_mpi=True) #!", "ValueError"),
    "spawned workers": Older(
        "import torch\nimport horovod.torch as hvd\nhvd.init() #!\n"
        "loader = torch.utils.data.DataLoader(range(8), num_workers=1, multiprocessing_context='spawn')"
    ),
    "process groups": Older(TORCH + "dist.init_process_group('gloo') #!", "ValueError"),
    "DistributedSampler": Older(
        TORCH + "from torch.utils.data.distributed import DistributedSampler\nDistributedSampler(range(4)) #!",
        "ValueError",
    ),
    "ranks of torch.distributed": Older(TORCH + "dist.get_rank() #!", "ValueError"),
    "DistributedDataParallel": Older(
        TORCH + "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)) #!", "ValueError"
    ),
    "SyncBatchNorm": Older(TORCH + "torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Linear(2, 1)) #!"),
    "variables of mpirun": Older(
        "import os\nimport horovod.torch as hvd\nos.environ['OMPI_COMM_WORLD_RANK'] #!", "KeyError"
    ),
    "variables of torchrun": Older("import os\nimport horovod.torch as hvd\nos.environ['LOCAL_RANK'] #!", "KeyError"),
}
