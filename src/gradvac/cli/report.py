"""`gradvac report`: one page about one or more runs."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradvac.cli._known import GENEALOGY
from gradvac.cli._runs import Distances, Families, Runs, load_runs


def write_page(
    runs: Sequence[Path],
    out: Path,
    *,
    show: bool,
    distances: str = GENEALOGY,
    families: Path | None = None,
) -> None:
    """Write the page, say where it is, and open it if asked to."""
    # Plotly and jinja2 are the extra `report`; the other commands do without.
    from gradvac.analysis.report import write_report

    path = write_report(load_runs(runs, distances=distances, families=families), out)
    print(f"The report is {path} ({path.stat().st_size / 1e6:.1f} MB).")
    if show:
        webbrowser.open(path.resolve().as_uri())


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    distances: Distances = GENEALOGY,
    families: Families = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one offline page that shows what the tasks of a run do to each other."""
    write_page(runs, out, show=show, distances=distances, families=families)
