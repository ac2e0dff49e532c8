"""The codes of all errors, by family, and how a sentence carries one."""

from .access import AccessCode
from .cluster import ClusterCode
from .code import ErrorCode, code_of, coded, coded_like, without_code
from .data import DataCode
from .engine import EngineCode
from .launch import LaunchCode
from .operations import OperationCode
from .settings import SettingCode
from .training import TrainingCode
from .worlds import STATE_LOST_EXIT, WorldCode

FAMILIES: tuple[type[ErrorCode], ...] = (
    OperationCode,
    TrainingCode,
    DataCode,
    WorldCode,
    AccessCode,
    SettingCode,
    LaunchCode,
    ClusterCode,
    EngineCode,
)

__all__ = [
    "FAMILIES",
    "STATE_LOST_EXIT",
    "AccessCode",
    "ClusterCode",
    "DataCode",
    "EngineCode",
    "ErrorCode",
    "LaunchCode",
    "OperationCode",
    "SettingCode",
    "TrainingCode",
    "WorldCode",
    "code_of",
    "coded",
    "coded_like",
    "without_code",
]
