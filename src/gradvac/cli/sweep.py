"""`gradvac sweep`: many runs from one config."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradvac.cli._common import config_folders, needs

if TYPE_CHECKING:
    from gradvac.lab.experiments import Sweep, Trial
    from gradvac.lab.experiments.sweep import Ended


@needs("nmt", "tagging", "report")
def sweep(
    config: Annotated[
        str, typer.Argument(help="A TOML file, or the name of one in configs/sweeps.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value for all runs, as in data.root=DATA"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder; default: runs/NAME-OF-CONFIG.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time.", min=1)] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    halving: Annotated[
        bool,
        typer.Option("--halving", help="Repeatedly stop the weaker half early, by dev loss."),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Save and stop after this many; no run begins that would not end in time.",
            min=1,
        ),
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="local: processes of this machine; submitit: Slurm and others.")
    ] = "local",
    dry: Annotated[bool, typer.Option("--dry-run", help="Only list the runs.")] = False,
) -> None:
    """Train and score all runs of a sweep; the same command continues where it stopped.

    Runs are in OUT/METHOD/seed-N; `gradvac compare OUT` compares them.
    OUT/budget.md lists the runs, steps and seconds that each method was given.
    """
    if launcher not in ("local", "submitit"):
        raise ValueError(f"--launcher: must be local or submitit, got {launcher!r}.")
    plan = _load(config, overrides or [], out)
    if dry:
        for trial in plan.trials:
            print(trial.run)
        return
    from gradvac.lab.experiments.launchers import Processes, Submitit
    from gradvac.lab.experiments.sweep import InterruptedSweep

    started = (
        Processes(jobs)
        if launcher == "local"
        else Submitit(plan.out / "submitit", plan.config.submitit, jobs)
    )
    try:
        ended = plan.run(started, retry=retry, halving=halving, seconds=seconds)
    except InterruptedSweep:
        raise typer.Exit(130) from None
    _write_tables(plan, ended)
    failed = [trial for trial, how in ended.items() if how.status == "failed"]
    for trial in failed:
        print(f"{trial.label}: failed: {ended[trial].error}")
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(ended)} runs failed; fix the cause, then use --retry."
        )
    print(shlex.join(["gradvac", "compare", str(plan.out)]))


def _write_tables(plan: Sweep, ended: Mapping[Trial, Ended]) -> None:
    """What every method was given, and how far short runs predicted long ones."""
    from gradvac.lab.experiments import budget_table, budgets, prediction_table, predictions
    from gradvac.lab.runs.files import write_text

    table = budget_table(budgets(ended))
    write_text(plan.out / "budget.md", table)
    print(table, end="")
    points: dict[str, list[Trial]] = {}
    for trial in plan.trials:
        points.setdefault(trial.name, []).append(trial)
    if told := predictions(points):
        write_text(plan.out / "prediction.md", prediction_table(told))
        print(f"How far short runs predicted long ones is in {plan.out / 'prediction.md'}.")


def _load(source: str, overrides: list[str], out: Path | None) -> Sweep:
    from gradvac.lab.experiments import Sweep, SweepConfig
    from gradvac.lab.training import config
    from gradvac.lab.training.config import find_config, parse_overrides

    settings = config.load(SweepConfig, source, folders=config_folders("sweeps"))
    base = find_config(settings.base, config_folders(settings.recipe))
    folder = out or Path("runs") / Path(source).stem
    return Sweep(settings, base, folder, extra=parse_overrides(overrides))
