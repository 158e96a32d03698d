"""[optimizer]: Adam, the learning rate by step, clipping, and steps that can be skipped."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor, nn

from gradvac.lab.training.config import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
_DECAY_SHARE = 0.2


class OptimizerConfig(Section):
    """Adam with decoupled weight decay (AdamW; at 0, the default, it is Adam).

    Attributes:
        lr: Peak learning rate.
        warmup_steps: Steps of linear warm-up to the peak.
        schedule: After warm-up: "inverse_sqrt" falls with 1 / sqrt(step), "linear" and "cosine"
            fall to 0 at `train.max_steps`, "wsd" (warm-up, stable, decay) stays, and falls linearly
            to 0 in the last `decay_share` of all steps, "constant" stays.
        decay_share: wsd: Part of all steps in which it falls.
        betas: Decay of the two moments.
        eps: Adam's epsilon.
        weight_decay: Decoupled; matrices only (not biases, norms and other vectors).
        clip_norm: Largest norm of the whole update; 0: no clipping.
        accumulation: Micro-batches per step.
    """

    lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 4000
    schedule: Literal["inverse_sqrt", "linear", "cosine", "wsd", "constant"] = "inverse_sqrt"
    decay_share: float = Field(default=_DECAY_SHARE, gt=0, le=1)
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    eps: PositiveFloat = 1e-9
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 1.0
    accumulation: PositiveInt = 1

    @model_validator(mode="after")
    def _share_of_something(self) -> "OptimizerConfig":
        if self.schedule != "wsd" and self.decay_share != _DECAY_SHARE:
            raise ValueError(f'decay_share: is of schedule "wsd", but this is {self.schedule!r}')
        return self

    def lr_at(self, step: int, *, max_steps: int) -> float:
        """The learning rate of an optimizer step, counted from 0."""
        count = step + 1
        if count <= self.warmup_steps:
            return self.lr * count / self.warmup_steps
        if self.schedule == "inverse_sqrt":
            return self.lr * math.sqrt(max(1, self.warmup_steps) / count)
        if self.schedule == "constant":
            return self.lr
        # The first step after warm-up has the peak, the one after the last would have 0.
        left = max(0, max_steps - step)
        falling = max_steps - self.warmup_steps
        if self.schedule == "cosine":
            return self.lr * (1 - math.cos(math.pi * left / falling)) / 2
        if self.schedule == "wsd":
            falling = min(falling, math.ceil(self.decay_share * max_steps))
        return self.lr * min(1.0, left / falling)

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """The optimizer of a model's trainable parameters."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        # fused: the only implementation that takes `found_inf`, so it can skip without waiting.
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )
        move_to_device(optimizer)
        return optimizer


def move_to_device(optimizer: torch.optim.Optimizer) -> None:
    """Adapt an optimizer to its device, even if its state was saved on another.

    On a GPU the learning rate is a tensor, because a recorded step reads it from a fixed address.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["capturable"] = device.type == "cuda"
        lr = float(group["lr"])
        group["lr"] = torch.tensor(lr, device=device) if device.type == "cuda" else lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to `max_norm` (0: leave them), and return their norm before that."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all shards
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    total_norm: Tensor = norm
    return total_norm


def step_unless(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Take a step, unless `bad`; parameters, moments and step counts then stay as they are.

    Args:
        optimizer: Built with `fused=True`.
        bad: A bool scalar. On a GPU there is no synchronisation: the kernel itself looks at it, as
            it does under a `GradScaler`.
    """
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    optimizer.step()
