"""What runs on the hosts that train: the host agent and the part of the runtime inside a training process."""

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC
