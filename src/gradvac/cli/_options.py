"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

GENEALOGY = "genealogy"

Source = Annotated[
    str, typer.Argument(help="A TOML file, the name of one in configs/, or a run folder.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Into = Annotated[Path | None, typer.Option(help="The run folder; default: runs/NAME-OF-CONFIG.")]
Weights = Annotated[str, typer.Option(help="best, last, averaged, or a step.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Runs = Annotated[
    list[Path], typer.Argument(help="Run folders; the others are compared with the first.")
]
Distances = Annotated[
    str,
    typer.Option(
        help="Known distances of tasks: genealogy, uriel:KIND (such as uriel:featural), or a CSV "
        "file."
    ),
]
Families = Annotated[
    Path | None, typer.Option(help='Families of tasks: a TOML file with lines fr = "Romance".')
]


def weights_of(name: str) -> str | int:
    """The weights that a `Weights` option names: a step becomes a number."""
    return int(name) if name.isdigit() else name
