"""AlignedTrainer against the plain Trainer: the time of a step of the same model in one run.

    python benchmarks/trainer.py                          # BERT-base, batch 32, 12 tasks, bf16
    python benchmarks/trainer.py --lengths 128 --varying  # another length every batch
    python benchmarks/trainer.py --size tiny --cpu        # a try

`recorded` is GradVac as a CUDA graph. Token classification with sentences of one length, random
weights and labels: time depends on none of them. At 128 tokens a fast GPU waits for the host, at
512 it does not: a table for each. The trainers take turns, several rounds each; a ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from gradvac import GradVac, Sum
from gradvac.integrations.transformers import AlignedTrainer

SIZES = {
    "base": {},
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
}


class Clock(TrainerCallback):
    """Seconds per step, after a warm-up."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.seconds = warmup, 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step in (self.warmup, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if state.global_step == state.max_steps:
                self.seconds = (now - self.start) / (state.max_steps - self.warmup)
            self.start = now


class Cut:
    """A collator that cuts every batch to a length of its own, the same ones in every run."""

    def __init__(self, length: int) -> None:
        self._length, self._generator = length, torch.Generator().manual_seed(0)

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        shortest = self._length // 4
        own = int(torch.randint(shortest, self._length + 1, (), generator=self._generator))
        batch = default_data_collator(features)
        return {name: value[:, :own].contiguous() for name, value in batch.items()}


def examples(args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    num = args.batch * (args.warmup + args.steps)
    tokens = torch.randint(5, args.vocabulary, (num, args.length), generator=generator)
    labels = torch.randint(0, 17, (num, args.length), generator=generator)
    mask = torch.ones(args.length, dtype=torch.long)
    return [
        {"input_ids": t, "attention_mask": mask, "labels": y, "task": f"task{n % args.tasks}"}
        for n, (t, y) in enumerate(zip(tokens, labels, strict=True))
    ]


def run(args: argparse.Namespace, name: str, data: list[dict[str, Any]], folder: str) -> Any:
    torch.manual_seed(0)
    config = BertConfig(num_labels=17, vocab_size=args.vocabulary, **SIZES[args.size])
    model = BertForTokenClassification(config)
    clock = Clock(args.warmup)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=args.batch,
        max_steps=args.warmup + args.steps,
        bf16=not args.cpu,
        use_cpu=args.cpu,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    common: dict[str, Any] = {"model": model, "args": arguments, "callbacks": [clock]}
    if args.varying:
        common["data_collator"] = Cut(args.length)
    tasks = [f"task{n}" for n in range(args.tasks)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if name == "plain":
        rows = [{k: v for k, v in one.items() if k != "task"} for one in data]
        trainer: Any = Trainer(train_dataset=rows, **common)
    else:
        rule = Sum() if name == "sum" else GradVac()
        common |= {"tasks": tasks, "rule": rule, "engine": args.engine}
        trainer = AlignedTrainer(train_dataset=data, recorded=name == "recorded", **common)
    trainer.train()
    engine = "-" if name == "plain" else trainer.aligner.engine
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return clock.seconds, engine, memory


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All trainers on sentences of one length."""
    data = examples(args)
    names = ["plain", "sum", "gradvac", *([] if args.cpu or args.varying else ["recorded"])]
    found: dict[str, list[Any]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, times in found.items():
                times.append(run(args, name, data, folder))
    plain = [seconds for seconds, _, _ in found["plain"]]
    print(f"{args.batch} sentences of {args.length} tokens, {args.tasks} tasks")
    print(f"{'trainer':10} {'ms/step':>9} {'ratio':>7} {'GiB':>7}  engine")
    table = {}
    for name, times in found.items():
        ratio = statistics.median(t[0] / p for t, p in zip(times, plain, strict=True))
        median = statistics.median(t[0] for t in times)
        memory = max(t[2] for t in times)
        table[name] = {"ms": 1000 * median, "ratio": ratio, "engine": times[-1][1], "gib": memory}
        print(f"{name:10} {1000 * median:9.2f} {ratio:7.3f} {memory:7.2f}  {times[-1][1]}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=30_522)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--varying", action="store_true", help="another length every batch")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, help="write JSON there")
    args = parser.parse_args()
    tables = {}
    for length in args.lengths:
        tables[length] = compare(argparse.Namespace(**vars(args), length=length))
    if args.out is not None:
        settings = {k: str(v) for k, v in vars(args).items()}
        found = {"settings": settings, "lengths": tables}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
