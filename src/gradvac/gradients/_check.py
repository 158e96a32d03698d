"""The self-check of one_backward, on the first batch a parameter takes part in.

Separating gradients by the rows of activations is right only if no row influences another and if
every module has the batch where we think it is. Neither can be read off a model, but it can be
measured: the gradient of sum_t c_t loss_t with random c, taken by plain autograd, must equal
sum_t c_t g_t of the task gradients the engine formed. One extra pass each, once.
"""

import torch
from torch import nn

from gradvac.gradients._batch import Batch
from gradvac.gradients._ledger import Chunked, Dense
from gradvac.gradients._one_backward import OneBackward

# Largest relative error of a parameter, and the share of its component's gradient below which a
# parameter's own is rounding noise (the bias of attention keys has gradient zero).
_TOLERANCE = {torch.float64: (1e-5, 1e-7), torch.float32: (2e-3, 1e-4)}  # models cast to float32
_TOLERANCE_OF_16_BITS = (1e-1, 2e-2)


def find_mismatches(engine: OneBackward, batch: Batch, model: nn.Module) -> list[str] | None:
    """Names of parameters whose task gradients are wrong.

    None if the batch cannot tell: it is not finite, or has a single task, which shows only whether
    its gradient arrives.
    """
    alone = len(batch.present) == 1
    if alone and engine.checked_alone:
        return None
    engine.checked_alone = alone
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(batch.present), generator=generator, dtype=torch.float64)
    found = engine.plain_gradients(batch, weights, list(names))
    expected = {p: g for p, g in zip(names, found, strict=True) if g is not None}
    lowest = _lowest_precision(model)
    errors: dict[nn.Parameter, float] = {}

    def look(parameter: nn.Parameter, buffer: Dense | Chunked) -> None:
        nonlocal lowest
        if isinstance(buffer, Dense):
            lowest = min(lowest, buffer.gradients.dtype, key=lambda d: torch.finfo(d).bits)
        formed = buffer.combine(weights.to(parameter.device)).view(parameter.shape)
        difference = formed.double() - expected.get(parameter, torch.zeros_like(formed)).double()
        errors[parameter] = float(difference.norm())

    engine.inspect(batch, look)
    sizes = {p: float(g.double().norm()) for p, g in expected.items()}
    if not all(map(_is_finite, [*errors.values(), *sizes.values()])):
        return None
    relative, noise = _TOLERANCE.get(lowest, _TOLERANCE_OF_16_BITS)
    rounding = 4 * torch.finfo(lowest).eps * sum(size**2 for size in sizes.values()) ** 0.5
    wrong = []
    for own in engine.ledger.members:
        scale = sum(sizes.get(p, 0.0) ** 2 for p in own) ** 0.5
        for p in own:
            error = errors.get(p, sizes.get(p, 0.0))  # not delivered at all: its whole gradient
            if error > relative * sizes.get(p, 0.0) + noise * scale + rounding:
                wrong.append(names[p])
    return wrong or (None if alone else [])


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _lowest_precision(model: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
