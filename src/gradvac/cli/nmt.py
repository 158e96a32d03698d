"""`gradvac nmt`: multilingual translation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradvac.cli._common import load_nmt, require_run, run_folder, tells_mistakes
from gradvac.nmt import Translator, cleaning, export_run, score_run, train_translation
from gradvac.nmt import prepare as prepare_data
from gradvac.training import Display

app = typer.Typer(help="Multilingual translation.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in optimizer.lr=5e-4")
]
Weights = Annotated[str, typer.Option(help="best, last, averaged, or a step.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Run = Annotated[Path, typer.Argument(help="A run folder.")]


@app.command()
@tells_mistakes
def prepare(
    config: Annotated[str, typer.Argument(help="A TOML file, the name of one, or a run folder.")],
    overrides: Overrides = None,
) -> None:
    """Clean text, learn the vocabulary, and write token files; only what is not there yet."""
    settings = load_nmt(config, overrides or [])
    console = Console(highlight=False)
    prepared = prepare_data(settings.data, say=lambda message: console.print(message, markup=False))
    console.print(cleaning.table(prepared.reports()))
    console.print(
        f"{len(prepared.vocabulary):,} pieces; everything is in {prepared.folder}, what was "
        "dropped in report.json.",
        soft_wrap=True,
    )


@app.command()
@tells_mistakes
def train(
    config: Annotated[str, typer.Argument(help="A TOML file, the name of one, or a run folder.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder; default: runs/NAME-OF-CONFIG.")
    ] = None,
) -> None:
    """Train, or continue a run that was interrupted."""
    settings = load_nmt(config, overrides or [])
    result = train_translation(settings, run_folder(config, run), display=Display())
    if result.reason == "interrupted":
        raise typer.Exit(130)


@app.command()
@tells_mistakes
def translate(
    run: Run,
    overrides: Overrides = None,
    to: Annotated[
        str | None, typer.Option(help="Code of the target language; may be left out if single.")
    ] = None,
    weights: Weights = "best",
    device: Device = "auto",
    window: Annotated[
        int, typer.Option(help="Lines read before any is translated; 1 on a terminal.", min=1)
    ] = 1024,
) -> None:
    """Translate standard input to standard output, line by line."""
    translator = Translator.from_run(
        require_run(run), weights=_weights(weights), device=device, overrides=overrides or []
    )
    if to is None and len(translator.targets) > 1:
        raise ValueError(f"--to: choose one of {', '.join(translator.targets)}.")
    target = translator.targets[0] if to is None else to
    undecodable = [0]
    lines = translator.stream(
        _input_lines(undecodable), target, window=1 if sys.stdin.isatty() else window
    )
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    counts = translator.counts
    for number, what in (
        (counts.cut, "were longer than data.max_tokens; only their beginning was translated"),
        (counts.empty, "were empty"),
        (undecodable[0], "were not UTF-8; what could not be read was replaced"),
    ):
        if number:
            print(f"{number:,} of {counts.lines:,} lines {what}.", file=sys.stderr)


def _input_lines(undecodable: list[int]) -> Iterator[str]:
    for raw in sys.stdin.buffer:
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            line = raw.decode(errors="replace")
            undecodable[0] += 1
        yield line.rstrip("\r\n")


@app.command()
@tells_mistakes
def score(
    run: Run,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option("--set", help="test, dev, or an extra set.")] = "test",
    weights: Weights = "best",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Translate a set and score it with BLEU and chrF++; keep both in the run folder."""
    scores = score_run(
        require_run(run),
        split=split,
        weights=_weights(weights),
        device=device,
        overrides=overrides or [],
    )
    if as_json:
        print(json.dumps(scores.to_dict(), ensure_ascii=False, indent=1))
    else:
        Console(highlight=False).print(scores.table())


@app.command()
@tells_mistakes
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[str, typer.Option(help="huggingface or ctranslate2.")] = "huggingface",
    weights: Weights = "best",
    quantization: Annotated[
        str | None, typer.Option(help="ctranslate2: int8, float16, ...; default: none.")
    ] = None,
) -> None:
    """Write the model as Hugging Face or CTranslate2 read it; a source starts with <2xx>."""
    made = export_run(
        require_run(run), folder, to=to, weights=_weights(weights), quantization=quantization
    )
    print(f"{made} is ready; write sources as `<2xx> text`, xx being the target language.")


def _weights(name: str) -> str | int:
    return int(name) if name.isdigit() else name
