"""The pairwise sweep, and the order of its visits, as one Triton program per component and task.

In torch operations every visit is a dozen launches, and an order some forty; here a row keeps its
state in registers and walks through its visits alone. References: `pairwise_sweep_reference` and
`random_order` in `pairwise.py`.
"""

# K components, T tasks

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sweep_kernel(
    GRAM,
    TARGET,
    GOAL,
    ORDER,
    VACCINATED,
    COEFFICIENTS,
    OBSERVED,
    ACTIVE,
    T,
    CANCELLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    component, task = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, BLOCK)
    inside = others < T
    gram = GRAM + component * T * T
    own_row = component * T * T + task * T
    products = tl.load(gram + task * T + others, mask=inside, other=0.0)
    square = tl.maximum(tl.sum(tl.where(others == task, products, 0.0)), 0.0)
    smallest = square * CANCELLED * CANCELLED
    coefficients = tl.where(others == task, 1.0, 0.0).to(products.dtype)
    observed = tl.full([BLOCK], float("nan"), products.dtype)
    active = tl.zeros([BLOCK], tl.int8)
    vaccinated = tl.load(VACCINATED + task) != 0
    for visit in range(T - 1):
        other = tl.load(ORDER + (component * T + task) * (T - 1) + visit)
        row = tl.load(gram + other * T + others, mask=inside, other=0.0)
        dot = tl.sum(tl.where(others == other, products, 0.0))
        their_square = tl.maximum(tl.sum(tl.where(others == other, row, 0.0)), 0.0)
        own, theirs = tl.sqrt(tl.maximum(square, 0.0)), tl.sqrt(their_square)
        alive = (square > smallest) & (theirs > 0) & vaccinated
        phi = tl.where(alive, dot / tl.where(alive, own * theirs, 1.0), 0.0)
        phi = tl.minimum(tl.maximum(phi, -1.0), 1.0)
        goal = tl.load(GOAL + own_row + other)
        sine = tl.sqrt(1.0 - goal * goal)
        below = alive & (phi < tl.load(TARGET + own_row + other))
        step = own * (goal * tl.sqrt(1.0 - phi * phi) - phi * sine)
        step = tl.where(below, step / tl.where(below, theirs * sine, 1.0), 0.0)
        coefficients += tl.where(others == other, step, 0.0)
        square += step * (2.0 * dot + step * their_square)
        products += step * row
        observed = tl.where((others == other) & alive, phi, observed)
        active = tl.where((others == other) & below, 1, active)
    tl.store(COEFFICIENTS + own_row + others, coefficients, mask=inside)
    tl.store(OBSERVED + own_row + others, observed, mask=inside)
    tl.store(ACTIVE + own_row + others, active, mask=inside)


def pairwise_sweep_triton(
    gram: Tensor,
    target: Tensor,
    goal: Tensor,
    order: Tensor,
    vaccinated: Tensor,
    cancelled: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pairwise_sweep` on CUDA in one launch; `goal` is the target kept away from 1."""
    num_components, num_tasks, _ = gram.shape
    coefficients, observed = torch.empty_like(gram), torch.empty_like(gram)
    active = torch.empty_like(gram, dtype=torch.int8)
    _sweep_kernel[(num_components, num_tasks)](
        gram.contiguous(),
        target.contiguous(),
        goal.contiguous(),
        order.contiguous(),
        vaccinated.to(torch.int8),
        coefficients,
        observed,
        active,
        num_tasks,
        CANCELLED=cancelled,
        BLOCK=triton.next_power_of_2(num_tasks),
        num_warps=1,
    )
    return coefficients, observed, active.bool()


@triton.jit
def _mixed(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """As `_mix` in `pairwise.py`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _order_kernel(
    STEP,
    COMPONENTS,
    TASKS,
    ORDER,
    SEED,
    T,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    component, task = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, BLOCK)
    inside = others < T
    start = _mixed(tl.load(STEP) * GOLDEN + SEED, FIRST, SECOND)
    start = _mixed(tl.load(COMPONENTS + component) + start, FIRST, SECOND)
    start = _mixed(start + tl.load(TASKS + task), FIRST, SECOND)
    keys = _mixed(start + tl.load(TASKS + others, mask=inside, other=0), FIRST, SECOND)
    visited = inside & (others != task)
    before = (keys[None, :] < keys[:, None]) & visited[None, :]
    place = tl.sum(before.to(tl.int32), 1)
    row = ORDER + (component * T + task) * (T - 1)
    tl.store(row + place, others.to(tl.int64), mask=visited)


def random_order_triton(
    seed: int, step: Tensor, components: Tensor, tasks: Tensor, constants: tuple[int, int, int]
) -> Tensor | None:
    """`random_order` in one launch; None for more than 128 tasks."""
    num_tasks = len(tasks)
    if num_tasks > 128:
        return None
    order = tasks.new_empty(len(components), num_tasks, num_tasks - 1)
    golden, first, second = constants
    _order_kernel[(len(components), num_tasks)](
        *(step, components, tasks, order, seed, num_tasks),
        GOLDEN=golden,
        FIRST=first,
        SECOND=second,
        BLOCK=max(2, triton.next_power_of_2(num_tasks)),
    )
    return order
