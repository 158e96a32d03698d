"""`gradvac report`: one page about one or more runs."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradvac.cli.common import Distances, Families, Runs, needs, serve

if TYPE_CHECKING:
    from gradvac.analysis import Run
    from gradvac.analysis.report import Summary


def write_page(
    runs: Sequence[Run], out: Path, *, show: bool, summary: Summary | None = None
) -> None:
    """Write the page, print where it is, and open it if asked to."""
    from gradvac.analysis.report import write_report

    path = write_report(runs, out, summary=summary)
    print(f"The report is {path} ({path.stat().st_size / 1e6:.1f} MB).")
    if show:
        webbrowser.open(path.resolve().as_uri())


def serve_page(
    runs: Sequence[Path], *, distances: str, families: Path | None, port: int, show: bool
) -> None:
    """Serve the page until the user stops it."""
    from gradvac.analysis.report import LivePage, render, serve_live
    from gradvac.lab.languages.known import load_runs

    missing = [path for path in runs if not path.is_dir()]
    if missing:
        raise ValueError(f"{missing[0]}: is not a folder; give the folder of a run.")

    def build(live: dict[str, Any]) -> str:
        return render(load_runs(runs, distances=distances, families=families), live=live)

    if hasattr(os, "nice"):
        os.nice(10)  # training goes first
    serve(serve_live(LivePage(build, runs), port=port), "keeps up with the run", show=show)


@needs("report")
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    table: Annotated[
        Path | None,
        typer.Option(help="Write all cosines to this file too: .csv, or .parquet."),
    ] = None,
    distances: Distances = "genealogy",
    families: Families = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page on this machine during training."),
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of the live page; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> None:
    """Summarize how the tasks of a run interact, and write one offline page that shows it.

    With --live nothing is written: the page is served on this machine and keeps up with the run.
    """
    from gradvac.analysis import write_table
    from gradvac.analysis.report import summarise_runs
    from gradvac.lab.languages.known import load_runs

    if live:
        serve_page(runs, distances=distances, families=families, port=port, show=show)
        return
    loaded = load_runs(runs, distances=distances, families=families)
    summary = summarise_runs(loaded)
    _print_summary([run.name for run in loaded], summary)
    write_page(loaded, out, show=show, summary=summary)
    if table is not None:
        print(f"The table is {table} ({write_table(table, loaded):,} rows).")


def _print_summary(names: Sequence[str], summary: Summary) -> None:
    """Print the sentences that the page begins with."""
    console = Console(highlight=False)
    titles = [*names, "side by side"]
    for title, statements in zip(titles, [*summary.by_run, summary.comparison], strict=True):
        if not statements:
            continue
        console.rule(Text(title), align="left")
        shown = Table.grid(padding=(0, 2))
        about = ""
        for statement in statements:  # as text: a name may look like markup
            shown.add_row(
                Text("" if statement.about == about else statement.about), Text(statement.text)
            )
            about = statement.about
        console.print(shown)
