"""Codes of the native engine: memory, devices, libraries."""

from .code import ErrorCode


class EngineCode(ErrorCode):
    """The engine, the operating system, a GPU or a library refused something."""

    INTERNAL = ("internal", "A fault of Horovod itself, or of the operating system. Please report it.")
    TOO_MANY_OPEN_FILES = (
        "too-many-open-files",
        "This process or its host has too many open files. Raise the limit that the sentence names.",
    )
    TIMELINE = ("timeline", "The file of the timeline can't be written, or is not complete. See its disk and its path.")
    FORKED_CHILD = (
        "forked-child",
        "A child that was forked can't use its parent's world. Start it anew, or call init().",
    )
