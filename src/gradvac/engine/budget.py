"""How much may wait in memory during one backward: fewer calls against bytes."""

from dataclasses import dataclass

_LEAST_BYTES = 1 << 26  # may wait in any step
_SMALL_BYTES = 1 << 29  # up to which twice the share may: small steps wait for the host


@dataclass(slots=True)
class WaitingBudget:
    """Bytes of junctions that wait to be built together, and of components to be weighed together.

    More may wait as the pass frees what the forward saved.
    """

    limit: int
    stream_bytes: int | None = None  # of components, where the user asked for a number
    freed: float = 0.0  # by the pass so far, beyond what gradients of parameters take
    operands: int = 0  # of junctions that wait to be built
    gradients: int = 0  # task gradients of complete components, which wait to be weighed

    @classmethod
    def of_step(
        cls, operand_bytes: int, parameter_bytes: int, stream_bytes: int | None
    ) -> "WaitingBudget":
        """A small share of what such a step needs at least, whatever the engine.

        That is activations, parameters and their gradients.
        """
        share = (operand_bytes + 2 * parameter_bytes) >> 4
        return cls(max(_LEAST_BYTES, share, min(2 * share, _SMALL_BYTES)), stream_bytes)

    def operands_fit(self) -> bool:
        """Whether junctions may go on waiting, beside complete components."""
        return self.operands <= self.limit + max(0, self.freed - self.gradients)

    def gradients_fit(self) -> bool:
        """Whether complete components may go on waiting for each other, beside junctions."""
        if self.stream_bytes is not None:
            return self.gradients < self.stream_bytes
        return self.gradients + self.operands < self.limit + max(0, self.freed)

    def all_may_wait(self, operand_bytes: int, gradient_bytes: int) -> bool:
        """Whether all junctions and all components of a step may wait to its end."""
        most = self.limit if self.stream_bytes is None else self.stream_bytes
        return operand_bytes <= self.limit and gradient_bytes < most
