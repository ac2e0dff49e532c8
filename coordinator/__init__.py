"""The coordinator: who is in a world, with which rank, and what its ranks have agreed to run.

`core` decides (pure), `store` remembers, `services` speak gRPC, `server` puts them together.
"""

# Both sides of the wire carry this number; a member that speaks another one is refused in words.
PROTOCOL_VERSION = 3

__all__ = ["PROTOCOL_VERSION"]
