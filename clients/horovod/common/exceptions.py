"""The exceptions of Horovod's API; importable without the native library.

RuntimeError
  HorovodInternalError         a collective failed: a peer died, ranks disagree, shutdown. Elastic jobs restore
  HostsUpdatedInterrupt        hosts came or went; raised by State.commit() and State.check_host_updates()
ImportError
  HorovodVersionMismatchError  a framework differs from the one that was built against
"""

from __future__ import annotations

from horovod.base.errors import ErrorCode, code_of


class HorovodInternalError(RuntimeError):
    """A collective operation failed; the text says which rank and host, and why. Elastic training restores from it.

    >>> try:
    ...     average = hvd.allreduce(tensor, name="loss")
    ... except hvd.HorovodInternalError as error:
    ...     print(error.code, error)
    """

    @property
    def code(self) -> ErrorCode | None:
        """The kind of fault: the word in brackets behind the sentence (docs/errors.md)."""
        return code_of(self)


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (the API's name)
    """The set of hosts has changed.

    skip_sync: true when hosts were only removed, so no state needs to be sent.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The installed version of a framework is not the one that Horovod was built for.

    name: the framework. version: the one that Horovod was built for. installed_version: the one that is there.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} is installed with version {installed_version}, but Horovod was built for version "
            f"{version}. Reinstall Horovod, or install the other version of {name}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
