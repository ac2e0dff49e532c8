"""Message classes of a .proto file, made at import from its descriptor (docs/adr/0069).

What protoc generates for Python refuses any protobuf that is older than protoc itself. A descriptor is data, and
protobuf's own functions, which all of its versions from 3.20 on have for generated code, make the same classes of it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.internal import api_implementation, builder

T = TypeVar("T")


def add_file(module: dict[str, Any], serialized: bytes) -> None:
    """Puts the classes, enums and extensions of a file into `module`, the globals of a `*_pb2`.

    serialized: its FileDescriptorProto. The modules of the files that it imports have been imported.
    """
    file: Any = descriptor_pool.Default().AddSerializedFile(serialized)
    module["DESCRIPTOR"] = file
    builder.BuildMessageAndEnumDescriptors(file, module)
    builder.BuildTopDescriptorsAndMessages(file, module["__name__"], module)
    if api_implementation.Type() == "python":  # up to version 4 it learns of no extension by itself
        for extension in file.extensions_by_name.values():
            extended = extension.containing_type._concrete_class
            if hasattr(extended, "RegisterExtension"):
                extended.RegisterExtension(extension)


def known_options(options: T) -> T:
    """`descriptor.GetOptions()` with our own extensions: in pure Python it was read before they were known."""
    message: Any = options
    known: T = message.FromString(message.SerializeToString())
    return known
