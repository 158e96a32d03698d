"""The pictures of these pages, drawn from the published numbers by `write_results.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradvac.analysis.figures.style import INKS, STYLE, name_points, new_figure

Row = Mapping[str, Any]

_TEXT = "#7a7f85"  # to be read on white and on black
_PAPER, _PAPERS = "#c2185b", " (diamonds: the paper's)"
_NARROW = 3.9  # inches, of the pictures beside the findings
_BLEU = "difference of BLEU"
_FAMILIES = "cosine within families minus between"
MANY = {
    "many_temperature5/many_temperature1": "Temperature 5 against 1",
    "many_temperature2/many_temperature5": "Temperature 2 against 5",
    "many_gradvac/many_temperature5": "GradVac against temperature 5",
    "many_norm/many_temperature5": "Control: the sum, as long as GradVac's update",
    "many_direction/many_temperature5": "Control: GradVac's update, as long as the sum",
    "many_frozen/many_temperature5": "Control: GradVac's mean weights",
    "many_length/many_temperature5": "GradVac, gradients as long as before",
    "many_without_noise/many_temperature5": "GradVac without the noise of batches",
    "many_gradvac/many_norm": "GradVac against the sum, as long",
    "many_gradvac/many_frozen": "GradVac against its mean weights",
    "many_direction/many_gradvac": "GradVac, as long as the sum, against GradVac",
}
_ONE = {
    "gradvac": "GradVac, 12 seeds",
    "long_gradvac": "... twice the steps",
    "full_gradvac": "... full length",
    "into_english_gradvac": "... into English",
}
_TWO = {
    "many_gradvac": "GradVac",
    "many_norm": "plain sum, GradVac's lengths",
    "many_direction": "GradVac, lengths of the sum",
    "many_frozen": "GradVac's mean weights",
}
_THREE = {
    "temperature2": "short runs, 12 seeds",
    "long_temperature2": "twice the steps",
    "full-temperature=2.0": "full length",
    "into_english_temperature2": "into English",
    "many_temperature2": "19 languages",
}
_FOUR = (
    *("verses, into English", "verses, from English", "news, into English"),
    *("news, from English", "constructed, into", "constructed, from"),
)
_ACTIVE = {
    "pcgrad": "PCGrad, whole model",
    "pcgrad_layers": "PCGrad by layer",
    "gradvac": "GradVac by layer",
    "gradvac_model": "... one target for the model",
    "gradvac_fixed": "... fixed target 0.5",
    "into_english_pcgrad_layers": "Into English: PCGrad by layer",
    "into_english_gradvac": "... GradVac by layer",
    "many_gradvac": "19 languages: GradVac by layer",
}
_FRONT = (
    *("joint", "temperature1", "temperature2", "temperature3", "unimax", "gradvac"),
    *("gradvac_model", "gradvac_fixed", "gradvac_fixed_length", "temperature2_gradvac"),
)
_RUNS = {
    "both_directions": "verses, both directions in one model",
    "from_english": "verses",
    "into_english": "verses",
    "news-directions=any-to-en": "news",
    "news-directions=en-to-any": "news",
    "quarter_batches": "verses, a quarter of the batch",
    "tiny": "verses, tiny model",
    "directions=any-to-en": "constructed",
    "directions=en-to-any": "constructed",
}


def forest(rows: Sequence[Row], *, label: str, width: float = 6.2) -> Figure:
    """Differences with their intervals: filled if clear, coloured if 0 is outside.

    Rows that are no differences (`is_plain`) are neither.
    """
    with mpl.rc_context(dict(STYLE)):
        figure = new_figure(width, 0.62 + 0.2 * len(rows))
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=_TEXT, linewidth=0.8)
        for height, row in enumerate(rows):
            change, low, high = row["difference"]
            is_shown = low > 0 or high < 0
            ink = (INKS[0] if change > 0 else INKS[1]) if is_shown else _TEXT
            is_clear = row.get("outlived_correction") and row.get("primary")
            if row.get("is_plain"):
                ink, is_clear = _TEXT, True
            filled = "full" if is_shown and is_clear else "none"
            axes.plot([low, high], [height] * 2, color=ink, linewidth=1.6)
            axes.plot(change, height, "o", color=ink, markersize=4.5, fillstyle=filled)
            if "paper" in row:
                axes.plot(row["paper"], height, "D", color=_PAPER, markersize=3.5)
                if width > _NARROW:  # beside narrow ones the text says it
                    label = f"{label.removesuffix(_PAPERS)}{_PAPERS}"
        axes.set_yticks(range(len(rows)), [row["said"] for row in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        reach = max(map(abs, axes.get_xlim()))
        if any(row["difference"][1] < 0 for row in rows):
            axes.set_xlim(-reach, reach)
        else:
            axes.set_xlim(0, reach)
        axes.set_xlabel(label, fontsize=8, loc="right" if width > _NARROW else "center")
        axes.tick_params(colors=_TEXT, labelsize=8)
        axes.xaxis.label.set_color(_TEXT)
    return figure


def front(published: Row) -> Figure:
    """High- against low-resource tasks: mixtures of joint training, and GradVac's variants."""
    points = {
        name: [published["methods"][name]["levels"][level] for level in ("high", "low")]
        for name in _FRONT
    }
    with mpl.rc_context(dict(STYLE)):
        figure = new_figure(6.2, 4.6)
        axes = figure.add_subplot()
        inks = [INKS[0] if "gradvac" in name else _TEXT for name in points]
        for ((x, x_reach), (y, y_reach)), ink in zip(points.values(), inks, strict=True):
            axes.errorbar(x, y, xerr=x_reach, yerr=y_reach, color=ink, linewidth=0.7, alpha=0.4)
            axes.plot(x, y, "o", color=ink, markersize=5)
        axes.set_xlim(8.5, 16.5)
        axes.set_ylim(1, 9)
        means = [(x[0], y[0]) for x, y in points.values()]
        name_points(figure, list(points), means, inks)
        axes.set_xlabel("BLEU, French and Czech (21k and 31k pairs)", color=_TEXT)
        axes.set_ylabel("BLEU, Hindi and Turkish (3,000 pairs each)", color=_TEXT)
        axes.tick_params(colors=_TEXT)
    return figure


def families(cosines: Sequence[Row], **names: str) -> Figure:
    """Cosines within families and between, of every kind of run; some by other names."""
    with mpl.rc_context(dict(STYLE)):
        figure = new_figure(6.2, 0.8 + 0.2 * len(cosines))
        axes = figure.add_subplot()
        for height, row in enumerate(cosines):
            pair = row["between"], row["within"]
            axes.plot(pair, [height] * 2, color=_TEXT, linewidth=1.2, zorder=1)
            axes.plot(row["between"], height, "o", color=INKS[1], markersize=5, label="between")
            axes.plot(row["within"], height, "o", color=INKS[0], markersize=5, label="within")
        _name_rows(axes, [_name(row, _RUNS | names) for row in cosines])
        axes.set_xlim(0, max(row["within"] for row in cosines) * 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel("mean cosine of two languages", color=_TEXT, fontsize=8)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[:2], labels[:2], loc="outside upper right", ncols=2, labelcolor=_TEXT)
    return figure


def _name(row: Row, names: Mapping[str, str]) -> str:
    return f"{names[row['runs']]}, {row['tasks'].split(' ', 1)[1]}, {row['side']}"


def active(updates: Mapping[str, Row]) -> Figure:
    """How many pairs rules alter, and how far that turns the update."""
    with mpl.rc_context(dict(STYLE)):
        figure = new_figure(6.2, 2.5)
        left, right = figure.subplots(1, 2, sharey=True)
        own = [updates[name] for name in _ACTIVE]
        shares = [100 * row["altered"] for row in own]
        degrees = [math.degrees(math.acos(row["cosine"])) for row in own]
        for axes, values, label in (
            (left, shares, "pairs altered, %"),
            (right, degrees, "the update is turned by, degrees"),
        ):
            axes.barh(range(len(own)), values, color=INKS[0], height=0.6)
            axes.set_xlabel(label, color=_TEXT, fontsize=8)
            axes.tick_params(colors=_TEXT, labelsize=8)
        left.set_xlim(0, 100)
        right.set_xlim(0, 90)
        _name_rows(left, list(_ACTIVE.values()))
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(colors=_TEXT, labelsize=8)


def named(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Some rows, METHOD or METHOD/BASELINE -> what a picture calls them."""
    found = []
    for key, said in names.items():
        method, _, baseline = key.partition("/")
        own = [r for r in rows if r["method"] == method and baseline in ("", r["baseline"])]
        found.append({**own[0], "said": said})
    return found


def pictures(
    published: Row, regrets: Mapping[str, Sequence[Row]], studies: Mapping[str, Sequence[Row]]
) -> dict[str, Callable[[], Figure]]:
    """File -> what draws it.

    Args:
        published: All numbers of `published.json`.
        regrets: Direction -> what predictors of partners lose.
        studies: What arms of studies at equal compute bring small languages.
    """
    lost = "lost by the first choice, of best minus average partner"
    return {
        **_of_findings(published, regrets["from"]),
        **_of_pages(published),
        "transfer_from": _forest(regrets["from"], f"{lost}, from English"),
        "transfer_into": _forest(regrets["into"], f"{lost}, into English"),
        "transfer_constructed": _forest(regrets["constructed"], f"{lost}, constructed"),
        **{
            name: _forest(arms, f"{_BLEU} to tuned joint training")
            for name, arms in studies.items()
        },
    }


def _of_findings(published: Row, regrets: Sequence[Row]) -> dict[str, Callable[[], Figure]]:
    """The pictures of the index, one for each finding."""
    paper, ours = published["claims"]["paper"], published["claims"]["ours"]
    variants, controls = (
        {"said": said, "difference": row["bleu"]}
        for said, row in zip(
            ("15 variants of it, together", "6 controls and PCGrad, together"),
            published["together"],
            strict=False,
        )
    )
    one = [*named(paper, _ONE), variants, controls]
    two, three = named([*paper, *ours], _TWO), named(ours, _THREE)
    four = _called(published["similarity"], _FOUR)
    return {
        "finding1": lambda: forest(one, label=_BLEU, width=_NARROW),
        "finding2": lambda: forest(two, label=f"{_BLEU}, 19 languages", width=_NARROW),
        "finding3": lambda: forest(three, label=f"{_BLEU}, temperature 2 minus 5", width=_NARROW),
        "finding4": lambda: forest(four, label=_FAMILIES, width=_NARROW),
        "finding5": lambda: forest(regrets, label="lost by the first choice", width=_NARROW),
    }


def _of_pages(published: Row) -> dict[str, Callable[[], Figure]]:
    """The pictures of the other pages."""
    said, cosines = published["claims"], published["similarity"]
    from_english = [r for r in said["paper"] if not r["method"].startswith(("many", "into"))]
    by_runs = {key: [r for r in published["cosines"] if r["runs"] == key] for key in _RUNS}
    forests = {
        "table1": (from_english[:12], f"{_BLEU}, from English"),
        "table1_into": (_methods(said["paper"], "into"), f"{_BLEU}, into English"),
        "table2": (named([*said["paper"], *said["ours"]], MANY), _BLEU),
        "table3": (said["tagging"][:7], "difference of F1"),
        "tables6to8": ([r for r in said["paper"] if r["said"].startswith("Table")], _BLEU),
        "beyond": ([r for r in said["ours"] if not r["method"].startswith("many")], _BLEU),
        "constructed": (said["constructed"], f"{_BLEU}, constructed languages"),
        "figure1": (_called(cosines, _FOUR), _FAMILIES),
        "figure2": (_primary(cosines[6:11]), "cosine into minus from English"),
        "figure4": (_primary(cosines[11:21]), "difference of cosines"),
    }
    drawn = {name: _forest(*rows_and_label) for name, rows_and_label in forests.items()}
    return drawn | {
        "front": lambda: front(published),
        "figure3": lambda: active(published["updates"]),
        "figure9": lambda: families(
            [*by_runs["tiny"], *by_runs["from_english"]], from_english="verses, small model"
        ),
        "figure11": lambda: families(
            [*by_runs["quarter_batches"], *by_runs["from_english"]],
            from_english="verses, the whole batch",
        ),
        "geometry": lambda: families(published["cosines"]),
    }


def _forest(rows: Sequence[Row], label: str) -> Callable[[], Figure]:
    return lambda: forest(rows, label=label)


def _methods(rows: Sequence[Row], start: str) -> list[Row]:
    return [row for row in rows if row["method"].startswith(start)]


def _called(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The first rows about similarity by other names."""
    return [{**row, "said": said} for row, said in zip(_primary(rows), names, strict=False)]


def _primary(rows: Sequence[Row]) -> list[Row]:
    """Rows about similarity, all of which were corrected."""
    return [{**row, "primary": True} for row in rows]
