"""`gradvac report`: one page about one or more runs."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradvac.cli._common import needs
from gradvac.cli._options import GENEALOGY, Distances, Families, Runs

if TYPE_CHECKING:
    from gradvac.analysis import Run


def write_page(runs: Sequence[Run], out: Path, *, show: bool) -> None:
    """Write the page, say where it is, and open it if asked to."""
    from gradvac.analysis.report import write_report

    path = write_report(runs, out)
    print(f"The report is {path} ({path.stat().st_size / 1e6:.1f} MB).")
    if show:
        webbrowser.open(path.resolve().as_uri())


@needs("report")
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    distances: Distances = GENEALOGY,
    families: Families = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Say what the tasks of a run do to each other, and write one offline page that shows it."""
    from gradvac.cli._runs import load_runs

    loaded = load_runs(runs, distances=distances, families=families)
    _say(loaded)
    write_page(loaded, out, show=show)


def _say(runs: Sequence[Run]) -> None:
    """Print the sentences that the page begins with."""
    from gradvac.analysis.report import compare, summarise

    console = Console(highlight=False)
    told = {run.name: summarise(run) for run in runs}
    told["side by side"] = [line for run in runs[1:] for line in compare(runs[0], run)]
    for name, sentences in told.items():
        if not sentences:
            continue
        console.rule(Text(name), align="left")
        shown = Table.grid(padding=(0, 2))
        about = ""
        for sentence in sentences:  # as text: a name may look like markup
            shown.add_row(
                Text("" if sentence.about == about else sentence.about), Text(sentence.text)
            )
            about = sentence.about
        console.print(shown)
