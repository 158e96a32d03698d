"""Large vocabularies: a training step with GradVac over the plain one, in time and memory.

    python benchmarks/vocabulary.py                              # GPU: 64k and 256k, 8 to 100 tasks
    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py --tiny     # CPU: the same, tiny
    python benchmarks/vocabulary.py --kinds lookup --rows 256000 --tasks 100 --width 64

`tied`: one table is looked up and is the head; `untied`: two tables; `lookup`: a table and a small
head. Between them are a few layers. Tokens are drawn so that a few are frequent, as in text. A step
is forward, backward and AdamW, under bf16 autocast on a GPU; rows of tasks are interleaved. Modes
follow each other, and a ratio is that of the shortest of `--rounds` steps, by the processor's clock
without a GPU. Memory is the peak of ordinary steps, parameters and the optimizer's state included.
`--table-bytes` sets `Aligner`'s limit, above which task gradients of a table are never built.
"""

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from memory import peak
from torch import Tensor, nn

from gradvac import Aligner, GradVac

KINDS = ("tied", "untied", "lookup")
WARMUP = 11  # the first probes are over then
Backward = Callable[[Tensor], object]


class Size(NamedTuple):
    """Of a model and its batch."""

    width: int
    layers: int
    rows: int
    tokens: int


FULL, TINY = Size(1024, 4, 128, 32), Size(32, 1, 104, 4)


class Model(nn.Module):
    def __init__(self, kind: str, num_rows: int, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, size.width)
        nn.init.normal_(self.table.weight, std=size.width**-0.5)
        layers = [self._layer(size.width) for _ in range(size.layers)]
        self.body = nn.Sequential(*layers, nn.LayerNorm(size.width))
        self.head = nn.Linear(size.width, 8 if kind == "lookup" else num_rows, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight

    @staticmethod
    def _layer(width: int) -> nn.Module:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.body(self.table(tokens)))
        labels = tokens.roll(-1, 1) % logits.shape[-1]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(tokens.shape).mean(1)


class Trainer:
    """One way to train; `backward` takes the losses of rows."""

    def __init__(self, model: Model, tokens: Tensor, backward: Backward) -> None:
        self.model, self._tokens, self._backward = model, tokens, backward
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(self) -> None:
        device = self._tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = self.model(self._tokens)
        self._backward(losses)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self) -> float:
        clock = time.perf_counter if self._tokens.is_cuda else time.process_time
        start = clock()
        self.step()
        if self._tokens.is_cuda:
            torch.cuda.synchronize()
        return clock() - start

    def gib(self) -> float:
        """The peak of a step."""
        if self._tokens.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() / 2**30
        held = 3 * sum(parameter.nbytes for parameter in self.model.parameters())
        return (held + peak(self.step)) / 2**30


def measure(
    kind: str, num_rows: int, num_tasks: int, size: Size, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Seconds and peak, of plain training and of GradVac."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokens = (num_rows * torch.rand(size.rows, size.tokens) ** 3).long().to(device)
    tasks = [str(task) for task in range(num_tasks)]
    of_rows = [row % num_tasks for row in range(size.rows)]
    found: dict[str, dict[str, float]] = {}
    for mode in ("plain", "gradvac"):  # one after the other: two models would not always fit
        gc.collect()
        with torch.device(device):
            model = Model(kind, num_rows, size)
        if mode == "plain":
            trainer = Trainer(model, tokens, lambda losses: losses.sum().backward())
        else:
            limit = {} if args.table_bytes is None else {"table_bytes": args.table_bytes}
            aligner = Aligner(model, tasks, GradVac(), engine="one_backward", **limit)
            trainer = Trainer(
                model, tokens, lambda losses, own=aligner: own.backward(losses, of_rows)
            )
        for _ in range(2 if mode == "plain" else WARMUP):
            trainer.step()
        times = [trainer.seconds() for _ in range(args.rounds)]
        found[mode] = {"seconds": min(times), "gib": trainer.gib()}
        del model, trainer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rows", nargs="+", type=int, help="of the table")
    parser.add_argument("--tasks", nargs="+", type=int, default=[8, 25, 100])
    parser.add_argument("--width", type=int)
    parser.add_argument("--table-bytes", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    size = TINY if args.tiny else FULL
    size = size._replace(width=args.width or size.width)
    results = []
    print("| table | rows | tasks | plain ms | time | plain GiB | memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in args.kinds:
        for num_rows in args.rows or ([8_000, 32_000] if args.tiny else [64_000, 256_000]):
            for num_tasks in args.tasks:
                found = measure(kind, num_rows, num_tasks, size, args)
                plain, own = found["plain"], found["gradvac"]
                results.append({"kind": kind, "rows": num_rows, "tasks": num_tasks, **found})
                print(
                    f"| {kind} | {num_rows} | {num_tasks} | {1e3 * plain['seconds']:.1f} | "
                    f"{own['seconds'] / plain['seconds']:.2f} | {plain['gib']:.2f} | "
                    f"{own['gib'] / plain['gib']:.2f} |",
                    flush=True,
                )
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1), "utf-8")


if __name__ == "__main__":
    main()
