"""`gradvac sweep`: many runs from one config."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradvac.cli.common import config_folders, needs

if TYPE_CHECKING:
    from gradvac.lab.experiments import Sweep


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
    proxy: Annotated[
        int,
        typer.Option(
            help="Cut steps and rows of every task to one N-th, which keeps repeats.", min=1
        ),
    ] = 1,
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
    plan = _load(config, overrides or [], out, proxy)
    if dry:
        for trial in plan.trials:
            print(trial.run)
        return
    from gradvac.lab.experiments import InterruptedSweep, Processes, Submitit, budget_table
    from gradvac.utils.files import write_text

    started = (
        Processes(jobs, plan.config.recipe)
        if launcher == "local"
        else Submitit(plan.out / "submitit", plan.config.submitit, jobs)
    )
    try:
        ended = plan.run(started, retry=retry, halving=halving)
    except InterruptedSweep:
        raise typer.Exit(130) from None
    table = budget_table(ended)
    write_text(plan.out / "budget.md", table)
    print(table, end="")
    failed = [trial for trial, how in ended.items() if how.status == "failed"]
    for trial in failed:
        print(f"{trial.label}: failed: {ended[trial].error}")
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(ended)} runs failed; fix the cause, then use --retry."
        )
    print(shlex.join(["gradvac", "compare", str(plan.out)]))


def _load(source: str, overrides: list[str], out: Path | None, proxy: int) -> Sweep:
    from gradvac.lab.experiments import Sweep, SweepConfig
    from gradvac.lab.training import config
    from gradvac.lab.training.config import find_config, parse_overrides

    settings = config.load(SweepConfig, source, folders=config_folders("sweeps"))
    base = find_config(settings.base, config_folders(settings.recipe))
    short = f"-proxy{proxy}" if proxy > 1 else ""
    folder = out or Path("runs") / f"{Path(source).stem}{short}"
    return Sweep(settings, base, folder, extra=parse_overrides(overrides), proxy=proxy)
