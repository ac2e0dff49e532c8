"""How many members a world of a job may have: read from the requests of those who join it."""

from dataclasses import dataclass

from horovod.base.words import plural
from horovod.protos.v1 import membership_pb2 as pb


@dataclass(frozen=True)
class Sizes:
    """Of a job of fixed size, both numbers are equal and is_elastic is false."""

    fewest: int
    most: int
    is_elastic: bool

    def __str__(self) -> str:
        """`4 members`, `2 to 8 members`."""
        return plural(self.most, "member") if self.fewest == self.most else f"{self.fewest} to {self.most} members"


def sizes_of(request: pb.JoinRequest) -> Sizes:
    if request.HasField("sizes"):
        return Sizes(request.sizes.fewest, request.sizes.most, is_elastic=True)
    return Sizes(request.size, request.size, is_elastic=False)


def sizes_of_world(world: pb.World) -> Sizes:
    if world.HasField("sizes"):
        return Sizes(world.sizes.fewest, world.sizes.most, is_elastic=True)
    return Sizes(len(world.members), len(world.members), is_elastic=False)
