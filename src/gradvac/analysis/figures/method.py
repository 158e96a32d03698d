"""Figure 5: PCGrad and GradVac in the plane, drawn by the rules themselves."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from gradvac.analysis.figures.style import INKS, QUIET, new_figure
from gradvac.rules import GradVac, PCGrad, Rule

Vector = NDArray[np.float64]

_TARGET = 0.7  # similarity that GradVac asks for in the drawing
_CASES = (("negative similarity", 120.0), ("positive similarity", 70.0))
_LENGTHS = (1.0, 1.15)
_ALTERED = "g\u2032_i"  # an apostrophe would take a font that browsers do not have, and show 0


def draw_method() -> dict[str, Figure]:
    """Figure 5: a negative and a positive similarity, PCGrad on the left, GradVac on the right."""
    figure = new_figure(5.2, 3.8)
    rows = figure.subplots(2, 2, sharex=True, sharey=True)
    for panels, (case, degrees) in zip(rows, _CASES, strict=True):
        angle = np.deg2rad(degrees)
        first = _LENGTHS[0] * np.array([np.cos(angle), np.sin(angle)])
        second = np.array([_LENGTHS[1], 0.0])
        rules: Sequence[tuple[str, Rule]] = (
            ("PCGrad", PCGrad(vaccinated=["i"])),
            ("GradVac", GradVac(target=_TARGET, vaccinated=["i"])),
        )
        for axes, (name, rule) in zip(panels, rules, strict=True):
            _draw(axes, first, second, altered(rule, first, second))
            axes.set_title(f"{name}, {case}", loc="left")
    return {"": figure}


def altered(rule: Rule, first: Vector, second: Vector) -> Vector:
    """What a rule that alters only the first of two gradients makes of it.

    The update is g'_1 + g_2, and it is the weighted sum of the gradients that the rule says.
    """
    gradients = torch.tensor(np.stack([first, second]))  # [T=2, 2]
    rule.bind(["i", "j"], ["plane"])
    rule.start_step([0, 1], torch.zeros(2, dtype=torch.float64))
    weights = rule.weigh([0], (gradients @ gradients.T)[None]).weights[0]
    update = weights.to(gradients.dtype) @ gradients
    changed: Vector = (update - gradients[1]).numpy()
    return changed


def _draw(axes: Axes, first: Vector, second: Vector, changed: Vector) -> None:
    idle = np.allclose(first, changed)
    _arrow(axes, second, QUIET, "$g_j$", (4, -11))
    _arrow(axes, first, INKS[0], "$g_i$", (-14, 4))
    if idle:
        axes.text(
            first[0] + 0.08,
            first[1] - 0.04,
            f"${_ALTERED} = g_i$: idle",
            color=INKS[0],
            parse_math=True,
        )
    else:
        axes.plot(*zip(first, changed, strict=True), ":", color=QUIET, linewidth=1.2)
        _arrow(axes, changed, INKS[1], f"${_ALTERED}$", (4, 4))
    _arc(axes, first, 0.3, INKS[0], beyond=True)
    if not idle:
        _arc(axes, changed, 0.46, INKS[1], beyond=False)
    axes.set_aspect("equal")
    axes.set_xlim(-0.75, 1.45)
    axes.set_ylim(-0.22, 1.12)
    axes.set_axis_off()


def _arrow(axes: Axes, vector: Vector, color: str, name: str, offset: tuple[int, int]) -> None:
    look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    end = (float(vector[0]), float(vector[1]))
    axes.annotate("", end, (0, 0), arrowprops=look)
    text = axes.annotate(name, end, offset, textcoords="offset points", color=color, fontsize=11)
    text.set_parse_math(True)


def _arc(axes: Axes, vector: Vector, radius: float, color: str, *, beyond: bool) -> None:
    """The angle to g_j, which lies on the axis, with its cosine beyond or within it."""
    end = float(np.arctan2(vector[1], vector[0]))
    angles = np.linspace(0, end, 60)
    axes.plot(radius * np.cos(angles), radius * np.sin(angles), color=color, linewidth=1)
    cosine = np.cos(end)
    angle = end + 0.4 if beyond else 0.4 * end
    x, y = (radius + 0.14) * np.cos(angle), (radius + 0.14) * np.sin(angle)
    axes.text(x, y, f"{cosine:z.2f}", color=color, fontsize=8, ha="center", va="center")
