"""The sentence by which programs know that an elastic job was ended by its reset limit."""

from __future__ import annotations

from horovod.coordinator.core.elastic.decision import RESET_LIMIT_EXCEEDED_MESSAGE as RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
