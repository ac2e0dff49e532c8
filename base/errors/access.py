"""Codes of who may speak to whom: tokens, certificates, TLS, secrets."""

from .code import ErrorCode


class AccessCode(ErrorCode):
    """A process is refused, or refuses its peer."""

    WRONG_TOKEN = ("wrong-token", "The tokens of the two sides differ. Give both the same file (HOROVOD_TOKEN_FILE).")
    UNUSABLE_TOKEN = ("unusable-token", "A file of a token can't be read, or holds no token: one line of ASCII text.")
    WEAK_TOKEN = ("weak-token", "A token is so short that it could be found by trying. Use `openssl rand -hex 32`.")
    NOT_PRIVATE = ("not-private", "Other users could have written a file that must be its owner's alone. Remove it.")
    OTHER_USER = (
        "other-user",
        "Another user's process listens where this one looks for its coordinator. Choose another port, or use TLS.",
    )
    UNPROVEN = (
        "token-not-proven",
        "What answers in place of rank 0 does not know the token of this process. Give all ranks the same token.",
    )
    UNKNOWN_OWNER = ("unknown-owner", "It can't be told whose process listens on an address. Use TLS.")
    UNUSABLE_CERTIFICATE = (
        "unusable-certificate",
        "A file of a certificate, of its key or of an authority can't be read or used, or does not fit the other one.",
    )
    UNTRUSTED_CERTIFICATE = (
        "untrusted-certificate",
        "The other side's certificate has expired, is for another name, or no authority that is known has signed it.",
    )
    REFUSED_CERTIFICATE = (
        "refused-certificate",
        "The other side asks for a certificate, or does not take the one that it was shown.",
    )
    TLS_ON_ONE_SIDE = ("tls-on-one-side", "One side speaks TLS and the other one does not. Set HOROVOD_TLS_CA or not.")
    TLS_HANDSHAKE = ("tls-handshake", "A TLS handshake failed. Check the files of both sides.")
    OTHER_JOB = (
        "token-of-another-job",
        "The token of one job admits to that job alone. Show the token of the right job, or that of the cluster.",
    )
    EXPOSED = (
        "exposed",
        "Strangers on other hosts could use a port. Ask for a token or certificates, or accept the risk (--insecure).",
    )
    OTHER_HOST_NAME = (
        "other-host-name",
        "A request for pages on loopback names another host, as one of a foreign web page does. Use localhost.",
    )
    TOKEN_NOT_KEPT = (
        "token-not-kept",
        "A coordinator can't leave its token where processes of its user look for it. Give both a token file.",
    )
