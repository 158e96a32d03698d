"""Time of a training step of translation: plain, joint and GradVac, eager and as a CUDA graph.

    python benchmarks/train.py --size small base --tokens 16384 --tasks 4 12
    python benchmarks/train.py --size big --tokens 32768 --tasks 4 --vocabulary 64000
    python benchmarks/train.py --size small base --huggingface eager compiled
    python benchmarks/train.py --size tiny --tokens 1024 --graph 0 --padded --clock processor

Everything that training does is included: batches are cut from memory-mapped token files by the
stream of the recipe, prepared ahead, copied to the device; forward, aligned backward, clipping,
AdamW. Sentences are random tokens with lengths like those of verses. Tokens are those of the target
that count; MFU counts the products of matrices for tokens that count, against `--peak`. `busy` is
the share of the time in which the device computes.

`--huggingface` times a Pegasus model of the same size, padded batches of the same number of tokens
cut from the same sentences, bf16 autocast and the same optimizer, eager or compiled; without
cuDNN's attention, which plans anew for every shape of a batch and costs it nine tenths of the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gradvac.lab.recipes.nmt import (
    SIZES,
    Batch,
    Size,
    Stream,
    TaskData,
    TokenFile,
    TokenWriter,
    Transformer,
)
from gradvac.lab.recipes.nmt.settings import BatchConfig
from gradvac.lab.training import (
    FULL_BATCH,
    BatchSlice,
    Prefetch,
    RunConfig,
    SamplingConfig,
    StepLosses,
)
from gradvac.lab.training.job import Job
from gradvac.lab.training.optimizer import OptimizerConfig, clip, set_lr, step_unless
from gradvac.lab.training.state import RunState
from gradvac.lab.training.step import EagerStep, GraphStep

LONGEST = 130
Tokens = npt.NDArray[np.float64] | npt.NDArray[np.int64]
RULES = {"none": "none", "joint": "sum", "gradvac": "gradvac"}


class Corpus:
    """Random sentences in token files."""

    def __init__(self, folder: Path, num_tasks: int, vocabulary: int, pairs: int) -> None:
        draw = np.random.default_rng(0)
        self.tasks = []
        for task in range(num_tasks):
            sides = []
            lengths = np.clip(draw.lognormal(3.3, 0.45, pairs), 3, LONGEST - 2)
            for side in range(2):
                own = np.clip(lengths * draw.normal(1.0, 0.1, pairs), 3, LONGEST - 2).astype(int)
                path = folder / f"{task}.{side}"
                with TokenWriter(path, vocabulary) as writer:
                    tokens = draw.integers(20, vocabulary, own.sum())
                    writer.write(np.split(tokens, np.cumsum(own)[:-1]))
                sides.append(TokenFile(path, vocabulary))
            self.tasks.append(TaskData(f"en-t{task}", sides[0], sides[1], 4 + task))

    def stream(self, tokens: int, *, packed: bool, fixed: bool) -> Stream:
        return Stream(
            self.tasks,
            SamplingConfig(temperature=1.0),
            BatchConfig(tokens=tokens),
            packed=packed,
            longest=LONGEST if fixed else None,
        )


class Recipe:
    """The recipe's model, batches and losses, without its data folder."""

    def __init__(
        self, corpus: Corpus, arguments: argparse.Namespace, size: str, fixed: bool
    ) -> None:
        self.tasks = [task.name for task in corpus.tasks]
        self.resource_levels: dict[str, str] = {}
        self._corpus, self._arguments, self._fixed = corpus, arguments, fixed
        torch.manual_seed(0)
        with torch.device(arguments.device):  # much faster than on the host for a big one
            self.model = Transformer(
                SIZES[size],
                arguments.vocabulary,
                logits_per_chunk=arguments.logits_per_chunk or "auto",
            )

    def batches(self, part: BatchSlice = FULL_BATCH) -> Prefetch[Batch]:
        assert part == FULL_BATCH
        packed = not self._arguments.padded
        stream = self._corpus.stream(self._arguments.tokens, packed=packed, fixed=self._fixed)
        on_gpu = self._arguments.device == "cuda"
        return Prefetch(stream, prepare=Batch.pin if on_gpu else None)

    def losses(self, batch: Batch) -> StepLosses:
        batch = batch.to(next(self.model.parameters()).device)
        return StepLosses(self.model(batch), batch.tasks)

    def validate(self) -> dict[str, float]:
        return {}

    def data_signature(self) -> str:
        return "random"


def flops(size: Size, vocabulary: int, source: float, target: float) -> float:
    """Of a forward and a backward: 6 for every weight of a matrix and token that meets it."""
    own, network = 4 * size.width**2, 2 * size.width * size.inner
    encoder = size.encoder_layers * (own + network) * source
    decoder = size.decoder_layers * ((own + network + own / 2) * target + own / 2 * source)
    return 6 * (encoder + decoder + vocabulary * size.width * target)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Timed(NamedTuple):
    """What a step takes."""

    seconds: float
    source: float  # tokens that count
    target: float
    busy: float  # share of the time in which the device computes


def sizes(batch: Batch) -> Tokens:
    """Tokens that count, of both sides."""
    num = len(batch) if batch.counts is None else int(batch.counts.sum())
    return np.array([int(batch.source.ends[num]), batch.num_tokens])


def timed(step: Callable[[], Tokens], arguments: argparse.Namespace) -> Timed:
    """Time a step that returns its tokens."""
    for _ in range(arguments.warm):
        step()
    synchronize(arguments.device)
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    start, tokens = clock(), np.zeros(2)
    for _ in range(arguments.steps):
        tokens = tokens + step()
    synchronize(arguments.device)
    seconds = (clock() - start) / arguments.steps
    busy = float("nan")
    if arguments.device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
        kernels = sum(event.self_device_time_total for event in watched.key_averages()) / 1e6
        busy = kernels / 3 / seconds
    source, target = (tokens / arguments.steps).tolist()
    return Timed(seconds, source, target, busy)


def ours(corpus: Corpus, arguments: argparse.Namespace, size: str, mode: str, graph: bool) -> Timed:
    """Time our step."""
    on_gpu = arguments.device == "cuda"
    settings = RunConfig.model_validate(
        {
            "train": {"device": arguments.device, "precision": "bf16" if on_gpu else "fp32"},
            "align": {"rule": RULES[mode], "engine": "auto"},
        }
    )
    recipe = Recipe(corpus, arguments, size, fixed=graph or arguments.fixed)
    state: Any = RunState(recipe, settings, Job())  # type: ignore[arg-type]
    step: Any = EagerStep(settings, state)
    if graph:
        step = GraphStep(step, state.device)

    def take() -> Tokens:
        set_lr(state.optimizer, 1e-4)
        batch = next(state.batches)
        step([batch])
        return sizes(batch)

    found = timed(take, arguments)
    if graph and not step.works:
        raise RuntimeError("the step could not be recorded")
    if state.aligner is not None:
        state.aligner.detach()
    return found


def huggingface(corpus: Corpus, arguments: argparse.Namespace, size: str, compiled: bool) -> Timed:
    """Time a Pegasus model of the same size on padded batches."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    own = SIZES[size]
    config = PegasusConfig(
        vocab_size=arguments.vocabulary,
        d_model=own.width,
        encoder_layers=own.encoder_layers,
        decoder_layers=own.decoder_layers,
        encoder_attention_heads=own.heads,
        decoder_attention_heads=own.heads,
        encoder_ffn_dim=own.inner,
        decoder_ffn_dim=own.inner,
        activation_function="relu",
        attention_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=LONGEST,
        pad_token_id=0,
    )
    with torch.device(arguments.device):
        model = PegasusForConditionalGeneration(config).to(arguments.device).train()
    optimizer = OptimizerConfig().build(model)
    call = torch.compile(model, dynamic=True) if compiled else model
    stream: Iterator[Batch] = Prefetch(corpus.stream(arguments.tokens, packed=False, fixed=False))

    def take() -> Tokens:
        on_host = next(stream)
        batch = on_host.to(torch.device(arguments.device))
        labels = batch.target.pad(batch.labels).clone()
        if batch.target.mask is not None:
            labels.masked_fill_(~batch.target.mask[:, 0, 0], -100)
        mask = (batch.source.tokens != 0).long()
        with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.device == "cuda"):
            loss: Tensor = call(
                input_ids=batch.source.tokens,
                attention_mask=mask,
                decoder_input_ids=batch.target.tokens,
                labels=labels,
                use_cache=False,
            ).loss
        loss.backward()
        norm = clip(model, 1.0)
        step_unless(optimizer, ~norm.isfinite())
        optimizer.zero_grad()
        return sizes(on_host)

    return timed(take, arguments)


def report(rows: list[dict[str, Any]], row: dict[str, Any], floor: float | None) -> float:
    """Print a row; return its seconds."""
    ratio = row["seconds"] / floor if floor else 1.0
    rows.append(row | {"ratio": ratio})
    print(
        f"{row['size']:6} {row['tasks']:5} {row['mode']:22} {1e3 * row['seconds']:8.2f} ms "
        f"{ratio:6.2f} {row['tokens'] / row['seconds']:10,.0f} tokens/s  busy {row['busy']:5.0%}  "
        f"MFU {row['mfu']:5.1%}",
        flush=True,
    )
    return float(row["seconds"])


def run_all(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_tasks in arguments.tasks:
        place = folder / str(num_tasks)
        place.mkdir()
        corpus = Corpus(place, num_tasks, arguments.vocabulary, arguments.pairs)
        for size in arguments.size:
            works: list[tuple[str, Callable[[], Timed]]] = []
            for graph in arguments.graph:
                for mode in arguments.modes:
                    name = f"{mode}, {'graph' if graph else 'eager'}"
                    works.append((name, _bind(ours, corpus, arguments, size, mode, graph)))
            for how in arguments.huggingface:
                work = _bind(huggingface, corpus, arguments, size, how == "compiled")
                works.append((f"Hugging Face, {how}", work))
            floors: dict[str, float] = {}
            for name, work in works:
                try:
                    found = work()
                except (RuntimeError, ValueError) as error:
                    print(
                        f"{size:6} {num_tasks:5} {name:22} failed: {str(error)[:300]}", flush=True
                    )
                    continue
                finally:
                    gc.collect()
                    if arguments.device == "cuda":
                        torch.cuda.empty_cache()
                needed = flops(SIZES[size], arguments.vocabulary, found.source, found.target)
                seconds = found.seconds
                row = {
                    "size": size,
                    "tasks": num_tasks,
                    "mode": name,
                    "seconds": seconds,
                    "tokens": found.target,
                    "busy": found.busy,
                    "mfu": needed / seconds / arguments.peak,
                }
                way = name.rpartition(", ")[2]
                floors.setdefault(way, seconds)
                if name.startswith("joint"):
                    floors[way] = seconds  # GradVac is compared with joint training run alike
                report(rows, row, floors[way])
    return rows


def _bind(work: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    return lambda: work(*given)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["small"])
    parser.add_argument("--tasks", nargs="+", type=int, default=[4])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--modes", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--graph", nargs="*", type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument("--fixed", action="store_true", help="one batch size for eager steps too")
    parser.add_argument("--padded", action="store_true", help="eager steps: not packed")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--logits-per-chunk", type=int, help="default: as memory allows")
    parser.add_argument("--huggingface", nargs="*", choices=("eager", "compiled"), default=[])
    parser.add_argument("--pairs", type=int, default=40_000, help="of every task")
    parser.add_argument("--warm", type=int, default=14)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peak", type=float, default=989e12, help="bf16 FLOP/s: an H100 or H200")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(arguments, Path(folder))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}, {arguments.tokens} tokens per side")
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
