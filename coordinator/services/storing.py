"""A write that is made again until the store has it, for members and for agents.

Who decides for a job or for the cluster writes under a guard. So a write that is not in the store yet is either made
again or void: it is void once this coordinator does not decide any more, as it knows by itself or as the store says.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from horovod.coordinator.store import FencedError, Guard, StoreError, TooLargeError

STORE_RETRY_S = 0.5  # seconds between attempts while the store may answer by itself again

Written = TypeVar("Written")


async def until_stored(
    write: Callable[[Guard], Awaitable[Written]],
    guard: Callable[[], Guard | None],
    fenced: Callable[[Guard], None],
    failed: Callable[[StoreError, bool], Awaitable[None]],
) -> Written | None:
    """What `write` returned in the end; None if the write is void.

    guard: asked before each attempt; None: this coordinator decides no more. fenced: the store says so of this guard.
    failed: called when an attempt was in vain, and whether its sentence is new; the next one begins when it returns.

    Raises TooLargeError, which another attempt would not change, and what `failed` raises.
    """
    told: set[str] = set()
    while (held := guard()) is not None:
        try:
            return await write(held)
        except FencedError:
            fenced(held)
            return None
        except TooLargeError:
            raise
        except StoreError as error:
            is_news = str(error) not in told
            told.add(str(error))
            await failed(error, is_news)
    return None
