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
    ORDER,
    VACCINATED,
    CHOSEN,
    PRESENT,
    COEFFICIENTS,
    OBSERVED,
    ACTIVE,
    HELD,
    NEXT,
    FINITE,
    CONSTANTS,  # as tensors: numbers would come in float32
    gram_stride,  # from component to component
    row_stride,
    T,
    NUM_TASKS,  # present or not
    BLOCK: tl.constexpr,
):
    beta, cancelled = tl.load(CONSTANTS), tl.load(CONSTANTS + 1)
    largest = tl.load(CONSTANTS + 2)
    component, task = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, BLOCK)
    inside = others < T
    gram = GRAM + component * gram_stride
    chosen = tl.load(CHOSEN + component)
    places = chosen * NUM_TASKS * NUM_TASKS + tl.load(PRESENT + task) * NUM_TASKS
    places += tl.load(PRESENT + others, mask=inside, other=0)
    targets = tl.load(TARGET + places, mask=inside, other=0.0)
    limits = tl.minimum(targets, largest)
    goals = tl.maximum(limits, -largest)
    products = tl.load(gram + task * row_stride + others, mask=inside, other=0.0)
    unusable = 0
    for number in range(T):
        row = tl.load(gram + number * row_stride + others, mask=inside, other=0.0)
        unusable += tl.sum(tl.where(tl.abs(row) < float("inf"), 0, 1))
    if unusable > 0:
        tl.store(FINITE, 0)
    square = tl.maximum(tl.sum(tl.where(others == task, products, 0.0)), 0.0)
    smallest = square * cancelled * cancelled
    coefficients = tl.where(others == task, 1.0, 0.0).to(products.dtype)
    observed = tl.full([BLOCK], float("nan"), products.dtype)
    active = tl.zeros([BLOCK], tl.int8)
    vaccinated = (tl.load(VACCINATED + tl.load(PRESENT + task)) != 0) & (unusable == 0)
    visits = ORDER + (chosen * T + task) * (T - 1)
    for visit in range(T - 1):
        other = tl.load(visits + visit)
        row = tl.load(gram + other * row_stride + others, mask=inside, other=0.0)
        dot = tl.sum(tl.where(others == other, products, 0.0))
        their_square = tl.maximum(tl.sum(tl.where(others == other, row, 0.0)), 0.0)
        own, theirs = tl.sqrt(tl.maximum(square, 0.0)), tl.sqrt(their_square)
        alive = (square > smallest) & (theirs > 0) & vaccinated
        phi = tl.where(alive, dot / tl.where(alive, own * theirs, 1.0), 0.0)
        phi = tl.minimum(tl.maximum(phi, -1.0), 1.0)
        goal = tl.sum(tl.where(others == other, goals, 0.0))
        limit = tl.sum(tl.where(others == other, limits, 0.0))
        sine = tl.sqrt(1.0 - goal * goal)
        below = alive & (phi < limit)
        step = own * (goal * tl.sqrt(1.0 - phi * phi) - phi * sine)
        step = tl.where(below, step / tl.where(below, theirs * sine, 1.0), 0.0)
        coefficients += tl.where(others == other, step, 0.0)
        square += step * (2.0 * dot + step * their_square)
        products += step * row
        observed = tl.where((others == other) & alive, phi, observed)
        active = tl.where((others == other) & below, 1, active)
    out = component * T * T + task * T + others
    tl.store(COEFFICIENTS + out, coefficients, mask=inside)
    tl.store(OBSERVED + out, observed, mask=inside)
    tl.store(ACTIVE + out, active, mask=inside)
    tl.store(HELD + out, targets, mask=inside)
    was_seen = inside & (observed == observed)
    tl.store(NEXT + places, (1.0 - beta) * targets + beta * observed, mask=was_seen)


def pairwise_sweep_triton(
    gram: Tensor,
    target: Tensor,
    order: Tensor,
    vaccinated: Tensor,
    chosen: Tensor,
    present: Tensor,
    finite: Tensor,
    following: Tensor,
    constants: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`pairwise_sweep` on CUDA in one launch, from the targets of all components and tasks.

    Args:
        gram: `[K, T, T]`; a component that is not finite is left as it is.
        target: Of all components and tasks.
        order: Of all components, `[..., T, T - 1]`.
        vaccinated: bool, of all tasks.
        chosen: The components, `[K]`.
        present: The tasks, `[T]`.
        finite: A bool that is cleared if some component is not finite.
        following: The moving averages of all components and tasks, to be written where a pair was
            seen; `target` itself if there are none.
        constants: The weight of new values in moving averages, the share below which gradients have
            cancelled, and the largest target.

    Returns:
        What `pairwise_sweep` does, and the targets, `[K, T, T]` each.
    """
    gram = gram if gram.stride(2) == 1 else gram.contiguous()
    num_tasks, shape = len(present), tuple(gram.shape)
    found, active = gram.new_empty(3, *shape), gram.new_empty(shape, dtype=torch.bool)
    coefficients, observed, held = found.unbind()
    _sweep_kernel[(len(gram), num_tasks)](
        *(gram, target, order.contiguous(), vaccinated.view(torch.int8), chosen, present),
        *(coefficients, observed, active.view(torch.int8), held, following),
        *(finite.view(torch.int8), constants),
        *(gram.stride(0), gram.stride(1), num_tasks, target.shape[-1]),
        BLOCK=triton.next_power_of_2(num_tasks),
        num_warps=1,
    )
    return coefficients, observed, active, held


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
