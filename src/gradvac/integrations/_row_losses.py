"""Losses per row from a Hugging Face model's outputs, checked against the model's own loss."""

# B rows, S tokens, V vocabulary

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def sum_by_row(logits: Tensor, labels: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """Losses of rows, and how many labels they are sums over.

    Args:
        logits: `[B, S, V]` with labels `[B, S]`; or `[B, V]` with labels `[B]`, which are numbers
            of classes, or values for V = 1.
        labels: -100 is ignored.
        shifted: Whether token s is predicted from those before it (causal language models).

    Returns:
        `[B]` and `[B]`.

    Raises:
        ValueError: The shapes are none of these.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.dim() == 3 and labels.dim() == 2 and not labels.is_floating_point():
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        return losses.sum(1), (labels != IGNORED).sum(1)
    if logits.dim() == 2 and labels.dim() == 1:
        ones = torch.ones(len(labels), dtype=torch.int64, device=labels.device)
        if labels.is_floating_point() and logits.shape[1] == 1:
            return (logits[:, 0] - labels.to(logits.dtype)).square(), ones
        if not labels.is_floating_point() and logits.shape[1] > 1:
            losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
            return losses, (labels != IGNORED).long()
    raise ValueError(
        f"row_losses: cannot be guessed from logits {list(logits.shape)} and labels "
        f"{list(labels.shape)} ({labels.dtype}); give row_losses, a function of the model's "
        "outputs, the labels and num_items_in_batch that returns one loss per row."
    )


class Normaliser:
    """What a model divides the sum of its losses by, learned from the model itself.

    Some models divide by the labels of the whole step (`num_items_in_batch`), others by those of
    the micro-batch; their signatures do not say which. So a model is told of twice as many once,
    and its loss compared with the sum of rows.

    Attributes:
        is_known: Whether it has been learned; until then, the model's own loss is needed.
    """

    def __init__(self) -> None:
        self.is_known = self._by_items = False

    def told(self, num_items: Tensor | int) -> Tensor | int:
        """The labels of the whole step that a model is told of while it is not known."""
        return 2 * num_items

    def learn(
        self, sums: Tensor, counts: Tensor, num_items: Tensor | int | None, own_loss: Tensor
    ) -> None:
        """Compare with the model's own loss, unless there is nothing to compare.

        Args:
            sums: `[B]`.
            counts: `[B]`.
            num_items: Labels of the whole step; None if the trainer does not count them.
            own_loss: The model's loss of this micro-batch.

        Raises:
            ValueError: The model's loss is neither: rows would silently be weighted differently.
        """
        total, here = float(sums.detach().sum()), int(counts.sum())
        loss = float(own_loss.detach())
        if not (math.isfinite(loss) and total):
            return
        divisors = [here] if num_items is None else [here, int(self.told(num_items))]
        gaps = [abs(total / max(1, divisor) - loss) for divisor in divisors]
        is_half = own_loss.dtype in (torch.float16, torch.bfloat16)
        if min(gaps) > (1e-2 if is_half else 1e-4) * max(abs(loss), 1e-6):
            raise ValueError(
                f"row_losses: the model's loss is {loss:.6g}, but its rows give {total:.6g} over "
                f"{' or '.join(map(str, divisors))} labels; it computes another loss than cross-"
                "entropy or squared error. Give row_losses, one loss per row."
            )
        self.is_known, self._by_items = True, gaps[-1] < gaps[0]

    def divisor(self, counts: Tensor, num_items: Tensor | int | None) -> Tensor:
        """What the sums of rows are divided by to add up to the model's loss."""
        here = counts.sum()
        whole = torch.as_tensor(num_items, device=here.device) if self._by_items else here
        return whole.clamp_min(1)


def tensor_of(outputs: Any, name: str) -> Tensor:
    """The logits or the loss of a model's outputs."""
    found = outputs.get(name) if isinstance(outputs, dict) else None
    if not isinstance(found, Tensor):
        names = ", ".join(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise ValueError(f"row_losses: the model gives no {name} ({names}); give row_losses.")
    return found
