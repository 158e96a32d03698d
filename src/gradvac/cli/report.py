"""`gradvac report`: one page about one or more runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gradvac.analysis.report import write_report
from gradvac.cli._runs import Runs, load_runs


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one offline page that shows what the tasks of a run do to each other."""
    path = write_report(load_runs(runs), out)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if show:
        webbrowser.open(path.resolve().as_uri())
