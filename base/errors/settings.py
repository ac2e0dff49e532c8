"""Codes of settings: variables, options, keys of configuration files."""

from .code import ErrorCode


class SettingCode(ErrorCode):
    """A setting has a value that it can't have."""

    INVALID_SETTING = ("invalid-setting", "A variable, an option or a key has a value that it cannot have.")
