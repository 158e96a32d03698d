"""Similarities: cosines between task gradients, with the names and steps they belong to.

`RUN/similarity.npz` holds those measured on an aligned set, for `numpy.load`: `tasks`, `steps`,
`about` (how they were measured), and for every granularity G `G.components`, and for every kind of
lines L `G.L.values`, `G.L.reliability`, and for different lines `G.L.across`, `G.L.half_norms`.
"""

# S steps, K components, T tasks

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.alignment import matrix_html
from gradvac.analysis.table import frame, pair_columns
from gradvac.engine.components import side_of
from gradvac.utils.files import open_arrays, replacing
from gradvac.utils.hints import some

Floats = NDArray[np.float32]

LINES = ("same", "different", "training")
_SMALL = re.compile(
    r"(?:^|[._])(?:(?:layer|rms|batch|group)?_?norms?\d*|bn\d*|ln(?:_?\d+|_\w+)?|bias)(?:[._]|$)",
    re.IGNORECASE,
)
_LAYER = re.compile(r"(?:^|[._])(?:layer|block|stage)?(\d+)(?=[._]|$)")
_OPTIONAL = ("reliability", "across", "half_norms")
_MOST_BYTES = 1 << 32  # unpacked; 400 steps of 40 components and 100 tasks in three granularities


@dataclass(frozen=True, eq=False)  # arrays have no single truth value: equal means identical
class Similarities:
    """Cosines of task gradients at some steps of one model.

    Attributes:
        tasks: Task names.
        components: Component names.
        steps: int64 `[S]`, the steps at which the model was measured.
        values: float32 `[S, K, T, T]`, cosines; NaN where a task was absent or had no gradient.
        reliability: `[S, K, T]`, cosine of a task's gradients on two halves of its batches; None
            for what was recorded in training.
        across: `[S, K, T, T]`, cosine of the first half of task i and the second of task j: on the
            diagonal the reliability, elsewhere two measurements of the same thing. The cosines
            without noise (`statistics.corrected`), and influence, follow from it.
        half_norms: `[S, K, 2, T]`, lengths of the gradients of both halves.
        lines: "same" or "different" lines of an aligned set, or "training".
        granularity: How parameters were divided into components.
    """

    tasks: tuple[str, ...]
    components: tuple[str, ...]
    steps: NDArray[np.int64]
    values: Floats
    reliability: Floats | None = None
    across: Floats | None = None
    half_norms: Floats | None = None
    lines: str = "same"
    granularity: str = "all_layer"

    def __post_init__(self) -> None:
        num_steps, num_components, num_tasks = self.shape
        expected = {
            "steps": (num_steps,),
            "values": (num_steps, num_components, num_tasks, num_tasks),
            "reliability": (num_steps, num_components, num_tasks),
            "across": (num_steps, num_components, num_tasks, num_tasks),
            "half_norms": (num_steps, num_components, 2, num_tasks),
        }
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ValueError(f"{name}: must have shape {shape}, got {array.shape}.")
        if self.lines not in LINES:
            raise ValueError(f"lines: must be one of {LINES}, got {self.lines!r}.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of steps, components and tasks."""
        return len(self.steps), len(self.components), len(self.tasks)

    def select(
        self,
        *,
        tasks: Sequence[str] | None = None,
        components: Sequence[str] | None = None,
        steps: Sequence[int] | None = None,
    ) -> "Similarities":
        """The part with these names and steps, in the order given; None: all."""
        t = _positions("tasks", tasks, self.tasks)
        k = _positions("components", components, self.components)
        s = _positions("steps", steps, tuple(self.steps.tolist()))

        def part(array: Floats | None, *last: Any) -> Floats | None:
            return None if array is None else array[np.ix_(s, k, *last)]

        values = part(self.values, t, t)
        assert values is not None
        return replace(
            self,
            tasks=tuple(self.tasks[i] for i in t),
            components=tuple(self.components[i] for i in k),
            steps=self.steps[s],
            values=values,
            reliability=part(self.reliability, t),
            across=part(self.across, t, t),
            half_norms=part(self.half_norms, [0, 1], t),
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame with step, component, task, other, cosine and reliability."""
        return frame(pair_columns(self))

    def _repr_html_(self) -> str:
        chosen = weighty(self.components)
        mean = mean_where_known(self.values[:, chosen], axis=(0, 1))
        num_steps, num_components, num_tasks = self.shape
        caption = (
            f"Mean cosines of {num_tasks} tasks over {num_components} components and {num_steps} "
            f"steps ({self.lines} lines)"
        )
        return matrix_html(mean.tolist(), self.tasks, caption.replace("training lines", "training"))


def mean_where_known(values: NDArray[np.floating], axis: int | tuple[int, ...]) -> Floats:
    """Mean over `axis` of all values that are not NaN; NaN if there are none."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis, dtype=np.float64)
    mean = np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)
    return np.asarray(mean, dtype=np.float32)


def concatenate(parts: Sequence[Similarities]) -> Similarities:
    """Join the steps, in order; a step that occurs again replaces the earlier one.

    Raises:
        ValueError: They are of different tasks, components or lines.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("tasks", "components", "lines", "granularity"):
            if getattr(part, name) != getattr(first, name):
                raise ValueError(
                    f"{name}: cannot put together similarities of {getattr(first, name)} and of "
                    f"{getattr(part, name)}."
                )
    steps = np.concatenate([part.steps for part in parts])
    last = {step: position for position, step in enumerate(steps.tolist())}
    order = [last[step] for step in sorted(last)]

    def joined(name: str) -> Floats | None:
        arrays = [getattr(part, name) for part in parts]
        if any(array is None for array in arrays):
            return None
        return np.asarray(np.concatenate(arrays)[order], dtype=np.float32)

    values = joined("values")
    assert values is not None
    return replace(
        first,
        steps=steps[order],
        values=values,
        reliability=joined("reliability"),
        across=joined("across"),
        half_norms=joined("half_norms"),
    )


def save_similarities(path: Path, measured: Sequence[Similarities], about: str = "") -> None:
    """Write measured similarities of the same tasks and steps, whole or not at all.

    Raises:
        ValueError: They are of different tasks or steps, or two are of the same granularity and
            lines.
    """
    first = measured[0]
    check_once("measured", [f"{one.granularity}, {one.lines} lines" for one in measured])
    arrays = {"tasks": np.array(first.tasks), "steps": first.steps, "about": np.array(about)}
    for one in measured:
        if one.tasks != first.tasks or not np.array_equal(one.steps, first.steps):
            raise ValueError("measured: must all be of the same tasks and steps.")
        arrays[f"{one.granularity}.components"] = np.array(one.components)
        for name in ("values", *_OPTIONAL):
            if getattr(one, name) is not None:
                arrays[f"{one.granularity}.{one.lines}.{name}"] = getattr(one, name)
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_similarities(path: Path) -> tuple[tuple[Similarities, ...], str]:
    """Read what `save_similarities` wrote: the similarities, and how they were measured.

    Raises:
        ValueError: The file is something else, or damaged.
    """
    content = path.read_bytes()
    try:
        arrays = _read_arrays(content)
        tasks, steps = tuple(arrays["tasks"].tolist()), arrays["steps"]
        measured = []
        for name in arrays:
            granularity, lines, what = [*name.rsplit(".", 2), "", ""][:3]
            if what != "values":
                continue
            prefix = f"{granularity}.{lines}"
            optional = {key: arrays.get(f"{prefix}.{key}") for key in _OPTIONAL}
            components = tuple(arrays[f"{granularity}.components"].tolist())
            measured.append(
                Similarities(
                    tasks,
                    components,
                    steps,
                    arrays[name],
                    lines=lines,
                    granularity=granularity,
                    **optional,
                )
            )
        return tuple(measured), str(arrays["about"])
    except Exception as error:  # damage makes zipfile, zlib and NumPy raise anything
        raise ValueError(
            f"{path}: holds no similarities, or is damaged ({error}); remove it and measure again."
        ) from error


def check_once(name: str, labels: Sequence[str]) -> None:
    """Refuse similarities with the same granularity and lines."""
    label, count = Counter(labels).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{name}: {label!r} occurs {count} times; give each granularity once, and functions "
            "names of their own (def, not lambda)."
        )


def _read_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    with open_arrays(content, _MOST_BYTES) as file:
        # Entries whose place in the archive's directory is damaged are passed over in silence.
        if len(file.files) != int.from_bytes(content[-12:-10], "little"):
            raise ValueError("arrays are missing")
        return {name: file[name] for name in file.files}


def _positions(
    name: str,
    wanted: Sequence[str] | Sequence[int] | None,
    available: tuple[str, ...] | tuple[int, ...],
) -> list[int]:
    if wanted is None:
        return list(range(len(available)))
    where = {value: position for position, value in enumerate(available)}
    missing = [value for value in wanted if value not in where]
    if missing:
        raise ValueError(f"{name}: there is no {missing[0]!r}; there are {some(available, 8)}.")
    return [where[value] for value in wanted]


def layer_of(component: str) -> int | None:
    """The number of the layer, the outermost one named; None for embeddings and the like."""
    number = _LAYER.search(component)
    return None if number is None else int(number[1])


def weighty(components: Sequence[str], side: str | None = None) -> list[bool]:
    """Which components count in the mean of a side (None: of the model).

    Components that are only normalisations or biases do not, if there is anything else: they hold
    few numbers, behave differently, and would count as much as a whole layer.
    """
    inside = [side is None or side_of(name) == side for name in components]
    large = [
        is_inside and not _SMALL.search(n) for is_inside, n in zip(inside, components, strict=True)
    ]
    return large if any(large) else inside
