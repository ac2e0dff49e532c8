"""Codes of what frameworks add: optimizers, gradients, states, callbacks."""

from .code import ErrorCode


class TrainingCode(ErrorCode):
    """A call of a framework's binding is wrong, or comes at a wrong time."""

    NOT_INITIALIZED = ("not-initialized", "Call hvd.init() before this function.")
