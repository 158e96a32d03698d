"""`gradvac advise`: which tasks of a run should learn together."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradvac.cli.common import needs

if TYPE_CHECKING:
    from gradvac.analysis.advice import Advice, Companion


@needs("report")
def advise_on(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of joint runs of the same tasks, such as seeds.")
    ],
    groups: Annotated[
        int | None, typer.Option(help="How many groups; default: chosen.", min=2)
    ] = None,
    side: Annotated[
        str | None, typer.Option(help="encoder, decoder or shared; default: decoder.")
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="A task to train with companions, or alone; default: the smaller half."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write configs of follow-up runs here.")
    ] = None,
) -> None:
    """Say which tasks should learn together, and write the runs that follow and check it."""
    from gradvac.analysis.advice import advise_runs, describe_advice
    from gradvac.lab.languages.known import load_runs

    loaded = load_runs(runs)
    advice = advise_runs(loaded, num_groups=groups, side=side)
    unknown = [task for task in targets or () if task not in advice.tasks]
    if unknown:
        raise ValueError(f"--for: {unknown[0]!r} is none of {', '.join(advice.tasks)}.")
    console = Console(highlight=False, markup=False)
    console.print(_table(advice))
    for sentence in describe_advice(advice, loaded[0].names):
        console.print(sentence)
    if out is not None:
        from gradvac.lab.experiments.follow_up import LAST_ALONE, write_follow_ups
        from gradvac.lab.languages.known import sizes_of

        sizes = sizes_of(loaded)
        order = sorted(advice.tasks, key=lambda task: sizes.get(task, 0))
        small = targets or order[: max(1, len(order) // 2)]
        files = write_follow_ups(runs[0], advice, out, small)
        if not any(name.startswith(LAST_ALONE) for name in files):
            print(
                f"{runs[0]} kept no checkpoint near four fifths of its steps, so that there is no "
                "config for its last fifth; the sweep trains a joint run that keeps one."
            )
        print(f"{len(files)} configs are in {out}; this checks the advice:")
        print(shlex.join(["gradvac", "sweep", str(files["check"])]))


def _table(advice: Advice) -> Table:
    shown = Table(title=f"Companions ({advice.source})", title_justify="left")
    for column in ("task", "learns best with", "cosine, and how far above the others"):
        shown.add_column(column)
    for task in advice.tasks:
        companions = advice.companions(task)
        promised = [one for one in companions if one.promised]
        names = ", ".join(one.task for one in promised) or "cannot be told"
        shown.add_row(Text(task), Text(names), Text("; ".join(map(_shown, companions[:3]))))
    return shown


def _shown(one: Companion) -> str:
    return f"{one.task} {one.predicted:.2f} ({one.advantage:+.3f} ± {one.reach:.3f})"
