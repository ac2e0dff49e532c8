"""Codes of who may speak to whom: tokens, certificates, TLS, secrets."""

from .code import ErrorCode


class AccessCode(ErrorCode):
    """A process is refused, or refuses its peer."""

    WRONG_TOKEN = ("wrong-token", "The tokens of the two sides differ. Give both the same file (HOROVOD_TOKEN_FILE).")
