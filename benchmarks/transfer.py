"""Do the constructed languages behave like languages? Who helps a low-resource language, and how.

    python benchmarks/transfer.py --seeds 3 --steps 1500 --jobs 3

Trains en-xx for Marvene (qsm) with 800 pairs: alone, together with 6,000 pairs of an unrelated
language (Kinaba, qnk), and together with 6,000 pairs of its sibling (Ostrel, qso); same model, same
steps. `test` sentences are new; `novel` ones hold combinations of words that occur in no training
set.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from gradvac.lab.recipes.nmt import (
    NmtConfig,
    Translator,
    open_corpus,
    score_lines,
    train_translation,
)
from gradvac.lab.training import Display

LOW, SIBLING, STRANGER = "qsm", "qso", "qnk"
SETTINGS = {"alone": [LOW], "with a stranger": [LOW, STRANGER], "with its sibling": [LOW, SIBLING]}
SPLITS = ("test", "novel")


def config(languages: list[str], folder: Path, *, seed: int, steps: int) -> NmtConfig:
    return NmtConfig.model_validate(
        {
            "data": {
                "prepared": folder / "data",
                "languages": languages,
                "train": "constructed:train",
                "dev": "constructed:dev",
                "test": "constructed:test",
                "extra": {"novel": "constructed:novel"},
                "limit": {code: 800 if code == LOW else 6000 for code in languages},
                "vocabulary": {"size": 1500},
                "max_tokens": 100,
            },
            "model": {"size": "tiny", "width": 128, "inner": 512, "heads": 4, "dropout": 0.2},
            "batch": {"tokens": 2048},
            "train": {"max_steps": steps, "validate_every": steps // 5, "seed": seed},
            "optimizer": {"lr": 2e-3, "warmup_steps": steps // 10},
            "align": {"rule": "sum"},
        }
    )


def run(name: str, seed: int, steps: int) -> dict[str, object]:
    """BLEU of the low-resource language on every split."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = config(SETTINGS[name], Path(folder), seed=seed, steps=steps)
        prepared = open_corpus(settings.data)
        train_translation(settings, Path(folder) / "run", display=Display(quiet=True))
        translator = Translator.from_run(Path(folder) / "run")
        bleu = {}
        for split in SPLITS:
            source, reference = prepared.task_text(split, f"en-{LOW}")
            said = translator.translate(source[:500], LOW)
            bleu[split] = score_lines(said, reference[:500], LOW).bleu
    return {"setting": name, "seed": seed, **bleu}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    args = parser.parse_args()
    work = [(name, seed, args.steps) for seed in range(args.seeds) for name in SETTINGS]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(run, *zip(*work, strict=True)))
    print(f"\n{LOW}, 800 pairs, {args.steps} steps, {args.seeds} seeds: BLEU, mean (sd)")
    print(f"{'':18}" + "".join(f"{split:>16}" for split in SPLITS))
    for name in SETTINGS:
        shown = ""
        for split in SPLITS:
            values = [float(row[split]) for row in rows if row["setting"] == name]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            shown += f"{statistics.mean(values):9.1f} ({spread:4.1f})"
        print(f"{name:18}{shown}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
