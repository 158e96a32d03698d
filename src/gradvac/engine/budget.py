"""What may wait in memory during one backward: fewer calls against bytes."""

from dataclasses import dataclass


@dataclass(slots=True)
class WaitingBudget:
    """Bytes of junctions that wait to be built together, and of components to be weighed together.

    More may wait as the pass frees what the forward saved.
    """

    limit: int
    freed: int = 0  # by the pass so far
    operands: int = 0  # of junctions that wait to be built, beyond what is freed by building them
    gradients: int = 0  # task gradients of complete components, which wait to be weighed

    def operands_fit(self) -> bool:
        """Whether junctions may go on waiting, beside complete components."""
        return self.operands <= self.limit + max(0, self.freed - self.gradients)

    def fits(self, gradient_bytes: int) -> bool:
        """Whether components of so many bytes may wait for each other."""
        return gradient_bytes < self.limit + self.freed
