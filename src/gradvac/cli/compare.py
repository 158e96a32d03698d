"""`gradvac compare`: what is clear, what is suggestive, what is not shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradvac.cli.common import Weights, needs, utf8_output, weights_of


@needs("nmt", "report")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or the folder of a sweep.")],
    baseline: Annotated[
        str | None,
        typer.Option(help="A method or one of its runs; default: joint, or plain joint training."),
    ] = None,
    split: Annotated[str, typer.Option("--set", help="The set whose scores count.")] = "test",
    weights: Weights = "best",
    metric: Annotated[
        str | None,
        typer.Option(help='BLEU, chrF++, "wrong language", F1, ...; default: the first.'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write it to a .md, .json or .html file."),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Also draw it, as PDF, SVG and PNG files in this folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of Markdown.")
    ] = False,
) -> None:
    """Say what is clear, suggestive or not shown of methods against a baseline.

    Runs that differ only in their seed are one method. Score them first, with
    `gradvac nmt score` or `gradvac tagging score`. A difference counts only
    if other seeds and other sentences would show it too, and is clear only
    if the sweep has asked for it beforehand: docs/experiments.md.
    """
    from gradvac.lab.experiments import compare_runs, to_json, to_markdown
    from gradvac.lab.experiments.page import to_html, write_pictures
    from gradvac.utils.files import write_text

    writers = {".md": to_markdown, ".json": to_json, ".html": to_html}
    if out is not None and out.suffix not in writers:
        raise ValueError(f"--out: {out} must end in {', '.join(writers)}.")
    comparison = compare_runs(
        runs, baseline=baseline, split=split, weights=weights_of(weights), metric=metric
    )
    text = to_json(comparison) if as_json else to_markdown(comparison)
    print(text, end="", file=utf8_output())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, writers[out.suffix](comparison))
    if pictures is not None:
        write_pictures(comparison, pictures)
