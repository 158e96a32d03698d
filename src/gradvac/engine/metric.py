"""In which units task gradients are compared: as they are, or as Adam will scale them."""

# T tasks, P entries of a parameter

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradvac.engine.kernels import wide

Metric = Callable[[nn.Parameter, Tensor], Tensor]
"""A parameter and its task gradients [T, P] -> the same as Gram matrices shall see them."""


class AdamMetric:
    """Compares task gradients after Adam's preconditioning.

    Adam divides every entry of an update by the root of its second moment. Lengths and similarities
    that a rule sees are by default those before that; with this metric, those after it. Second
    moments are those that the joint gradient would leave, before clipping, so that
    an entry which is used for the first time weighs no more than others. The update itself remains
    a weighted sum of the gradients, which Adam then scales.

    Args:
        optimizer: `torch.optim.Adam` or `AdamW` of the model's parameters, without `amsgrad`.

    Examples:
        >>> import torch
        >>> from gradvac import AdamMetric, Aligner
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> aligner = Aligner(model, ["fr", "hi"], metric=AdamMetric(optimizer))
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"optimizer: must be torch.optim.Adam or AdamW, got {type(optimizer).__name__}."
            )
        if any(group["amsgrad"] for group in optimizer.param_groups):
            raise ValueError(
                "optimizer: with amsgrad=True it scales by other moments; leave it out."
            )
        self._optimizer = optimizer
        groups = enumerate(optimizer.param_groups)
        self._group_of = {p: number for number, group in groups for p in group["params"]}

    def __call__(self, parameter: nn.Parameter, gradients: Tensor) -> Tensor:
        """Task gradients `[T, P]` of a parameter, divided as Adam would divide them."""
        number = self._group_of.get(parameter)
        if number is None:
            raise ValueError("metric: the optimizer lacks a parameter of the model; give it all.")
        group = self._optimizer.param_groups[number]  # another one after a state was loaded
        state = self._optimizer.state.get(parameter)
        if not state and gradients.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the optimizer has no moments yet, which would be recorded for ever")
        beta, total = group["betas"][1], gradients.sum(0, dtype=wide(gradients.dtype))
        moment, step = (1 - beta) * total.square(), torch.ones((), device=total.device)
        if state:
            moment = moment + beta * state["exp_avg_sq"].reshape(-1)
            step = state["step"].to(total.device) + 1
        moment = moment / (1 - beta ** step.double())
        seen: Tensor = gradients / (moment.sqrt() + group["eps"])
        return seen

    def __repr__(self) -> str:
        return f"AdamMetric({type(self._optimizer).__name__})"
