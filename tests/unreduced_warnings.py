"""What a rank is told of an optimizer that was never made distributed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from horovod.base.errors import TrainingCode

CODE = f"[{TrainingCode.NOT_DISTRIBUTED.value}]"


def told(work: Callable[[], object]) -> list[str]:
    """The warnings in `work`, each behind the file that it points to."""
    from horovod.common import unreduced

    unreduced.watch = unreduced.Watch()  # that of the process, in which other tests may have made a distributed one
    unreduced.world_begins()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [f"{one.filename}: {one.message}" for one in caught if CODE in str(one.message)]
