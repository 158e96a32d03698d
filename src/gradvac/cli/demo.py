"""`gradvac demo`: everything, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradvac.cli.common import load_config, needs
from gradvac.cli.report import write_page


@needs("nmt", "report")
def demo(
    out: Annotated[Path, typer.Option(help="Where data and runs go.")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as in train.max_steps=100")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
) -> None:
    """Train constructed languages together, follow the advice of their gradients, and report."""
    from gradvac.analysis.report import run_headline, summarise
    from gradvac.lab.experiments.demo import GRADVAC, JOINT, run_demo
    from gradvac.lab.languages.known import load_runs

    console = Console(highlight=False)
    run_demo(load_config("nmt", "demo", overrides), out, console=console)
    console.rule("5. Gradients, on the same sentences for all languages", align="left")
    runs = load_runs([out / JOINT, out / GRADVAC])
    for run in runs:
        console.print(f"{run.name}: {run_headline(run, summarise(run)).text}", markup=False)
    write_page(runs, out / "report.html", show=show)
