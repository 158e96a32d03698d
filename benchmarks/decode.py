"""Translations a second: ours, and Hugging Face's `generate` with the same weights.

    python benchmarks/decode.py --run RUN --source test.en --reference test.de --to de
    python benchmarks/decode.py --train 1500 --root DATA --to de      (trains on the verses first)

The run is exported as a Pegasus model. Both translate the same lines, sorted by length; `generate`
in batches of several sizes, with and without cuDNN's attention (which plans anew for every length
of the text), of which the best counts. On a GPU both have weights in bf16, and ours is timed with
steps recorded as CUDA graphs too (`decoding.cuda_graph`). Equality
is looked at twice: in float32 without length penalty and with the same limit for every sentence,
where both searches are the same, and as timed, where both are scored by BLEU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from gradvac.lab.recipes.nmt import (
    NmtConfig,
    Translator,
    export_run,
    score_lines,
    train_translation,
)
from gradvac.lab.recipes.nmt.export import make_pegasus
from gradvac.lab.recipes.nmt.vocabulary import EOS
from gradvac.lab.training import config

CONFIGS = Path(__file__).parents[1] / "configs" / "nmt"


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Do something, and say how long it took."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


class EndsInTime:
    """Lets every sentence end at a limit of its own, as ours do; `generate` has one for a batch.

    A model that has learned little repeats itself to the limit.
    """

    def __init__(self, limits: list[int], beams: int) -> None:
        self._limits = torch.tensor(limits).repeat_interleave(beams)

    def __call__(self, said: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        must_end = (self._limits <= said.shape[1]).to(scores.device)[:, None]
        others = torch.arange(scores.shape[1], device=scores.device) != EOS
        return scores.masked_fill(must_end & others, -torch.inf)


def generate(
    model: Any,
    translator: Translator,
    lines: list[str],
    to: str,
    *,
    batch: int,
    beams: int,
    p: float,
    limited: bool = False,
) -> list[str]:
    """Translate with Hugging Face, longest lines first; `limited`: each with a limit of its own."""
    vocabulary, most = translator.vocabulary, translator.max_tokens
    sources = [[vocabulary.tag(to), *own[:most], EOS] for own in vocabulary.encode(lines)]
    order = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
    said = [""] * len(sources)
    for start in range(0, len(order), batch):
        own = order[start : start + batch]
        longest = len(sources[own[0]])
        ids = torch.zeros(len(own), longest, dtype=torch.int64)
        for row, number in enumerate(own):
            ids[row, : len(sources[number])] = torch.tensor(sources[number])
        ids = ids.to(model.device)
        limits = [2 * (len(sources[number]) - 2) + 10 for number in own]
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=(ids != 0).long(),
                num_beams=beams,
                length_penalty=p,
                early_stopping=beams > 1,
                max_new_tokens=limits[0]
                + limited,  # at its own it forces an end that costs nothing
                logits_processor=[EndsInTime(limits, beams)] if limited else [],
                max_length=None,
                suppress_tokens=vocabulary.unspeakable,
                do_sample=False,
            )
        for number, tokens in zip(own, found.tolist(), strict=True):
            kept = tokens[1:]
            said[number] = vocabulary.decode(kept[: kept.index(EOS)] if EOS in kept else kept)
    return said


def train_run(arguments: argparse.Namespace, folder: Path) -> tuple[Path, list[str], list[str]]:
    """A model that has learned enough to end its sentences; test lines and their references."""
    overrides = [
        f"data.prepared={arguments.prepared or folder.with_name('prepared')}",
        f"data.root={arguments.root}",
        f"model.size={arguments.size}",
        f"train.max_steps={arguments.train}",
        f"optimizer.warmup_steps={max(1, arguments.train // 5)}",
        "train.validate_every=0",
        "train.writers=[]",
        *arguments.override,
    ]
    settings = config.load(NmtConfig, CONFIGS / "bible.toml", overrides)
    _, seconds = timed(lambda: train_translation(settings, folder))
    print(f"trained {arguments.train} steps in {seconds:.0f} s", flush=True)
    text = settings.data.prepared / "text"
    pair = f"{settings.data.pivot}-{arguments.to}"
    names = (f"test.{pair}.{code}" for code in pair.split("-"))
    sources, references = ((text / name).read_text().splitlines() for name in names)
    return folder, sources, references


def ctranslate(
    run: Path, weights: str, beams: int, sources: list[str], to: str
) -> tuple[dict[str, float], float]:
    """Lines a second of CTranslate2 on this CPU, and its share of equal text without penalty."""
    import ctranslate2

    plain = [f"decoding.beams={beams}", "decoding.length_penalty=0.0", "train.precision=fp32"]
    ours = Translator.from_run(run, weights=weights, overrides=plain, device="cpu")
    vocabulary = ours.vocabulary
    pieces = vocabulary.pieces()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    with tempfile.TemporaryDirectory() as folder:
        made = export_run(run, Path(folder) / "model", to="ctranslate2", weights=weights)
        threads = torch.get_num_threads()
        theirs = ctranslate2.Translator(str(made), device="cpu", intra_threads=threads)

        def translate() -> list[str]:
            encoded = vocabulary.encode(sources)
            tokens = [[f"<2{to}>", *(pieces[n] for n in own), "</s>"] for own in encoded]
            found = theirs.translate_batch(
                tokens,
                beam_size=beams,
                length_penalty=0.0,
                max_batch_size=64,
                suppress_sequences=[[pieces[n]] for n in vocabulary.unspeakable],
            )
            return [vocabulary.decode([numbers[t] for t in own.hypotheses[0]]) for own in found]

        translate()
        lines, seconds = timed(translate)
    own, own_seconds = timed(partial(ours.translate, sources, to))
    speed = {"ctranslate2, lines/s": len(sources) / seconds, "ours": len(sources) / own_seconds}
    return speed, same(own, lines)


def same(ours: list[str], theirs: list[str]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def compare(
    run: Path,
    weights: str,
    beams: int,
    sources: list[str],
    references: list[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Time both with some beams."""
    to, chosen = arguments.to, [f"decoding.beams={beams}"]
    chosen += [given for given in arguments.override if given.startswith("decoding.")]
    plain = [*chosen, "decoding.length_penalty=0.0", "train.precision=fp32"]
    exact = Translator.from_run(run, weights=weights, overrides=plain)
    pegasus = make_pegasus(exact.model, longest=1024, decoding=exact.settings)
    few = sources[: arguments.equal_lines]
    theirs = generate(
        pegasus, exact, few, to, batch=arguments.batches[0], beams=beams, p=0.0, limited=True
    )
    equal = same(exact.translate(few, to), theirs)
    as_written = [*chosen, "decoding.cuda_graph=false"]
    translator = Translator.from_run(run, weights=weights, overrides=as_written)
    work = partial(translator.translate, sources, to)
    _, first = timed(work)
    ours, our_seconds = min((timed(work) for _ in range(3)), key=itemgetter(1))
    recorded, recorded_seconds = {}, float("nan")
    if torch.cuda.is_available():
        pegasus = pegasus.bfloat16()
        graphs = [*chosen, "decoding.cuda_graph=true"]
        with_graphs = Translator.from_run(run, weights=weights, overrides=graphs)
        work = partial(with_graphs.translate, sources, to)
        _, first_recorded = timed(work)
        lines, recorded_seconds = min((timed(work) for _ in range(3)), key=itemgetter(1))
        recorded = {
            "as graphs, lines/s": len(sources) / recorded_seconds,
            "as graphs, first call": len(sources) / first_recorded,
            "as graphs, equal text": same(lines, ours),
        }
    theirs_with = partial(
        generate, pegasus, exact, sources, to, beams=beams, p=translator.settings.length_penalty
    )
    found = {}
    for cudnn, batch in product((True, False), arguments.batches):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if batch == arguments.batches[0]:
            theirs_with(batch=batch)  # warm
        found[batch, cudnn] = timed(partial(theirs_with, batch=batch))
        speed = f"{len(sources) / found[batch, cudnn][1]:.0f}/s"
        print(f"generate, beam {beams}, batch {batch}, cuDNN {cudnn}: {speed}", flush=True)
    batch, cudnn = min(found, key=lambda way: found[way][1])
    theirs, seconds = found[batch, cudnn]
    return {
        "beams": beams,
        "lines": len(sources),
        "ours, lines/s": len(sources) / our_seconds,
        "ours, first call": len(sources) / first,
        **recorded,
        "generate, lines/s": len(sources) / seconds,
        "its best batch": batch,
        "with cuDNN": cudnn,
        "ratio": seconds / our_seconds,
        **({"ratio as graphs": seconds / recorded_seconds} if recorded else {}),
        "equal text in float32 without penalty": equal,
        "equal text as timed": same(ours, theirs),
        "BLEU of ours": score_lines(ours, references, to).bleu,
        "BLEU of generate": score_lines(theirs, references, to).bleu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run folder")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--train", type=int, default=0, help="steps to train on the verses first")
    parser.add_argument("--prepared", help="folder of prepared data; default: prepare them")
    parser.add_argument("--root", default=".")
    parser.add_argument("--size", default="small")
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--to", default="de")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256, 512, 1215])
    parser.add_argument("--lines", type=int, default=1215)
    parser.add_argument("--equal-lines", type=int, default=500)
    parser.add_argument("--ctranslate2", action="store_true", help="time it on the CPU too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.train:
            run, sources, references = train_run(arguments, Path(folder) / "run")
            weights = "last"
        else:
            run, weights = arguments.run, "best"
            sources, references = (
                path.read_text(encoding="utf-8").splitlines()
                for path in (arguments.source, arguments.reference)
            )
        most = arguments.lines
        sources, references = sources[:most], references[:most]
        rows = []
        for beams in arguments.beams:
            rows.append(compare(run, weights, beams, sources, references, arguments))
            if arguments.ctranslate2:
                speed, equal = ctranslate(run, weights, beams, sources, arguments.to)
                rows[-1] |= speed | {"equal text of ctranslate2, no penalty": equal}
            for name, value in rows[-1].items():
                print(
                    f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}"
                )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
