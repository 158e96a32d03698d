"""Write the tables and pictures of these pages from the published numbers.

    python docs/results/write_results.py        (a test compares the pages with what this writes)

`published.json` has what is left of the 368 runs behind these pages: for every method its seeds,
its mean score with the reach of its 95 % interval, on average, by resource level and by task, its
losses and its cost; and every difference with its interval. `transfer.json` has the scores of
single runs. The text between two marks of a page is written here, all other text by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from gradvac.analysis.figures.style import (
    INKS,
    STYLE,
    name_points,
    new_figure,
    unknown_glyphs_as_boxes,
)
from gradvac.files import write_text

HERE = Path(__file__).parent
_BEGIN, _END = "<!-- written by write_results.py: {} -->\n", "<!-- until here -->\n"
_TEXT = "#7a7f85"  # to be read on white and on black
_PAPER, _PAPERS = "#c2185b", " (diamonds: the paper's)"
_LEVEL = 0.05
_NARROW = 3.9  # inches, of the pictures beside the findings
_MOST_TASKS = 4  # with more, tables have resource levels instead
_MANY = {
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
Row = Mapping[str, Any]


def verdict(row: Row, digits: int = 2) -> str:
    """What a difference shows, in the words of `gradvac compare`.

    Corrected p-values are among more questions than the primary ones, which is stricter.
    """
    change, *ends = row["difference"]
    if not ends:
        return "cannot tell"
    if ends[0] <= 0 <= ends[1]:
        return f"not shown: at most {max(-ends[0], ends[1]):.{digits}f}"
    word = "clear" if row.get("primary") and row.get("outlived_correction") else "suggestive"
    return f"{word}: {'better' if change > 0 else 'worse'}"


def similarity_verdict(row: Row) -> str:
    """The same about similarity, where nothing is better or worse, and all rows were corrected.

    Where languages were tested, that counts: what seeds share may be chance.
    """
    _, low, high = row["difference"]
    if row.get("outlived_correction"):
        return "clear"
    told = re.search(r"p (?:=|at most) ([\d.]+)", row["over_languages"])
    if told and float(told[1]) >= _LEVEL:
        return "not shown over languages"
    return "suggestive" if low > 0 or high < 0 else f"not shown: at most {max(-low, high):.3f}"


def interval(numbers: Sequence[float], digits: int = 2) -> str:
    """A difference with its 95 % interval."""
    change, *ends = (f"{number:+.{digits}f}" for number in numbers)
    return f"{change} ({ends[0]} to {ends[1]})" if ends else change


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def claims(rows: Sequence[Row]) -> str:
    """Differences: the paper's number where it has one, ours, and what that shows."""
    with_paper = any("paper" in row for row in rows)
    head = ["", *["the paper"] * with_paper, "here (95 % interval)", "seeds", "verdict"]
    lines = []
    for row in rows:
        name = f"{row['said']} (primary)" if row.get("primary") else row["said"]
        cells = [name, *[f"{row['paper']:+.2f}" if "paper" in row else ""] * with_paper]
        cells += [interval(row["difference"]), str(row["seeds"]), f"**{verdict(row)}**"]
        lines.append(cells)
    return table(head, lines)


def similarity(rows: Sequence[Row]) -> str:
    """Differences of cosines."""
    head = ["", "here (95 % interval over seeds)", "seeds", "verdict", "over languages"]
    return table(
        head,
        [
            (
                row["said"],
                interval(row["difference"], 3),
                str(row["seeds"]),
                f"**{similarity_verdict(row)}**",
                row["over_languages"],
            )
            for row in rows
        ],
    )


def scores(published: Row, name: str) -> str:
    """Absolute scores: methods by tasks, or by resource levels if there are many tasks."""
    methods = published["tables"][name]["methods"]
    first = next(iter(methods.values()))
    kind = "tasks" if len(first["tasks"]) <= _MOST_TASKS else "levels"
    head = ["BLEU", "seeds", "average", *first[kind], "development loss"]
    lines = []
    for method, own in methods.items():
        loss = own.get("losses", {}).get("dev/loss, best weights")
        numbers = [own["average"], *(own.get(kind, {}).get(key, []) for key in first[kind])]
        cells = [_mean(one, 2) for one in numbers]
        lines.append([method, str(own["seeds"]), *cells, _mean(loss or [], 3)])
    return table(head, lines)


def tagging(by_language: Row) -> str:
    """F1 of the rules by language."""
    methods = list(by_language["average"])
    rows = [
        [language, *(_mean(own[method], 1) for method in methods)]
        for language, own in by_language.items()
    ]
    return table(["F1", *methods], rows)


def together(rows: Sequence[Row]) -> str:
    """Groups of methods that may all be the same."""
    head = ["methods", "how many (seeds)", "BLEU (95 % interval)", "do they differ?"]
    head += ["development loss", "do they differ?"]
    return table(
        head,
        [
            (
                *(row["methods"], row["num"], interval(row["bleu"]), row["differ"]),
                *(interval(row["dev_loss"], 4), row["dev_loss_differ"]),
            )
            for row in rows
        ],
    )


def _mean(numbers: Sequence[float], digits: int) -> str:
    if not numbers:
        return "-"
    mean, *reach = (f"{number:.{digits}f}" for number in numbers)
    return f"{mean} ± {reach[0]}" if reach else mean


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
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(colors=_TEXT, labelsize=8)
        axes.xaxis.label.set_color(_TEXT)
    return figure


def front(published: Row) -> Figure:
    """High- against low-resource tasks: mixtures of joint training, and GradVac's variants."""
    methods = published["tables"]["front"]["methods"]
    points = {
        name: [own["levels"][level] for level in ("high", "low")] for name, own in methods.items()
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


def regret(transfer_page: str) -> list[Row]:
    """What predictors of partners lose, from the table of transfer.md, from English."""
    wanted = {
        "`same.decoder.mid`": "decoder gradients (primary)",
        "`subwords`": "overlap of subwords",
        "`family`": "family",
        "`uriel.featural`": "URIEL, featural",
    }
    rows = []
    for line in transfer_page.partition("## Into English")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in wanted:
            mean, low, high = (
                float(part)
                for part in cells[1].replace("[", "").strip("]").replace(",", "").split()
            )
            rows.append(
                {"said": wanted[cells[0]], "difference": [mean, low, high], "is_plain": True}
            )
    return rows


def _named(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Some rows, METHOD or METHOD/BASELINE -> what a picture calls them."""
    found = []
    for key, said in names.items():
        method, _, baseline = key.partition("/")
        own = [r for r in rows if r["method"] == method and baseline in ("", r["baseline"])]
        found.append({**own[0], "said": said})
    return found


def pictures(published: Row, transfer_page: str) -> dict[str, Callable[[], Figure]]:
    """File -> what draws it."""
    paper, ours = published["claims"]["paper"], published["claims"]["ours"]
    tuned, cosines = published["claims"]["tuned"], published["similarity"]
    everything = [*paper, *ours]
    variants = {
        "said": "15 variants of it, together",
        "difference": published["together"][0]["bleu"],
    }
    controls = {
        "said": "6 controls and PCGrad, together",
        "difference": published["together"][1]["bleu"],
    }
    bleu = "difference of BLEU"
    one = _named(
        paper,
        {
            "gradvac": "GradVac, 8 seeds",
            "long_gradvac": "... twice the steps",
            "full_gradvac": "... full length",
            "into_english_gradvac": "... into English",
        },
    )
    two = _named(
        everything,
        {
            "many_gradvac": "GradVac",
            "many_norm": "plain sum, GradVac's lengths",
            "many_direction": "GradVac, lengths of the sum",
            "many_frozen": "GradVac's mean weights",
        },
    )
    three = _named(
        ours,
        {
            "temperature2": "short runs, 11 seeds",
            "long_temperature2": "twice the steps",
            "full_temperature2": "full length",
            "into_english_temperature2": "into English",
            "many_temperature2": "19 languages",
        },
    )
    four = [
        {**cosines[number], "said": said, "primary": True}
        for number, said in {
            0: "verses, into English",
            1: "verses, from English",
            2: "news, into English",
            3: "news, from English",
            4: "constructed, into",
            5: "constructed, from",
        }.items()
    ]
    from_english = [row for row in paper if not row["method"].startswith(("many", "into"))]
    return {
        "finding1": lambda: forest([*one, variants, controls], label=bleu, width=_NARROW),
        "finding2": lambda: forest(two, label=f"{bleu}, 19 languages", width=_NARROW),
        "finding3": lambda: forest(three, label=f"{bleu}, temperature 2 minus 5", width=_NARROW),
        "finding4": lambda: forest(
            four, label="cosine within families minus between", width=_NARROW
        ),
        "finding5": lambda: forest(
            regret(transfer_page), label="lost by the first choice", width=_NARROW
        ),
        "table1": lambda: forest(from_english[:12], label=f"{bleu}, from English"),
        "table1_into": lambda: forest(
            [row for row in paper if row["method"].startswith("into")],
            label=f"{bleu}, into English",
        ),
        "table2": lambda: forest(_named(everything, _MANY), label=bleu),
        "table3": lambda: forest(published["claims"]["tagging"][:7], label="difference of F1"),
        "tables6to8": lambda: forest(
            [r for r in paper if r["said"].startswith("Table")], label=bleu
        ),
        "beyond": lambda: forest(
            [r for r in ours if not r["method"].startswith("many")], label=bleu
        ),
        "tuned": lambda: forest(
            [r for r in tuned if "mgda" not in r["method"] and "bilingual" not in r["method"]],
            label=f"{bleu}, on top of temperature 2",
        ),
        "figure1": lambda: forest(four, label="cosine within families minus between"),
        "figure2": lambda: forest(_primary(cosines[6:11]), label="cosine into minus from English"),
        "figure4": lambda: forest(_primary(cosines[11:21]), label="difference of cosines"),
        "front": lambda: front(published),
    }


def _primary(rows: Sequence[Row]) -> list[Row]:
    """Rows about similarity, all of which were corrected."""
    return [{**row, "primary": True} for row in rows]


def parts(published: Row) -> dict[str, dict[str, str]]:
    """Page -> mark -> what stands there."""
    paper, ours = published["claims"]["paper"], published["claims"]["ours"]
    cosines = published["similarity"]
    into = [row for row in paper if row["method"].startswith("into")]
    many = [row for row in [*paper, *ours] if row["method"].startswith("many")]
    named = _named(many, _MANY)
    assert len(named) == len(many), "every row about many languages has a name"
    choices = [row for row in paper if row["said"].startswith("Table")]
    return {
        "table1.md": {
            "claims": claims([row for row in paper if row not in into + many + choices]),
            "into": claims(into),
            "scores": scores(published, "table1"),
            "bilingual": scores(published, "bilingual"),
            "full": scores(published, "full"),
            "into_scores": scores(published, "into_english"),
        },
        "table2.md": {"claims": claims(named), "scores": scores(published, "many_controls")},
        "table3.md": {
            "claims": claims(published["claims"]["tagging"]),
            "pos": tagging(published["tagging"]["pos"]),
            "ner": tagging(published["tagging"]["ner"]),
        },
        "tables6to8.md": {
            "claims": claims(choices),
            "scores": scores(published, "tables6to8"),
        },
        "figure1.md": {"claims": similarity(cosines[:6])},
        "figure2.md": {"claims": similarity(cosines[6:11]), "bleu": similarity(cosines[26:27])},
        "figure4.md": {"claims": similarity(cosines[11:23])},
        "figure9.md": {"claims": similarity(cosines[23:25])},
        "figure11.md": {"claims": similarity(cosines[25:26])},
        "beyond.md": {
            "ours": claims([row for row in ours if row not in many]),
            "tuned": claims(published["claims"]["tuned"]),
            "together": together(published["together"]),
            "mixture": scores(published, "mixture"),
            "tuned_scores": scores(published, "tuned"),
            "attempts": scores(published, "attempts"),
            "controls": scores(published, "controls"),
        },
        "constructed.md": {
            "claims": claims(published["claims"]["constructed"]),
            "scores": scores(published, "constructed"),
        },
    }


def fill(text: str, written: Mapping[str, str]) -> str:
    """A page with its parts between the marks that name them and those that end them."""
    for name, part in written.items():
        begin = _BEGIN.format(name)
        before, found, rest = text.partition(begin)
        if not found or _END not in rest:
            raise ValueError(f"a page lacks {begin.strip()} ... {_END.strip()}")
        text = f"{before}{begin}\n{part}\n{_END}{rest.partition(_END)[2]}"
    return text


def pages(folder: Path) -> dict[str, str]:
    """Page -> its text as it should be."""
    published = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    return {
        name: fill((folder / name).read_text(encoding="utf-8"), written)
        for name, written in parts(published).items()
    }


def main() -> None:
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    transfer_page = (HERE / "transfer.md").read_text(encoding="utf-8")
    for name, text in pages(HERE).items():
        write_text(HERE / name, text)
    for name, draw in pictures(published, transfer_page).items():
        with mpl.rc_context(dict(STYLE)), unknown_glyphs_as_boxes():
            path = HERE / "pictures" / f"{name}.svg"
            path.parent.mkdir(exist_ok=True)
            draw().savefig(path, transparent=True, metadata={"Date": None})
    sys.stdout.write("The pages and pictures are written.\n")


if __name__ == "__main__":
    main()
