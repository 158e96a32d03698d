"""The report: one page that shows how the tasks of a run interact.

`write_report` turns runs, as `gradvac.analysis.load_run` reads them, into a single HTML file. It
needs no network and no server: scripts, styles and data are inside. The page opens with one
sentence and a map, and goes on by question: which component, which step, which pair, who helps and
who harms. A sentence claims something only if a test says so. Several runs are shown under the same
controls.

    sentences.py  what the page says of runs: similarity, the update, scores, how two runs differ
    tables.py     scores by task, and the settings that differ
    payload.py    what the drawings show, as JSON
    live.py       the page while training goes on
    page/         template with its fixed words, style and scripts
"""

import base64
import gzip
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline

import gradvac
from gradvac.analysis import views
from gradvac.analysis.advice import LAST_FIFTH, TRUST, advise_runs, describe_advice
from gradvac.analysis.pictures import difference_maps
from gradvac.analysis.report import sentences
from gradvac.analysis.report.live import LivePage, serve_live
from gradvac.analysis.report.payload import page_data
from gradvac.analysis.report.sentences import (
    Statement,
    Summary,
    describe_difference,
    describe_progress,
    run_headline,
    summarise,
    summarise_runs,
)
from gradvac.analysis.report.tables import changed_settings, score_table
from gradvac.analysis.run import Run, check_runs_differ
from gradvac.analysis.statistics import Influence
from gradvac.utils.files import write_text

_PAGE = Path(__file__).parent / "page"
_MANY_TASKS = 30  # more need the whole width for their names
_SCRIPTS = ("data.js", "drawing.js", "matrix.js", "heatmap.js", "plots.js", "page.js")
# What a sentence is about -> the question of the page that it answers; pairs are in the headline.
_QUESTIONS = {
    sentences.FAMILIES: "relatives",
    sentences.DISTANCE: "relatives",
    sentences.DIRECTION: "layers",
    sentences.SIDES: "layers",
    sentences.DEPTH: "layers",
    sentences.TIME: "steps",
    sentences.NOISE: "noise",
    sentences.SCORES: "scores",
    sentences.INFLUENCE: "influence",
    sentences.RULE: "rule",
}


def write_report(runs: Sequence[Run], path: str | Path, *, summary: Summary | None = None) -> Path:
    """Write one offline HTML page about one or more runs.

    Args:
        runs: From `load_run`; the first is what the others are compared with.
        path: The file to write; its folder is made if missing.
        summary: What `summarise_runs` said of these runs, if that is known already.

    Returns:
        The file.

    Raises:
        ValueError: There is no run, or two have the same name.
    """
    page = render(runs, summary=summary)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def render(
    runs: Sequence[Run], *, summary: Summary | None = None, live: dict[str, Any] | None = None
) -> str:
    """The page as text.

    Args:
        runs: As in `write_report`.
        summary: As in `write_report`.
        live: For a page that a server keeps up to date: its `version`, and after how many
            `seconds` it asks for a newer one.
    """
    runs = list(runs)
    check_runs_differ(runs)
    summary = summary or summarise_runs(runs)
    scores = score_table(runs)
    data = page_data(runs, "" if scores is None else scores.metric) | {"live": live}
    sources = [views.main_source(run) for run in runs]
    influences = [views.find_influence(run) for run in runs]
    return render_page(
        _PAGE / "page.html",
        title=f"{', '.join(run.name for run in runs)}: gradient geometry",
        runs=runs,
        live=live,
        headlines=[
            run_headline(run, said).text for run, said in zip(runs, summary.by_run, strict=True)
        ],
        described=[
            "" if source is None else sentences.describe_source(source, run)
            for source, run in zip(sources, runs, strict=True)
        ],
        answers=[_answers(statements) for statements in summary.by_run],
        advice=[] if live else _advice(runs),  # too slow for every few seconds
        comparison=_grouped(summary.comparison),
        biased=any(one is not None and not one.unbiased for one in influences),
        influence_from=[_influence_from(one) for one in influences],
        progress=[
            [] if one is None else [s.text for s in describe_progress(one, run.names)]
            for one, run in zip(influences, runs, strict=True)
        ],
        has_similarities=any(source is not None for source in sources),
        has_families=any(run.families.get(task) for run in runs for task in run.tasks),
        has_reliability=any(
            source.reliability is not None for run in runs for source in views.sources(run).values()
        ),
        most_steps=data["mostSteps"],
        scores=scores,
        changed=changed_settings(runs),
        data=_script_json(data),
        plotly=_packed_plotly(),
        differences=list(difference_maps(views.for_maps(runs))),
        most_shown=views.MOST_SHOWN if any(len(r.tasks) > views.MOST_SHOWN for r in runs) else 0,
        many_tasks=any(len(run.tasks) > _MANY_TASKS for run in runs),
        scripts=[(_PAGE / name).read_text(encoding="utf-8") for name in _SCRIPTS],
    )


@cache
def _packed_plotly() -> str:
    """The drawing library, compressed, as the page unpacks it."""
    script = plotly.offline.get_plotlyjs().encode()
    return base64.b64encode(gzip.compress(script, 9, mtime=0)).decode("ascii")


def _answers(statements: Sequence[Statement]) -> dict[str, list[str]]:
    """Sentences by the question they answer, those that claim something first."""
    by_question: dict[str, list[str]] = {}
    for statement in sorted(statements, key=lambda statement: not statement.claims):
        if statement.about in _QUESTIONS:
            by_question.setdefault(_QUESTIONS[statement.about], []).append(statement.text)
    return by_question


def _advice(runs: Sequence[Run]) -> list[list[str]]:
    """What should I do? One sentence if that cannot be said of a run; what holds for all, once."""
    said: list[list[str]] = []
    for run in runs:
        try:
            said.append(describe_advice(advise_runs([run]), run.names))
        except ValueError as error:
            said.append([str(error)])
    for advice in [advice for advice in said if TRUST in advice][:-1]:
        advice[:] = [one for one in advice if one not in (TRUST, LAST_FIFTH)]
    return said


def _influence_from(influence: Influence | None) -> str:
    if influence is None:
        return "unknown"
    return "measured on halves, plain sum" if influence.unbiased else "recorded in training"


def render_page(template: Path, **content: object) -> str:
    """An offline page in the report's style; text that is put into the template is escaped."""
    return _read_template(template).render(
        version=gradvac.__version__,
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


def _grouped(statements: Sequence[Statement]) -> list[tuple[str, list[str]]]:
    """Sentences about the same thing together, in order."""
    return [
        (about, [statement.text for statement in group])
        for about, group in itertools.groupby(statements, key=lambda statement: statement.about)
    ]


def _script_json(value: object) -> str:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


__all__ = [
    "LivePage",
    "Statement",
    "Summary",
    "describe_difference",
    "render",
    "render_page",
    "run_headline",
    "serve_live",
    "summarise",
    "summarise_runs",
    "write_report",
]
