"""Codes of the native engine: memory, devices, libraries."""

from .code import ErrorCode


class EngineCode(ErrorCode):
    """The engine, the operating system, a GPU or a library refused something."""

    INTERNAL = ("internal", "A fault of Horovod itself, or of the operating system. Please report it.")
