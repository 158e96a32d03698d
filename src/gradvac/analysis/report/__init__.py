"""The report: one page that shows what the tasks of a run do to each other.

`write_report` turns runs, as `gradvac.analysis.load_run` reads them, into a single HTML file. It
needs no network and no server: scripts, styles and data are inside. The page opens with sentences
computed from the data, says "not significant" where that is so, and goes on to drawings that can be
asked: which component, which step, which pair. Several runs are shown side by side under the same
controls.

    _sentences.py   the summary of a run, from the statistics
    _comparison.py  how two runs differ
    _wording.py     words for numbers
    _scores.py      the table of scores
    _settings.py    the settings that differ
    _payload.py     what the drawings show, as JSON
    _packing.py     the large arrays, as short text
    page/           template, style and scripts
"""

import importlib.metadata
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
import plotly.offline

from gradvac.analysis import views
from gradvac.analysis.report._comparison import compare
from gradvac.analysis.report._payload import payload
from gradvac.analysis.report._scores import score_table
from gradvac.analysis.report._sentences import describe_source, headline, summarise
from gradvac.analysis.report._settings import changed_settings
from gradvac.analysis.report._wording import Sentence
from gradvac.analysis.run import Run

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "drawing.js", "heatmap.js", "lines.js", "page.js")


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
    runs = list(runs)
    names = [run.name for run in runs]
    if not runs:
        raise ValueError("runs: give at least one.")
    if len(set(names)) < len(names):
        raise ValueError(f"runs: two have the same name ({', '.join(names)}); rename one.")
    data = payload(runs)
    sources = [views.main_source(run) for run in runs]
    page = _template().render(
        title=f"{', '.join(names)}: gradient geometry",
        version=importlib.metadata.version("gradvac"),
        runs=runs,
        described=[
            "" if source is None else describe_source(source, run)
            for source, run in zip(sources, runs, strict=True)
        ],
        summaries=[_grouped(summarise(run)) for run in runs],
        comparison=_grouped([line for run in runs[1:] for line in compare(runs[0], run)]),
        has_similarities=any(source is not None for source in sources),
        stride=data["stride"],
        scores=score_table(runs),
        changed=changed_settings(runs),
        data=_script_json(data),
        plotly=plotly.offline.get_plotlyjs(),
        style=(_PAGE / "page.css").read_text(encoding="utf-8"),
        scripts=[(_PAGE / name).read_text(encoding="utf-8") for name in _SCRIPTS],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(_PAGE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _grouped(sentences: Sequence[Sentence]) -> list[tuple[str, list[str]]]:
    """Sentences about the same thing together, in order."""
    return [
        (about, [sentence.text for sentence in own])
        for about, own in itertools.groupby(sentences, key=lambda sentence: sentence.about)
    ]


def _script_json(value: object) -> str:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


__all__ = ["Sentence", "compare", "headline", "summarise", "write_report"]
