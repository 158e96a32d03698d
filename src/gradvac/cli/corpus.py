"""`gradvac corpus`: the constructed languages as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradvac.cli.common import reports_mistakes

if TYPE_CHECKING:
    from gradvac.lab.languages import Corpus

app = typer.Typer(help="The constructed languages.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """The constructed languages."""


@app.command()
@reports_mistakes
def write(
    directory: Annotated[
        Path,
        typer.Argument(
            help="A new or empty folder, or one of an earlier export, which is replaced."
        ),
    ],
    families: Annotated[
        Path | None, typer.Option(help="A TOML file of your own families.", exists=True)
    ] = None,
    languages: Annotated[
        str | None, typer.Option(help="Only these, as in qso,qsm; default: all.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Another seed: other words and sentences.")
    ] = None,
) -> None:
    """Write a multi-way parallel corpus as text files."""
    from gradvac.lab.languages import default_corpus, load_corpus, write_corpus

    corpus = default_corpus(seed=seed) if families is None else load_corpus(families, seed=seed)
    if languages is not None:
        corpus = corpus.select([code.strip() for code in languages.split(",")])
    paths = write_corpus(corpus, directory)
    console = Console()
    console.print(language_table(corpus))
    print(f"Wrote {len(paths)} files to {directory}.")


def language_table(corpus: Corpus) -> Table:
    """The languages of a corpus as a table."""
    shown = Table()
    for column in ("code", "name", "family", "branch", "script", "level"):
        shown.add_column(column)
    shown.add_column("training pairs", justify="right")
    for code, language in corpus.languages.items():
        facts = (language.name, language.family, language.branch, language.script)
        shown.add_row(code, *facts, language.resource_level, f"{language.train:,}")
    return shown
