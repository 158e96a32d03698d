"""Sentence pairs per second that preparation cleans and cuts, and the memory it takes.

    python benchmarks/prepare.py --pairs 1000000 5000000
    python benchmarks/prepare.py --pairs --shards 200       (only the start-up of 25 languages)

Constructed sentence pairs are written to files first. Each size is prepared in a process of its
own, whose peak is that of its own memory (anonymous pages), those of its workers not included. Then
the time to open the result and draw the first batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from gradvac.lab.recipes.nmt import PreparedCorpus, Stream, TaskData, prepare_corpus
from gradvac.lab.recipes.nmt.settings import BatchConfig, DataConfig
from gradvac.lab.recipes.nmt.tokens import TokenShards
from gradvac.lab.training import SamplingConfig
from gradvac.utils.hints import log_to


def write_corpus(folder: Path, pairs: int) -> None:
    """Sentences of random words; one in twenty comes twice."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abdefgiklmnoprstuvz", k=draw.randint(2, 9))) for _ in range(20_000)
    ]
    turned = {word: word[::-1].title() for word in words}
    for split, number in (("dev", 500), ("train", pairs)):
        with (
            (folder / f"{split}.en").open("w") as left,
            (folder / f"{split}.xx").open("w") as right,
        ):
            line = ["a"]
            for count in range(number):
                if count % 20:
                    line = draw.choices(words, k=draw.randint(4, 30))
                left.write(" ".join(line) + "\n")
                right.write(" ".join(turned.get(word, word) for word in line) + "\n")


def settings(folder: Path, prepared: Path, processes: int) -> DataConfig:
    text = {
        "prepared": str(prepared),
        "root": str(folder),
        "languages": ["xx"],
        "train": "train.{lang}",
        "dev": "dev.{lang}",
        "processes": processes,
        "vocabulary": {"size": 4000, "max_lines": 100_000},
    }
    return DataConfig.model_validate_json(json.dumps(text))


def anonymous() -> int:
    """Own memory of this process, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return 0


def measure(folder: Path, prepared: Path, processes: int) -> dict[str, float]:
    """Prepare once, in this process."""
    peak, done = [anonymous()], threading.Event()
    start_memory = peak[0]

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(max(peak.pop(), anonymous()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    stages: dict[str, float] = {}
    start = time.perf_counter()

    def say(message: str) -> None:
        stages[message] = time.perf_counter() - start

    config = settings(folder, prepared, processes)
    with log_to(say):
        prepare_corpus(config)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    start = time.perf_counter()
    opened = PreparedCorpus.open(config)
    assert opened is not None
    sources, targets = opened.task_tokens("train", "en-xx")
    task = TaskData("en-xx", sources, targets, opened.vocabulary.tag("xx"))
    stream = Stream([task], SamplingConfig(), BatchConfig(tokens=16_384))
    next(stream)
    learn = [value for name, value in stages.items() if name.startswith("Learning")]
    cut = [value for name, value in stages.items() if name.startswith("Tokenising")]
    return {
        "seconds": seconds,
        "seconds learning": cut[0] - learn[0],
        "peak MiB": peak[0] / 1024,
        "MiB before": start_memory / 1024,
        "start-up seconds": time.perf_counter() - start,
    }


def start_up(folder: Path, num_shards: int, num_tasks: int = 25) -> dict[str, float]:
    """CPU seconds to the first batch, from shards of a million pairs (all are one file, linked)."""
    size, length = 1_000_000, 20
    np.save(folder / "o.npy", np.arange(size + 1, dtype=np.int64) * length)
    draw = np.random.default_rng(0)
    draw.integers(9, 30_000, size * length, dtype=np.uint16).tofile(folder / "t")
    shards = [f"{task}.{shard}" for task in range(num_tasks) for shard in range(num_shards)]
    names = [f"{shard}.{side}" for shard in shards for side in "ab"]
    for name in names:
        os.link(folder / "o.npy", folder / f"{name}.offsets.npy")
        os.link(folder / "t", folder / f"{name}.bin")
    start = time.process_time()
    tasks = []
    for task in range(num_tasks):
        sides = [
            TokenShards(
                [folder / f"{task}.{shard}.{side}" for shard in range(num_shards)],
                [size] * num_shards,
                size * length * num_shards,
                32_000,
            )
            for side in "ab"
        ]
        tasks.append(TaskData(f"en-{task}", sides[0], sides[1], 4 + task))
    stream = Stream(tasks, SamplingConfig(), BatchConfig(tokens=16_384), packed=True)
    next(stream)
    return {"shards": float(len(names)), "start-up CPU seconds": time.process_time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, nargs="*", default=[1_000_000, 5_000_000])
    parser.add_argument("--shards", type=int, help="shards of each of 25 languages, to start from")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--one", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.processes)))
        return
    rows: list[dict[str, float]] = []
    if arguments.shards:
        with tempfile.TemporaryDirectory() as place:
            rows.append(start_up(Path(place), arguments.shards))
            print(rows[-1], flush=True)
    for pairs in arguments.pairs:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_corpus(folder, pairs)
            command = [sys.executable, __file__, "--one", place, str(folder / "prepared")]
            command += ["--processes", str(arguments.processes)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = {"pairs": pairs, **json.loads(out.splitlines()[-1])}
        row["pairs/s"] = pairs / (row["seconds"] - row["seconds learning"])
        rows.append(row)
        print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
