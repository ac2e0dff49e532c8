"""Settings on their way from a driver to processes that something else places for it: actors of Ray, tasks of Spark.

Such a process inherits the environment of whoever has started Ray or Spark on its host. That may have been a rank of
another job, whose variables say nothing about this one (`of_another`): the driver's settings come in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from horovod.base.errors import SettingCode, coded
from horovod.base.settings import ROWS, SETTINGS, variables
from horovod.base.tls import unnamed_file

# Variables by which launchers tell a process its place.
_OF_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")

# Settings of the driver that are not for the processes of its jobs: its own place in a world, and other coordinators.
_NOT_PASSED_ON = {
    *(setting.env for setting in SETTINGS if setting.launcher),
    *(
        ROWS[name].env
        for name in (
            *("coordinator", "token", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_server_name"),
            *("size", "min_size", "max_size"),
        )
    ),
}
_FOR_COORDINATORS = {ROWS[name].env for name in ("job", "web_listen", "web_token_file")}  # and not for workers


def of_driver(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in the driver's environment that are for the processes or the coordinators of its jobs."""
    return {
        name: value for name, value in environ.items() if name.startswith("HOROVOD_") and name not in _NOT_PASSED_ON
    }


def job_environment(
    environ: Mapping[str, str], extra: Mapping[str, object], timeout_s: float, nics: Sequence[str] = ()
) -> dict[str, str]:
    """What the driver says to all processes of a job. environ: of the driver. extra: variables that the user adds."""
    found = variables(start_timeout_seconds=timeout_s)
    if nics:
        found |= variables(network_interfaces=tuple(nics))
    found |= {name: value for name, value in of_driver(environ).items() if name not in _FOR_COORDINATORS}
    return found | checked_variables(extra)


def checked_variables(given: Mapping[str, object]) -> dict[str, str]:
    """The variables that a user adds, as text. ValueError for what no process can be started with."""
    found = {name: str(value) for name, value in given.items()}
    for name, value in found.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            sentence = f'{name!r} can\'t name a variable: a name is text that is not empty, without "=" and zero bytes.'
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
        if "\0" in value:
            sentence = f"The value of the variable {name} holds a zero byte, which no variable can."
            raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
    return found


def of_another(environ: Iterable[str]) -> list[str]:
    """The names of the variables in which another launcher may have told its own processes something."""
    return [name for name in environ if name.startswith(_OF_LAUNCHERS)]


def trusting(certificate: str, server_name: str | None) -> tuple[dict[str, str], tuple[int, ...]]:
    """The variables by which a process knows the driver's coordinator, and the descriptors that it must inherit.

    certificate: in PEM; "": without TLS. It lies in a file that has no name, since no file with one would be removed
    when the process is killed.
    """
    if not certificate:
        return {}, ()
    descriptor, path = unnamed_file(certificate.encode())
    return variables(tls_ca=path, tls_server_name=server_name), (descriptor,)
