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
    the micro-batch; their signatures do not say which. So the model's own loss is compared with
    the sum of rows until it is clear which of the two it is.
    """

    def __init__(self) -> None:
        self._by_items: bool | None = None
        self._is_verified = False

    def needs_own_loss(self, num_batches: int) -> bool:
        """Whether the model's own loss is needed, in a step of this many micro-batches."""
        return not self._is_verified or (self._by_items is None and num_batches > 1)

    def factor(
        self, sums: Tensor, counts: Tensor, num_items: Tensor | int | None, own_loss: Tensor | None
    ) -> Tensor:
        """The factor by which sums of rows are multiplied to add up to the model's loss.

        Args:
            sums: `[B]`.
            counts: `[B]`.
            num_items: Labels of the whole step; None if the trainer does not count them.
            own_loss: The model's loss of this micro-batch; None once it is not needed.

        Raises:
            ValueError: The model's loss is neither: rows would silently be weighted differently.
        """
        here = counts.sum()
        whole = here if num_items is None else torch.as_tensor(num_items, device=here.device)
        by_items = self._by_items
        if own_loss is not None:
            by_items = self._learn(float(sums.detach().sum()), int(here), int(whole), own_loss)
        divisor = whole if by_items else here
        return 1.0 / divisor.clamp_min(1).to(sums.dtype)

    def _learn(self, total: float, here: int, whole: int, own_loss: Tensor) -> bool:
        loss = float(own_loss)
        gaps = [abs(total / max(1, count) - loss) for count in (here, whole)]
        is_half = own_loss.dtype in (torch.float16, torch.bfloat16)
        slack = (1e-2 if is_half else 1e-4) * max(abs(loss), 1e-6)
        if math.isfinite(loss) and min(gaps) > slack and total:
            raise ValueError(
                f"row_losses: the model's loss is {loss:.6g}, but its rows give {total:.6g} over "
                f"{here} labels ({whole} in the whole step); it computes another loss than cross-"
                "entropy or squared error. Give row_losses, one loss per row."
            )
        by_items = gaps[1] < gaps[0]
        if math.isfinite(loss) and total:
            self._is_verified = True
            if max(gaps) > slack:  # else both are the same here: ask again
                self._by_items = by_items
        return by_items


def logits_of(outputs: Any) -> Tensor:
    """The logits of a model's outputs."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else None
    if not isinstance(logits, Tensor):
        names = ", ".join(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise ValueError(f"row_losses: the model gives no logits ({names}); give row_losses.")
    return logits
