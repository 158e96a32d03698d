"""The report: one page that shows what the tasks of a run do to each other.

`write_report` turns runs, as `gradvac.analysis.load_run` reads them, into a single HTML file. It
needs no network and no server: scripts, styles and data are inside. The page opens with one
sentence and a map, and goes on by question: which component, which step, which pair, who pushes
whom. A sentence claims something only if a test says so. Several runs are shown under the same
controls.

    _sentences.py   the summary of a run, from the statistics, and its headline
    _kin.py         sentences on families, distances and groups
    _places.py      sentences on pairs, directions, sides, layers, steps and noise
    _update.py      sentences on the rule, and on who pushes whom
    _comparison.py  how two runs differ
    _wording.py     words for numbers
    _scores.py      the table of scores
    _settings.py    the settings that differ
    _payload.py     what the drawings show, as JSON
    _quantities.py  what every pair of tasks has
    _points.py      points of scatters
    _packing.py     the large arrays, as short text
    _live.py        the page while training goes on
    page/           template, style and scripts
"""

import importlib.metadata
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

from gradvac.analysis import views
from gradvac.analysis.report import _kin, _places, _update
from gradvac.analysis.report._comparison import compare
from gradvac.analysis.report._live import LivePage, serve
from gradvac.analysis.report._payload import payload
from gradvac.analysis.report._scores import score_table
from gradvac.analysis.report._sentences import SCORES, describe_source, headline, summarise
from gradvac.analysis.report._settings import changed_settings
from gradvac.analysis.report._wording import Sentence, ordinal
from gradvac.analysis.run import Run
from gradvac.files import write_text

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = (
    "data.js",
    "drawing.js",
    "matrix.js",
    "heatmap.js",
    "lines.js",
    "trees.js",
    "points.js",
    "page.js",
)
# What a sentence is about -> the question of the page that it answers.
_QUESTIONS = {
    _kin.FAMILIES: "relatives",
    _kin.DISTANCE: "relatives",
    _kin.GROUPS: "groups",
    _places.PAIRS: "relatives",
    _places.DIRECTION: "place",
    _places.SIDES: "place",
    _places.DEPTH: "place",
    _places.TIME: "steps",
    _places.NOISE: "noise",
    _update.PUSHES: "pushes",
    _update.RULE: "rule",
    SCORES: "scores",
}


def write_report(runs: Sequence[Run], path: str | Path) -> Path:
    """Write one offline HTML page about one or more runs.

    Args:
        runs: From `load_run`; the first is what the others are compared with.
        path: The file to write; its folder is made if missing.

    Returns:
        The file.

    Raises:
        ValueError: There is no run, or two have the same name.
    """
    page = render(runs)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def render(runs: Sequence[Run], *, live: dict[str, Any] | None = None) -> str:
    """The page as text.

    Args:
        runs: As in `write_report`.
        live: For a page that a server keeps up to date: its `version`, and after how many
            `seconds` it asks for a newer one.
    """
    runs = list(runs)
    names = [run.name for run in runs]
    if not runs:
        raise ValueError("runs: give at least one.")
    if len(set(names)) < len(names):
        raise ValueError(f"runs: two have the same name ({', '.join(names)}); rename one.")
    scores, data = score_table(runs), payload(runs)
    data |= {"metric": "" if scores is None else scores.metric, "live": live}
    sources = [views.main_source(run) for run in runs]
    pushes = [views.pushes(run) for run in runs]
    return render_page(
        _PAGE / "page.html",
        title=f"{', '.join(names)}: gradient geometry",
        runs=runs,
        live=live,
        headlines=[headline(run).text for run in runs],
        described=[
            "" if source is None else describe_source(source, run)
            for source, run in zip(sources, runs, strict=True)
        ],
        answers=[_answers(summarise(run)) for run in runs],
        comparison=_grouped([line for run in runs[1:] for line in compare(runs[0], run)]),
        biased=any(run_pushes is not None and not run_pushes.unbiased for run_pushes in pushes),
        pushed_on=[_pushed_on(run_pushes) for run_pushes in pushes],
        each_push=[
            []
            if run_pushes is None
            else [s.text for s in _update.say_each_push(run_pushes, run.names)]
            for run_pushes, run in zip(pushes, runs, strict=True)
        ],
        has_similarities=any(source is not None for source in sources),
        has_families=any(run.families.get(task) for run in runs for task in run.tasks),
        has_reliability=any(
            source.reliability is not None for run in runs for source in views.sources(run).values()
        ),
        stride=data["stride"],
        stride_text=ordinal(data["stride"]),
        scores=scores,
        changed=changed_settings(runs),
        data=_script_json(data),
        plotly=plotly.offline.get_plotlyjs(),
        scripts=[(_PAGE / name).read_text(encoding="utf-8") for name in _SCRIPTS],
    )


def _answers(sentences: Sequence[Sentence]) -> dict[str, list[str]]:
    """Sentences by the question they answer, those that claim something first."""
    by_question: dict[str, list[str]] = {}
    for sentence in sorted(sentences, key=lambda sentence: not sentence.claims):
        by_question.setdefault(_QUESTIONS[sentence.about], []).append(sentence.text)
    return by_question


def _pushed_on(pushes: object) -> str:
    unbiased = getattr(pushes, "unbiased", None)
    if unbiased is None:
        return "unknown"
    return "measured on halves, plain sum" if unbiased else "recorded in training"


def render_page(template: Path, **content: object) -> str:
    """An offline page in the report's style; text that is put into the template is escaped."""
    return _read_template(template).render(
        version=importlib.metadata.version("gradvac"),
        style=(_PAGE / "page.css").read_text(encoding="utf-8"),
        **content,
    )


@cache
def _read_template(path: Path) -> jinja2.Template:
    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(path.name)


def _grouped(sentences: Sequence[Sentence]) -> list[tuple[str, list[str]]]:
    """Sentences about the same thing together, in order."""
    return [
        (about, [sentence.text for sentence in group])
        for about, group in itertools.groupby(sentences, key=lambda sentence: sentence.about)
    ]


def _script_json(value: object) -> str:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


__all__ = [
    "LivePage",
    "Sentence",
    "compare",
    "headline",
    "render",
    "render_page",
    "serve",
    "summarise",
    "write_report",
]
