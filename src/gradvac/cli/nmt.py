"""`gradvac nmt`: multilingual translation."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradvac.cli.common import (
    AsJson,
    Device,
    Into,
    Run,
    Source,
    Weights,
    given_run,
    load_config,
    needs,
    require_run,
    serve,
    train_run,
    utf8_output,
    weights_of,
)
from gradvac.tasks import Direction

_STDIN = Path("-")
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+\s*=")
app = typer.Typer(help="Multilingual translation.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in optimizer.lr=5e-4")
]
SearchOverrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in decoding.beams=8")
]


@app.command("prepare")
@needs("nmt")
def _prepare(
    config: Source,
    overrides: Overrides = None,
) -> None:
    """Clean text, learn the vocabulary, and write token files; existing results are kept."""
    from gradvac.lab.recipes.nmt.cleaning import report_table
    from gradvac.lab.recipes.nmt.preparation import prepare_corpus

    settings = load_config("nmt", config, overrides)
    prepared = prepare_corpus(settings.data)
    console = Console(highlight=False, markup=False)
    console.print(report_table(prepared.reports()))
    console.print(
        f"{len(prepared.vocabulary):,} pieces; everything is in {prepared.folder}, what was "
        "dropped in report.json.",
        soft_wrap=True,
    )


@app.command("train")
@needs("nmt")
def _train(
    config: Source,
    overrides: Overrides = None,
    run: Into = None,
) -> None:
    """Train, or continue a run that was interrupted."""
    train_run("nmt", config, overrides, run)


@app.command()
@needs("nmt")
def translate(
    run: Run,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, in order (- is standard input); and section.key=value, as in "
            "decoding.beams=8",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Code of the target language; optional if there is only one.")
    ] = None,
    weights: Weights = "best",
    device: Device = "auto",
    window: Annotated[
        int, typer.Option(help="Lines to read before translating; 1 on a terminal.", min=1)
    ] = 4096,
    n_best: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Write so many translations of every line: number of the line ||| text ||| score. "
            "Needs decoding.engine=ctranslate2 and as many decoding.beams.",
        ),
    ] = None,
) -> None:
    """Translate files, or standard input, to standard output, line by line.

    The n best translations of each line:
    translate RUN in.txt --n-best 4 decoding.engine=ctranslate2 decoding.beams=4

    Translations drawn at random:
    translate RUN in.txt decoding.engine=ctranslate2 decoding.beams=1 decoding.sampling_topk=10
    """
    from gradvac.lab.recipes.common.readers import LenientReader
    from gradvac.lab.recipes.nmt import Translator

    overrides = [given for given in inputs or [] if _OVERRIDE.match(given)]
    files = [Path(given) for given in inputs or [] if not _OVERRIDE.match(given)] or [_STDIN]
    _check_files(files)
    output = utf8_output()
    translator = Translator.from_run(**given_run(run, "nmt", weights, device, overrides))
    if to is None and len(translator.targets) > 1:
        raise ValueError(f"--to: choose one of {', '.join(translator.targets)}.")
    target = translator.targets[0] if to is None else to
    reader = LenientReader()
    is_typed = files == [_STDIN] and sys.stdin.isatty()
    window = 1 if is_typed else window
    found = translator.stream(reader.read(files), target, window=window, num=n_best or 1)
    for number, translations in enumerate(found):
        for one in translations:
            shown = one.text if n_best is None else f"{number} ||| {one.text} ||| {one.score:.4f}"
            output.write(f"{shown}\n")
        output.flush()
    counts = translator.counts
    for number, what in (
        (counts.cut, "were longer than data.max_tokens; only their beginning was translated"),
        (counts.empty, "were empty"),
        (reader.num_replaced, "were not UTF-8; what could not be read was replaced"),
    ):
        if number:
            print(f"{number:,} of {counts.lines:,} lines {what}.", file=sys.stderr)


def _check_files(files: list[Path]) -> None:
    """Refuse what cannot be read; pipes can."""
    for path in files:
        if path == _STDIN:
            if sys.stdin is None:
                raise ValueError("standard input is closed; give files to translate.")
        elif path.is_dir():
            raise ValueError(f"{path}: is a folder; give its files.")
        elif not path.exists():
            raise ValueError(
                f"{path}: there is no such file; overrides look like decoding.beams=8."
            )


@app.command("score")
@needs("nmt")
def _score(
    run: Run,
    overrides: SearchOverrides = None,
    split: Annotated[
        str | None, typer.Option("--set", help="test (the default), dev, or an extra set.")
    ] = None,
    weights: Weights = "best",
    device: Device = "auto",
    as_json: AsJson = False,
    source: Annotated[Path | None, typer.Option(help="Score this file instead of a set.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Its reference translation.")] = None,
    from_language: Annotated[
        str | None, typer.Option("--from", help="The language of --source.")
    ] = None,
    to_language: Annotated[
        str | None, typer.Option("--to", help="The language of --reference.")
    ] = None,
    comet: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Score with COMET too: a model's name, as in Unbabel/wmt22-comet-da, or a .ckpt "
            "file. Needs the command comet-score: pipx install unbabel-comet.",
        ),
    ] = "",
) -> None:
    """Translate a set and score it; keep translations and scores in the run folder.

    Scores are BLEU, chrF++ and the share of translations that look like
    another language than the target, with the same share of the references
    beside it: so often the guess errs. `gradvac compare --metric "wrong
    language"` tests it between runs.

    With --source, --reference, --from and --to it scores any two files, and keeps nothing.
    """
    from gradvac.lab.recipes.nmt import score_files, score_translation
    from gradvac.utils.hints import log_to

    asked = given_run(run, "nmt", weights, device, overrides)
    given = (source, reference, from_language, to_language)
    if any(value is not None for value in given):
        if source is None or reference is None or from_language is None or to_language is None:
            raise ValueError("--source, --reference, --from and --to go together.")
        if split is not None:
            raise ValueError("--set: is for the run's own sets; leave it out with --source.")
        with log_to(lambda message: print(message, file=sys.stderr)):
            direction = Direction(from_language, to_language).name
            scored, _ = score_files(
                source=source, reference=reference, direction=direction, comet=comet, **asked
            )
        if as_json:
            print(json.dumps(asdict(scored), ensure_ascii=False, indent=1), file=utf8_output())
        else:
            print(f"BLEU {scored.bleu:.1f}  {scored.bleu_signature}")
            print(f"chrF++ {scored.chrf:.1f}  {scored.chrf_signature}")
            if scored.comet is not None:
                print(f"COMET {scored.comet:.1f}  {comet}")
            if scored.wrong_language is not None:
                print(
                    f"wrong language {scored.wrong_language:.1f} % "
                    f"(of references {scored.wrong_references:.1f} %)"
                )
            print(f"{scored.num_lines:,} sentences")
        return
    scores = score_translation(**asked, split=split or "test", comet=comet)
    if as_json:
        print(json.dumps(scores.to_dict(), ensure_ascii=False, indent=1), file=utf8_output())
    else:
        console = Console(highlight=False, markup=False)
        console.print(scores.table())
        for note in scores.notes():  # not in the table, which would break signatures to its width
            console.print(note, soft_wrap=True)


@app.command("serve")
@needs("nmt")
def _serve(
    run: Run,
    overrides: SearchOverrides = None,
    weights: Weights = "best",
    device: Device = "auto",
    port: Annotated[int, typer.Option(help="The port; 0: any free one.", min=0, max=65535)] = 8000,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve a page to type into, on this machine alone; the model stays loaded.

    Programs send JSON and get the translations of the lines back:

    curl localhost:8000/translate -H "Content-Type: application/json"
    -d '{"lines": ["a dog"], "to": "fr"}'
    """
    from gradvac.lab.recipes.nmt.serve import serve_translator
    from gradvac.lab.recipes.nmt.translator import Translator

    translator = Translator.from_run(**given_run(run, "nmt", weights, device, overrides))
    served = serve_translator(translator, str(run), port=port)
    serve(served, "translates what you type", show=show)


@app.command()
@needs("nmt", "export")
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[str, typer.Option(help="huggingface or ctranslate2.")] = "huggingface",
    weights: Weights = "best",
    quantization: Annotated[
        str | None, typer.Option(help="ctranslate2: int8, float16, ...; default: none.")
    ] = None,
) -> None:
    """Write the model for Hugging Face or CTranslate2; every source starts with <2xx>."""
    from gradvac.lab.recipes.nmt import export_run

    made = export_run(
        require_run(run, "nmt"),
        folder,
        to=to,
        weights=weights_of(weights),
        quantization=quantization,
    )
    print(f"{made} is ready; write sources as `<2xx> text`, xx being the target language.")
