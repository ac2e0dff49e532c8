"""Codes of launchers: hosts, commands, ssh, functions that run on other hosts."""

from .code import ErrorCode


class LaunchCode(ErrorCode):
    """A launcher can't start, or the processes that it started failed."""

    UNKNOWN_HOST = ("unknown-host", "A host has no address, or does not answer. Check the name and the network.")
