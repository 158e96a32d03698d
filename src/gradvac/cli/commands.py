"""All commands of `gradvac`, under their names."""

from typing import Annotated

import typer

import gradvac
from gradvac.cli import (
    advise,
    compare,
    corpus,
    demo,
    figures,
    nmt,
    report,
    similarity,
    sweep,
    tagging,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"gradvac {gradvac.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train one model on many tasks, and decide how their gradients are combined."""


app.add_typer(nmt.app, name="nmt")
app.add_typer(tagging.app, name="tagging")
app.add_typer(corpus.app, name="corpus")
app.command("demo")(demo.demo)
app.command("similarity")(similarity.similarity)
app.command("advise")(advise.advise_on)
app.command("report")(report.report)
app.command("figures")(figures.figures)
app.command("compare")(compare.compare)
app.command("sweep")(sweep.sweep)
