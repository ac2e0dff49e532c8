"""The coordinator: who is in a world, with which rank, and what its ranks have agreed to run.

`core` decides (pure), `store` remembers, `services` speak gRPC, `parts` makes them of a `config`, `server` opens and
closes them.
"""

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC
