"""`gradvac similarity`: which tasks have similar gradients, at every checkpoint of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from gradvac.cli.common import Device, Run, needs, require_run, weights_of
from gradvac.lab.recipes import recipe_named, recipe_of


@needs("nmt", "tagging")
def similarity(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as in batch.tokens=8192")
    ] = None,
    split: Annotated[str, typer.Option("--set", help="dev, test, or an extra set.")] = "dev",
    lines: Annotated[
        int, typer.Option(help="Number of lines, from the start of the set; 0: all.", min=0)
    ] = 1000,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="best, last, or a step, instead of all checkpoints; may be repeated."),
    ] = None,
    granularity: Annotated[
        list[str] | None,
        typer.Option(
            help="May be repeated; default: all_layer, enc_dec (not in tagging), whole_model."
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="per_task or one_backward.")] = "per_task",
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep task gradients in host memory.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Measure similarities on an aligned set at every checkpoint; keep them in the run folder."""
    console = Console(highlight=False, markup=False)
    chosen = [weights_of(name) for name in weights or ()]
    options: dict[str, Any] = {
        "split": split,
        "num_lines": lines or None,
        "weights": chosen,
        "engine": engine,
        "offload": offload,
        "device": device,
        "overrides": overrides or [],
        "console": console,
    }
    if granularity:
        options["granularities"] = granularity
    measure = recipe_named(recipe_of(require_run(run))).measure
    measured = measure(run, **options)
    from gradvac.lab.recipes.common.similarity import summary
    from gradvac.lab.runs import RunFolder

    asked = [step for step in chosen if isinstance(step, int)]
    console.print(summary(measured, max(asked, default=None)))
    steps = ", ".join(map(str, measured[0].steps.tolist()))
    print(f"Steps {steps} are in {RunFolder(run).similarity}.")
