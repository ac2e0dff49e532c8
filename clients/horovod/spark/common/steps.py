"""How many steps an epoch has, and how many rows each has: pure arithmetic that every rank does alike.

Ranks differ by one row at most, so all have the same number of batches, but for one case: the rows of some fill their
last batch exactly, and the others have a row more. Then the former repeat a row that counts nothing. In the last step
of an epoch ranks may have unlike numbers of rows; `scale` makes the average of their gradients that of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """An epoch over `total` rows on `size` ranks.

    >>> epoch = Epoch(total=11, size=2, batch_size=3)
    >>> epoch.steps, [epoch.rows(rank, step) for rank in (0, 1) for step in (0, 1)]
    (2, [3, 2, 3, 3])
    """

    total: int
    size: int
    batch_size: int

    @property
    def steps(self) -> int:
        """So many that each row is used once."""
        return -(-self.total // (self.size * self.batch_size))

    def rows(self, rank: int, step: int) -> int:
        """Rows in the batch of a rank; 0 where it has none left."""
        own = self.total * (rank + 1) // self.size - self.total * rank // self.size
        return max(min(self.batch_size, own - step * self.batch_size), 0)

    def scale(self, rank: int, step: int) -> float:
        """What the mean loss of a rank is multiplied by, so that the mean over ranks is the mean over rows."""
        if step < self.steps - 1:
            return 1.0
        everywhere = sum(self.rows(one, step) for one in range(self.size))
        return self.rows(rank, step) * self.size / everywhere

    @property
    def even(self) -> bool:
        """Whether the scale is 1 on all ranks in all steps."""
        return self.total % self.size == 0
