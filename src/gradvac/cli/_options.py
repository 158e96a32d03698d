"""Options that several commands have, and what they are called."""

from pathlib import Path
from typing import Annotated

import typer

GENEALOGY = "genealogy"

Runs = Annotated[list[Path], typer.Argument(help="Run folders; the first is compared with.")]
Distances = Annotated[
    str,
    typer.Option(
        help="Known distances of tasks: genealogy, uriel:KIND (as in uriel:featural), or a CSV file"
    ),
]
Families = Annotated[
    Path | None, typer.Option(help='Families of tasks: a TOML file with lines fr = "Romance".')
]
