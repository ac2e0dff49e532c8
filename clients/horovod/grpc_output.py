"""Imported before gRPC, which reads this variable then: what it says on stderr our own sentences say better.

By default it reports every connection that its other end has closed ("Got goaway"), and each fork. Who wants to see
that sets GRPC_VERBOSITY=INFO, which is left as it is.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
