"""Measurement: cosines of task gradients on given batches, for any PyTorch model.

    model.eval()
    batches = {"fr": [lambda b=b: loss(model, b) for b in french], "hi": [...]}
    measured = measure(model, batches, "all_layer")
    same = measured.same["all_layer"]
    print(same.tasks, same.values[0].mean(0))                        # [T, T]

Raw cosines measure noise as much as tasks: with few sentences all are near 0. So every task's
batches are split into two halves A and B (even and odd numbers), and three things are measured.
The *reliability* of a task is the cosine of its own halves, r_i = cos(A_i, B_i). On the *same*
lines, the cosine of full gradients is cos(A_i + B_i, A_j + B_j). On *different* lines it is the
mean of cos(A_i, B_j) and cos(B_i, A_j), so what the lines have in common (in an aligned set, their
content) does not count. The cosines and lengths of both halves are kept, so that
`statistics.corrected` can estimate the cosine with unlimited data, with an interval, and
`statistics.measured_influence` how tasks influence each other.

Memory: the gradients of all tasks' halves, 2 T P numbers (in `storage_dtype`; on the host with
`offload=True`), besides the model and one batch; and those of the largest parameter once more, on
its device, while products are computed. 25 tasks and 60 M parameters in float32: 12 GB.
"""

# K components, T tasks, P parameters, B rows

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.analysis.similarities import Similarities, check_once
from gradvac.engine import (
    AccumulatedGradients,
    Granularity,
    LocalEngine,
    Losses,
    TasksOfRows,
    gram,
    read_losses,
    split,
)

Loss = Callable[[], Tensor]
"""Runs a batch of one task and returns its scalar loss, summed, not averaged, over its tokens."""

Rows = Callable[[], tuple[Tensor, TasksOfRows]]
"""Runs a batch of several tasks and returns one loss per row, `[B]`, and the rows' tasks."""

Batches = Mapping[str, Sequence[Loss]] | Sequence[Rows]


@dataclass(frozen=True, eq=False)
class Measured:
    """What `measure` found: similarities at one step, by the name of their granularity.

    Attributes:
        same: On the same lines.
        different: On different lines, with what `statistics.corrected` and
            `statistics.measured_influence` need.
    """

    same: Mapping[str, Similarities]
    different: Mapping[str, Similarities]

    @property
    def parts(self) -> tuple[Similarities, ...]:
        """All of them: of every granularity those on the same lines, then on different lines."""
        return tuple(lines[name] for name in self.same for lines in (self.same, self.different))


def measure(
    model: nn.Module,
    batches: Batches,
    granularity: Granularity | Sequence[Granularity] = "all_layer",
    *,
    tasks: Sequence[str] | None = None,
    step: int = 0,
    engine: str = "per_task",
    storage_dtype: torch.dtype | None = None,
    offload: bool = False,
    tick: Callable[[], None] | None = None,
) -> Measured:
    """Cosines between the gradients of tasks, on the same and on different lines.

    `.grad` and the model's mode stay as they are; in training mode dropout blurs the gradients.

    Args:
        model: Any model.
        batches: Task -> at least two functions, each of which returns the loss of one batch; the
            gradients of a task's batches are added up. In an aligned set, the n-th batches of all
            tasks should hold the same lines. Or at least two functions that return losses per row
            and the rows' tasks; then name the tasks.
        granularity: Which parameters share a component; several at once cost nothing extra.
        tasks: Task names, for losses per row.
        step: The training step, to be stored with the result.
        engine: "per_task" for any model, or "one_backward", which separates losses per row.
        storage_dtype: Of stored task gradients; None: that of the parameters.
        offload: Store them in host memory.
        tick: Called after every batch, for example to move a progress bar.

    Returns:
        The similarities on the same lines and those on different lines, by granularity.

    Raises:
        ValueError: There are fewer than two tasks, or than two batches of a task; they are not in
            lists; or a task or the name of a granularity occurs twice.
    """
    tasks = _read_tasks(batches, tasks)
    granularities = _read_granularities(granularity)
    components = [split(model, one) for one in granularities]
    stored = AccumulatedGradients(storage_dtype=storage_dtype, offload=offload)
    if engine not in ("per_task", "one_backward"):
        raise ValueError(f'engine: must be "per_task" or "one_backward", got {engine!r}.')
    engines = LocalEngine(engine, model, split(model, "all_layer"), tasks)

    def add(half: int, losses: Losses) -> None:
        def deliver(parameter: nn.Parameter, by_task: Mapping[int, Tensor]) -> None:
            first = half * len(tasks)  # all tasks of the first half, then of the second
            stored.add(parameter, {first + task: g for task, g in by_task.items()})

        engines.task_gradients(losses, deliver)

    _run(batches, tasks, add, tick)
    grams = _grams(stored, model, 2 * len(tasks))
    same, different = {}, {}
    for one, members in zip(granularities, components, strict=True):
        # Inner products are additive over parameters: a component's is the sum of its parameters'.
        summed = [torch.stack([grams[p] for p in names]).sum(0) for names in members.values()]
        label = _name(one)
        same[label], different[label] = _compare(
            torch.stack(summed), tasks, tuple(members), step, label
        )
    return Measured(same, different)


def _grams(stored: AccumulatedGradients, model: nn.Module, num_rows: int) -> dict[str, Tensor]:
    """Inner products of all halves by parameter, `[2T, 2T]`, on the host; frees what is stored."""
    grams = {}
    for name, parameter in model.named_parameters():
        stacked = stored.take_stack(parameter, range(num_rows))
        empty = torch.zeros(num_rows, num_rows, dtype=torch.float64)
        grams[name] = empty if stacked is None else gram(stacked).cpu().double()
    return grams


def _run(
    batches: Batches,
    tasks: tuple[str, ...],
    add: Callable[[int, Losses], None],
    tick: Callable[[], None] | None,
) -> None:
    """Give every batch to `add`, with the number of its half."""
    tick = tick or (lambda: None)
    if isinstance(batches, Mapping):
        for task, functions in batches.items():
            for number, run in enumerate(functions):
                add(number % 2, read_losses({task: run()}, None, tasks))
                tick()
        return
    for number, run_rows in enumerate(batches):
        add(number % 2, read_losses(*run_rows(), tasks))
        tick()


def _compare(
    grams: Tensor, tasks: tuple[str, ...], components: tuple[str, ...], step: int, granularity: str
) -> tuple[Similarities, Similarities]:
    """Similarities on the same and on different lines, from `[K, 2T, 2T]`: halves A, then B."""
    num = len(tasks)
    both_halves = grams.unflatten(1, (2, num)).unflatten(3, (2, num)).sum((1, 3))  # [K, T, T]
    across = geometry.known_cosine(grams)[:, :num, num:]  # [i, j]: cos(A_i, B_j)
    reliability = across.diagonal(dim1=1, dim2=2)  # [K, T]
    half_norms = geometry.norms(grams).unflatten(1, (2, num))  # [K, 2, T]
    same, different, agreement, crossed, norms = (
        one.float().numpy()[None]
        for one in (
            geometry.known_cosine(both_halves),
            (across + across.mT) / 2,
            reliability,
            across,
            half_norms,
        )
    )
    steps = np.array([step], dtype=np.int64)
    made = partial(Similarities, tasks, components, steps, granularity=granularity)
    return (
        made(same, agreement, lines="same"),
        made(different, agreement, crossed, norms, lines="different"),
    )


def _read_tasks(batches: Batches, tasks: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(batches, Mapping):
        if tasks is not None and set(tasks) != set(batches):
            raise ValueError(
                f"tasks: are {list(tasks)}, but batches are of {list(batches)}; leave tasks out."
            )
        names = tuple(tasks or batches)
        for task in names:
            _check_sized(f"batches of {task!r}", batches[task])
        few = [task for task in names if len(batches[task]) < 2]
        if few:
            raise ValueError(
                f"batches: task {few[0]!r} has {len(batches[few[0]])}; give at least two, whose "
                "comparison shows how reliable its gradient is."
            )
    else:
        names = tuple(tasks or ())
        if tasks is None:
            raise ValueError("tasks: name the tasks of the rows.")
        _check_sized("batches", batches)
        if len(batches) < 2:
            raise ValueError(f"batches: give at least two, got {len(batches)}.")
    if len(names) < 2:
        raise ValueError(f"batches: similarity is between tasks; got {len(names)}, give two.")
    task, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ValueError(f"tasks: {task!r} comes {count} times; name every task once.")
    return names


def _check_sized(name: str, batches: object) -> None:
    if not isinstance(batches, Sized):
        raise ValueError(
            f"{name}: must be a list of functions, got a {type(batches).__name__}; of a generator, "
            "give list(...)."
        )


def _read_granularities(
    granularity: Granularity | Sequence[Granularity],
) -> tuple[Granularity, ...]:
    if isinstance(granularity, str) or callable(granularity):
        return (granularity,)
    if not granularity:
        raise ValueError("granularity: is empty; give at least one.")
    check_once("granularity", [_name(one) for one in granularity])
    return tuple(granularity)


def _name(granularity: Granularity) -> str:
    if isinstance(granularity, str):
        return granularity
    return getattr(granularity, "__name__", "custom")
