"""`gradvac tagging`: parts of speech and named entities in many languages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
    train_run,
    utf8_output,
)

app = typer.Typer(help="Tagging: parts of speech, named entities.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in optimizer.lr=5e-5")
]
RunOverrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as in batch.score_rows=64")
]


@app.command("prepare")
@needs("tagging")
def _prepare(config: Source, overrides: Overrides = None) -> None:
    """Read tagged files, check labels, and cut words into sub-words; report what was found."""
    from gradvac.lab.recipes.tagging import prepare_sentences

    settings = load_config("tagging", config, overrides)
    prepared = prepare_sentences(settings)
    console = Console(highlight=False, markup=False)
    shown = Table(title="What was read", title_justify="left")
    for column in ("set", "language"):
        shown.add_column(column)
    for column in ("sentences", "words", "windows"):
        shown.add_column(column, justify="right")
    shown.add_column("also", overflow="fold")
    for name, counts in prepared.read_report().items():
        numbers = [f"{counts[key]:,}" for key in ("sentences", "words", "windows")]
        shown.add_row(*name.split(" ", 1), *numbers, _also(counts))
    console.print(shown)
    console.print(f"Everything is in {prepared.folder}.", soft_wrap=True)


def _also(counts: dict[str, object]) -> str:
    """What else was counted, in one cell."""
    unseen = counts.pop("labels never seen", None)
    rest = {k: v for k, v in counts.items() if k not in ("sentences", "words", "windows")}
    counted = [f"{count:,} {what}" for what, count in rest.items()]
    if isinstance(unseen, list) and unseen:
        counted.append(f"labels never seen: {', '.join(unseen)}")
    return "; ".join(counted)


@app.command("train")
@needs("tagging")
def _train(config: Source, overrides: Overrides = None, run: Into = None) -> None:
    """Fine-tune an encoder on all languages jointly, or continue a run that was interrupted."""
    train_run("tagging", config, overrides, run)


@app.command()
@needs("tagging")
def predict(
    run: Run,
    overrides: RunOverrides = None,
    weights: Weights = "best",
    device: Device = "auto",
    columns: Annotated[
        bool, typer.Option("--columns", help="Write word and tag in two columns.")
    ] = False,
    repaired: Annotated[
        bool, typer.Option("--repair", help="Make every entity begin with B-, as IOB2 requires.")
    ] = False,
    window: Annotated[int, typer.Option(help="Lines to read before tagging.", min=1)] = 1024,
) -> None:
    """Tag standard input, one sentence of words per line; write one line of tags for each."""
    from gradvac.lab.recipes.common.readers import LenientReader
    from gradvac.lab.recipes.tagging import Tagger, repair

    if sys.stdin is None:
        raise ValueError("standard input is closed; there is nothing to tag.")
    output = utf8_output()
    tagger = Tagger.from_run(**given_run(run, "tagging", weights, device, overrides))
    num_empty = num_lines = 0
    reader = LenientReader()
    for block in _blocks(reader.read([Path("-")]), window):
        for words, tags in zip(block, tagger.tag(block), strict=True):
            shown = repair(tags) if repaired else tags
            num_lines += 1
            num_empty += not words
            if columns:
                pairs = zip(words, shown, strict=True)
                output.write("".join(f"{word}\t{tag}\n" for word, tag in pairs) + "\n")
            else:
                output.write(" ".join(shown) + "\n")
        output.flush()
    remarks = {f"{name}": count for name, count in tagger.counts.items() if count}
    remarks |= {"lines without words": num_empty} if num_empty else {}
    replaced = reader.num_replaced
    remarks |= {"lines that were not UTF-8, with marks": replaced} if replaced else {}
    for name, count in remarks.items():
        print(f"{count:,} {name} ({num_lines:,} lines).", file=sys.stderr)


def _blocks(lines: Iterable[str], window: int) -> Iterator[list[list[str]]]:
    """Lines of words, which only blanks and tabs separate."""
    block: list[list[str]] = []
    for line in lines:
        block.append(re.findall("[^ \t\r\n]+", line))
        if len(block) == window:
            yield block
            block = []
    if block:
        yield block


@app.command("score")
@needs("tagging")
def _score(
    run: Run,
    overrides: RunOverrides = None,
    split: Annotated[str, typer.Option("--set", help="test or dev.")] = "test",
    weights: Weights = "best",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Tag a set and score it: F1 as conlleval and XTREME count it, and accuracy."""
    from gradvac.lab.recipes.tagging import score_tagging

    console = Console(highlight=False, markup=False)
    asked = given_run(run, "tagging", weights, device, overrides)
    scores = score_tagging(**asked, split=split, console=None if as_json else console)
    if as_json:
        print(json.dumps(scores.to_dict(), ensure_ascii=False, indent=1), file=utf8_output())
    else:
        console.print(scores.table())
