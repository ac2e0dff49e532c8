"""The worlds that tests share."""

from torch_fixtures import pair, pair_keeper, world, world_keeper

__all__ = ["pair", "pair_keeper", "world", "world_keeper"]
