"""The codes of all errors, by family, and how a sentence carries one."""

from .code import ErrorCode, code_of, coded, coded_like, without_code
from .jobs import STATE_LOST_EXIT, AccessCode, ClusterCode, LaunchCode, SettingCode, WorldCode
from .scripts import DataCode, EngineCode, OperationCode, TrainingCode

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
