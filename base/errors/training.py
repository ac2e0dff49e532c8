"""Codes of what frameworks add: optimizers, gradients, states, callbacks."""

from .code import ErrorCode


class TrainingCode(ErrorCode):
    """A call of a framework's binding is wrong, or comes at a wrong time."""

    NOT_INITIALIZED = ("not-initialized", "Call hvd.init() before this function.")
    UNCOPYABLE_STATE = (
        "uncopyable-state",
        "An attribute of an elastic state can't be copied, and so not saved. Keep what can be copied, as a state_dict.",
    )
