"""Writes the Python modules of the .proto files: `generate.py DESCRIPTOR_SET FOLDER`, run by csrc/protos.cmake.

For each file of the set that is ours there is a module with its descriptor (`*_pb2.py`), and
one with its services, where it has any (`*_pb2_grpc.py`). They hold no code but calls of protos/python.
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, ServiceDescriptorProto

PREFIX = "horovod/protos/"


def main(descriptor_set: Path, folder: Path) -> None:
    files = FileDescriptorSet.FromString(descriptor_set.read_bytes()).file
    homes = {f".{file.package}.{message.name}": file.name for file in files for message in file.message_type}
    for file in files:
        if file.name.startswith(PREFIX):
            write(folder / f"{_stem(file.name)}_pb2.py", messages(file))
            if file.service:
                write(folder / f"{_stem(file.name)}_pb2_grpc.py", services(file, homes))


def messages(file: FileDescriptorProto) -> str:
    lines = [f"import {_module(name)}  # noqa: F401" for name in file.dependency]
    lines += ["from horovod.protos.messages import add_file", "", f"add_file(globals(), {file.SerializeToString()!r})"]
    return _text(file, lines)


def services(file: FileDescriptorProto, homes: dict[str, str]) -> str:
    """homes: the file of each message, which a method names with a dot before its package."""
    used = {
        homes[name]
        for service in file.service
        for call in service.method
        for name in (call.input_type, call.output_type)
    }
    lines = [f"import {_module(name)}" for name in sorted(used)]
    lines.append("from horovod.protos.services import adder, servicer, stub")
    for service in file.service:
        lines += ["", *_service(file, service, homes)]
    return _text(file, lines)


def _service(file: FileDescriptorProto, service: ServiceDescriptorProto, homes: dict[str, str]) -> list[str]:
    name = f"{file.package}.{service.name}"
    rows = []
    for call in service.method:
        arity = "_".join("stream" if many else "unary" for many in (call.client_streaming, call.server_streaming))
        request, response = (
            f"{_module(homes[kind])}.{kind.rpartition('.')[2]}" for kind in (call.input_type, call.output_type)
        )
        rows.append(f'    "{call.name}": ("{arity}", {request}, {response}),')
    methods = f"_{service.name.upper()}"
    return [
        f"{methods} = {{",
        *rows,
        "}",
        f'{service.name}Stub = stub("{name}", {methods})',
        f'{service.name}Servicer = servicer("{name}", {methods})',
        f'add_{service.name}Servicer_to_server = adder("{name}", {methods})',
    ]


def _text(file: FileDescriptorProto, lines: list[str]) -> str:
    return "\n".join([f'"""Made from {file.name.removeprefix("horovod/")} by protos/generate.py."""', "", *lines, ""])


def _module(name: str) -> str:
    return f"{_stem(name)}_pb2".replace("/", ".")


def _stem(name: str) -> str:
    return name.removesuffix(".proto")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
