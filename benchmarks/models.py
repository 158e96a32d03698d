"""Models people bring: a training step with GradVac over the plain joint step, in time and memory.

    python benchmarks/models.py                                  # GPU: all models, 8 and 25 tasks
    python benchmarks/models.py --models bert t5 --tasks 8 --modes eager recorded
    python benchmarks/models.py --models nllb --modes eager --profile 12   # where the time goes
    python benchmarks/models.py --tiny                           # CPU: the same models, tiny

Hugging Face's architectures at the sizes of their published configs, with random weights and data:
nothing is downloaded. A step is forward, backward and AdamW, under bf16 autocast on a GPU; rows of
the tasks are interleaved. `eager` is one_backward over the plain step; `compiled` is one_backward
with `backend="gradvac"` over the plain step with torch.compile; `recorded` is one_backward as a
CUDA graph, over the compiled plain step too, or the eager one where that does not run; `both` is a
compiled model recorded. `--by-layer`
compiles every layer by itself, which takes a fraction of the time. `--padding` gives rows that end
early a mask, as collators do; recorded steps of BERT and T5 need it, because transformers makes no
mask for full rows, but one while it is recorded.

All modes of a model are built first; then they take turns, and a ratio is the median over rounds of
a block of steps each, without waiting for the device between steps, as in training. Memory is the
peak of ordinary steps, `probes` that of all from the third step on, those that verify whose rows
are whose included; both are counted from what was allocated before the model was built.
"""

import argparse
import gc
import json
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from device_profile import kernels_of, show
from step import captured, peak_gib
from torch import Tensor, nn

from gradvac import Aligner, GradVac
from gradvac.engine import compile_tapped

MODES = ("eager", "compiled", "recorded", "both")
RECORDED = ("recorded", "both")
PLAIN = 0  # in place of a number of tasks
WARMUP = 11  # the first probes are over then

TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TINY_BERT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4}


class Size(NamedTuple):
    """Settings of the config, and of the batch: rows, and entries of a row."""

    config: dict[str, Any]
    rows: int
    entries: int


class Batch(NamedTuple):
    """Arguments of the model, and what it should predict."""

    inputs: dict[str, Any]
    labels: Tensor


@dataclass
class Model:
    """An architecture, its sizes, and its data.

    Attributes:
        title: As the table names it.
        name: Its class in transformers, up to what it is for.
        head: What it is for.
        make_batch: A batch for a config, of so many rows and entries.
        full: Its size, as published.
        tiny: A size for a try, and for the host's time alone.
        modes: Those that are of use.
    """

    title: str
    name: str
    head: str
    make_batch: Callable[[Any, int, int], Batch]
    full: Size
    tiny: Size
    modes: tuple[str, ...] = field(default=MODES)

    def build(self, size: Size) -> nn.Module:
        config = getattr(transformers, f"{self.name}Config")(**size.config)
        return getattr(transformers, f"{self.name}For{self.head}")(config).train()


def decoder_batch(config: Any, rows: int, entries: int) -> Batch:
    tokens = torch.randint(5, config.vocab_size, (rows, entries + 1))
    return Batch({"input_ids": tokens[:, :-1], "use_cache": False}, tokens[:, 1:])


def pair_batch(config: Any, rows: int, entries: int) -> Batch:
    source = torch.randint(5, config.vocab_size, (rows, entries))
    target = torch.randint(5, config.vocab_size, (rows, entries + 1))
    inputs = {"input_ids": source, "decoder_input_ids": target[:, :-1], "use_cache": False}
    return Batch(inputs, target[:, 1:])


def tagging_batch(config: Any, rows: int, entries: int) -> Batch:
    tokens = torch.randint(5, config.vocab_size, (rows, entries))
    return Batch({"input_ids": tokens}, torch.randint(0, config.num_labels, (rows, entries)))


def image_batch(config: Any, rows: int, entries: int) -> Batch:
    images = torch.randn(rows, 3, entries, entries)
    return Batch({"pixel_values": images}, torch.randint(0, config.num_labels, (rows,)))


def nllb(title: str, layerdrop: float) -> Model:
    skipped = {"encoder_layerdrop": layerdrop, "decoder_layerdrop": layerdrop}

    def sizes(width: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
        sides = {}
        for side in ("encoder", "decoder"):
            sides[f"{side}_layers"] = layers
            sides[f"{side}_attention_heads"] = heads
            sides[f"{side}_ffn_dim"] = 4 * width
        return {"vocab_size": vocabulary, "d_model": width} | sides | skipped

    return Model(
        *(title, "M2M100", "ConditionalGeneration", pair_batch),
        Size(sizes(1024, 12, 16, 256_206), 64, 64),
        Size(sizes(64, 2, 4, 512), 32, 16),
        modes=("eager", "compiled") if layerdrop else MODES,
    )


MODELS = {
    "llama": Model(
        *("Llama 836 M", "Llama", "CausalLM", decoder_batch),
        Size(
            {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "vocab_size": 32_000,
            },
            *(32, 512),
        ),
        Size(TINY_LLAMA, 32, 16),
        modes=("eager", "compiled"),  # a graph keeps the memory of its step, for every T
    ),
    "t5": Model(
        *("T5-base", "T5", "ConditionalGeneration", pair_batch),
        Size({"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, 64, 128),
        Size(TINY_T5 | {"vocab_size": 512}, 32, 16),
    ),
    "bert": Model(
        *("BERT-base", "Bert", "TokenClassification", tagging_batch),
        Size({"num_labels": 17}, 64, 128),
        Size(TINY_BERT | {"num_labels": 17, "vocab_size": 512}, 32, 16),
    ),
    "vit": Model(
        *("ViT-B", "ViT", "ImageClassification", image_batch),
        Size({"num_labels": 1000}, 128, 224),
        Size(TINY_BERT | {"num_labels": 10, "image_size": 32, "patch_size": 8}, 32, 32),
        modes=("eager", "compiled"),  # transformers makes a mask only while it is recorded
    ),
    "nllb": nllb("NLLB-600M", 0.0),
    "m2m": nllb("NLLB, layerdrop", 0.05),  # layers are skipped at random: new graphs all the time
    "moe": Model(
        *("Qwen3-MoE small", "Qwen3Moe", "CausalLM", decoder_batch),
        Size(
            {
                "hidden_size": 1024,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 768,
                "vocab_size": 32_000,
            },
            *(32, 256),
        ),
        Size(
            TINY_LLAMA
            | {
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            *(32, 16),
        ),
        modes=("eager",),  # experts are chosen by the data
    ),
}


def padding_mask(tokens: Tensor) -> Tensor:
    """Rows of which the first is full, the last half as long."""
    rows, entries = tokens.shape
    lengths = entries - torch.arange(rows) * entries // (2 * rows)
    return (torch.arange(entries) < lengths[:, None]).long()


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    """A row's mean over its entries, over the number of rows: a usual loss, not yet summed."""
    logits = model(**batch.inputs).logits
    losses = F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten(), reduction="none")
    return losses.view(len(batch.labels), -1).mean(1) / len(batch.labels)


def compile_model(model: nn.Module, backend: Any, by_layer: bool) -> nn.Module:
    if not by_layer:
        return torch.compile(model, backend=backend)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(backend=backend)
    return model


class Bench:
    """One model, in the modes and with the numbers of tasks that are compared.

    Args:
        model: The model.
        args: device, tiny, by_layer, rounds, steps.
    """

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self._model, self._args, self._device = model, args, args.device
        self._size = model.tiny if args.tiny else model.full
        self._clock = time.perf_counter if args.device == "cuda" else time.process_time
        self.steps: dict[tuple[str, int], Callable[[], None]] = {}
        self.peaks: dict[tuple[str, int], dict[str, float]] = {}
        self.engines: dict[tuple[str, int], str] = {}

    def prepare(self, mode: str, tasks: list[int]) -> None:
        """Build a model, and a step of it for every number of tasks; `[PLAIN]`: the plain step.

        A step is run until its probes are over, and its memory is read.
        """
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated() / 2**30 if self._device == "cuda" else 0.0
        with torch.device(self._device):
            model = self._model.build(self._size)
            batch = self._model.make_batch(model.config, self._size.rows, self._size.entries)
            if self._args.padding and "input_ids" in batch.inputs:
                batch.inputs["attention_mask"] = padding_mask(batch.inputs["input_ids"])
        called = model
        if mode in ("compiled", "both"):
            backend = "inductor" if tasks == [PLAIN] else compile_tapped
            called = compile_model(model, backend, self._args.by_layer)
        is_cuda = self._device == "cuda"
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=is_cuda, capturable=mode in RECORDED
        )
        for num_tasks in tasks:
            backward = self._backward(called, batch, num_tasks, key=(mode, num_tasks))

            def step(backward: Callable[[], object] = backward) -> None:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(self._device, torch.bfloat16, enabled=is_cuda):
                    backward()
                optimizer.step()

            self._warm_up((mode, num_tasks), step, before)
            optimizer.zero_grad(set_to_none=True)

    def _backward(
        self, model: nn.Module, batch: Batch, num_tasks: int, key: tuple[str, int]
    ) -> Callable[[], object]:
        if num_tasks == PLAIN:
            return lambda: row_losses(model, batch).sum().backward()
        names = [f"task{t}" for t in range(num_tasks)]
        aligner = Aligner(model, names, GradVac(), engine="one_backward")
        rows = [row % num_tasks for row in range(len(batch.labels))]

        def backward() -> None:
            aligner.backward(row_losses(model, batch), rows)
            self.engines[key] = str(aligner).rpartition("engine=")[2].rstrip(")")

        return backward

    def _warm_up(self, key: tuple[str, int], step: Callable[[], None], before: float) -> None:
        for _ in range(2):
            step()
        peak_gib(self._device)
        for _ in range(WARMUP - 2):
            step()
        probes = peak_gib(self._device)
        if key[0] in RECORDED:
            step = captured(step)
        step()
        self.wait()
        ordinary = peak_gib(self._device)
        self.steps[key] = step
        self.peaks[key] = {"gib": ordinary - before, "probes": max(probes, ordinary) - before}

    def block(self, key: tuple[str, int]) -> float:
        """Seconds of a step, in a block of them."""
        self.steps[key]()
        self.wait()
        start = self._clock()
        for _ in range(self._args.steps):
            self.steps[key]()
        self.wait()
        return (self._clock() - start) / self._args.steps

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def compare(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the table per mode and number of tasks; what fails says so."""
    model = MODELS[name]
    bench = Bench(model, args)
    modes = [mode for mode in args.modes if mode in model.modes]
    plans = [("eager", [PLAIN])]
    if {*modes} - {"eager"}:
        plans.append(("compiled", [PLAIN]))
    plans += [(mode, args.tasks) for mode in modes]
    for mode, tasks in plans:
        start = time.perf_counter()
        try:
            bench.prepare(mode, tasks)
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            print(f"{model.title}, {mode}: {type(error).__name__}: {first}", flush=True)
        gc.collect()
        what = "plain" if tasks == [PLAIN] else "one_backward"
        print(f"  {model.title}: {mode}, {what}: {time.perf_counter() - start:.0f} s", flush=True)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in bench.steps}
    for _ in range(args.rounds):
        for key in bench.steps:
            times[key].append(bench.block(key))
    for mode, num_tasks in times:
        if num_tasks == PLAIN and mode == "eager":
            continue
        floor = ("eager", PLAIN)
        if mode != "eager" and num_tasks != PLAIN and ("compiled", PLAIN) in times:
            floor = ("compiled", PLAIN)
        yield table_row(model, bench, times, (mode, num_tasks), floor)
    if args.profile:
        show_kernels(bench, args)


def show_kernels(bench: Bench, args: argparse.Namespace) -> None:
    """Time of a step, of the host in it and of its kernels, and which are more than in plain."""
    plain: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for (mode, num_tasks), step in bench.steps.items():
        bench.wait()
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        host = time.perf_counter() - start
        bench.wait()
        wall = time.perf_counter() - start
        spent = f"{1e3 * wall / args.steps:.1f} ms, the host {1e3 * host / args.steps:.1f}; kernels"
        times, calls = kernels_of(step, args.device)
        title = f"{mode}, {f'{num_tasks} tasks' if num_tasks else 'plain'}: {spent}"
        show(title, times, calls, 0)
        if num_tasks == PLAIN:
            plain[mode] = times, calls
        else:
            floors = plain[mode if mode == "eager" else [*plain][-1]]
            more = [
                Counter({name: own[name] - floor[name] for name in {*own, *floor}})
                for own, floor in zip((times, calls), floors, strict=True)
            ]
            show("more than plain", *more, args.profile)


def table_row(
    model: Model,
    bench: Bench,
    times: dict[tuple[str, int], list[float]],
    key: tuple[str, int],
    floor: tuple[str, int],
) -> dict[str, Any]:
    ratios = [own / plain for own, plain in zip(times[key], times[floor], strict=True)]
    own, plain = bench.peaks[key], bench.peaks[floor]
    memory = {column: own[column] / plain["gib"] if plain["gib"] else math.nan for column in own}
    return {
        "model": model.title,
        "mode": key[0] if key[1] != PLAIN else f"{key[0]} plain",
        "tasks": key[1],
        "over": f"{floor[0]} plain",
        "plain_ms": 1e3 * statistics.median(times[floor]),
        "ms": 1e3 * statistics.median(times[key]),
        "time": statistics.median(ratios),
        "ratios": ratios,
        "gib": own["gib"],
        "memory": memory["gib"],
        "probes": memory["probes"],
        "engine": bench.engines.get(key, ""),
    }


HEAD = (
    f"{'model':16} {'mode':14} {'tasks':>5} {'over':14} {'plain ms':>9} {'ms':>9} {'time':>6} "
    f"{'GiB':>6} {'memory':>6} {'probes':>6}"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:16} {row['mode']:14} {row['tasks'] or '':>5} {row['over']:14} "
        f"{row['plain_ms']:9.2f} {row['ms']:9.2f} {row['time']:6.2f} {row['gib']:6.2f} "
        f"{row['memory']:6.2f} {row['probes']:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", type=int, default=[8, 25])
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all; CPU: eager")
    parser.add_argument("--rounds", type=int, default=3, help="the modes take turns so often")
    parser.add_argument("--steps", type=int, default=5, help="of a mode in a round")
    parser.add_argument("--by-layer", action="store_true", help="compile every layer by itself")
    parser.add_argument("--padding", action="store_true", help="rows of unequal length, masked")
    parser.add_argument("--profile", type=int, default=0, help="show so many kernels of each")
    parser.add_argument("--tiny", action="store_true", help="tiny configs, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the table as JSON, row by row")
    args = parser.parse_args()
    args.modes = args.modes or (MODES if args.device == "cuda" else ("eager",))
    torch.backends.cuda.matmul.allow_tf32 = True
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in args.models:
        torch.compiler.reset()
        for row in compare(name, args):
            if not rows or rows[-1]["model"] != row["model"]:
                print(HEAD)
            rows.append(row)
            print(line(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
