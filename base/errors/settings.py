"""Codes of settings: variables, options, keys of configuration files."""

from .code import ErrorCode


class SettingCode(ErrorCode):
    """A setting has a value that it can't have."""

    INVALID_SETTING = ("invalid-setting", "A variable, an option or a key has a value that it cannot have.")
    UNKNOWN_SETTING = ("unknown-setting", "There is no such setting. docs/settings.md lists all of them.")
    MISSING_SETTING = ("missing-setting", "Something needs a setting that is not given. The sentence names it.")
    CONFLICTING_SETTINGS = (
        "conflicting-settings",
        "Two settings are right one by one, but contradict each other. Leave one of them out.",
    )
    UNSUPPORTED = (
        "unsupported",
        "This version of Horovod, or what is installed here, can't do what a setting or an argument asks for.",
    )
    UNUSABLE_FILE = ("unusable-file", "A file that a setting names can't be read or written. Check name and rights.")
    INVALID_HOSTS = ("invalid-hosts", "A list or a file of hosts and slots is not written as it must be.")
    TOO_FEW_SLOTS = ("too-few-slots", "More processes are asked for than the hosts have slots.")
    LAUNCHER_VARIABLES = (
        "launcher-variables",
        "Variables of another launcher are incomplete or not for this process. HOROVOD_CLUSTER=none ignores them.",
    )
