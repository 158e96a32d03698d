"""The paper's tagging experiment in small: pretrain an encoder, fine-tune it with five methods.

    python benchmarks/tagging.py pretrain --data DATA --out OUT --seconds 300
    python benchmarks/tagging.py finetune --data DATA --out OUT --seconds 520 --encoder OUT

DATA holds `mt`, `pos` and `ner` as configs/tagging expects them. Both commands fit themselves into
the time they are given: `pretrain` times a few steps and chooses how many to take, `finetune` lets
all workers train for a moment and chooses the number of epochs. Several workers share the GPU, as
one small model does not fill it.

`pretrain` writes the encoder as OUT/encoder.tar.00, .01, ... in float16. `finetune` writes
OUT/results.json after every run (F1 and accuracy by language), OUT/results.txt (tables: mean over
seeds with a 95 % interval) and OUT/runs.tar.gz (records of the first seed, for `gradvac report`).
All methods have the same learning rate, epochs and batches; nothing is tuned for any of them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import shutil
import statistics
import tarfile
import time
import traceback
from pathlib import Path
from queue import Empty
from typing import Any

RULES = ("sum", "gradnorm", "mgda", "pcgrad", "gradvac")
NAMES = {"sum": "joint", "gradnorm": "GradNorm", "mgda": "MGDA", "pcgrad": "PCGrad"}
CONFIGS = Path(__file__).parents[1] / "configs" / "tagging"
PIECE = 15 << 20  # bytes of a part of the encoder
# 97.5 % points of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("pretrain", "finetune", "show"))
    parser.add_argument("--data", type=Path, default=Path("."))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/tagging_work"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--encoder", type=Path, help="folder with encoder.tar.*, or an encoder")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-epochs", type=float, default=10.0)
    parser.add_argument("--tiny", action="store_true", help="a few steps on a CPU, to try it out")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every run")
    args = parser.parse_intermixed_args()
    args.end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    {"pretrain": pretrain, "finetune": finetune, "show": show}[args.phase](args)


# Pretraining


def pretrain(args: argparse.Namespace) -> None:
    from gradvac.tagging import PretrainConfig
    from gradvac.tagging import pretrain as run_pretraining
    from gradvac.training import config

    overrides = [
        f"text.root={args.data}",
        f"text.prepared={args.work / 'text'}",
        "train.writers=[]",
        "train.keep=1",
        "train.log_every=200",
        *(TINY_PRETRAIN if args.tiny else []),
        *args.overrides,
    ]
    settings = config.load(PretrainConfig, CONFIGS / "pretrain.toml", overrides)
    per_step = time_pretraining(settings)
    left = args.end - time.monotonic() - (0 if args.tiny else 25)
    steps = 6 if args.tiny else max(200, min(20_000, int(0.93 * left / per_step)))
    print(f"{1000 * per_step:.1f} ms per step: {steps:,} steps in {left:.0f} s", flush=True)
    overrides += [
        f"train.max_steps={steps}",
        f"optimizer.warmup_steps={min(1000, steps // 10)}",
        f"train.validate_every={max(1, steps // 5)}",
        f"train.checkpoint_every={steps}",
    ]
    settings = config.load(PretrainConfig, CONFIGS / "pretrain.toml", overrides)
    run = args.work / "pretrain"
    result = run_pretraining(settings, run)
    print(f"best dev loss {result.best_score:.4f} at step {result.best_step}", flush=True)
    shutil.copy(run / "metrics.jsonl", args.out / "pretrain_metrics.jsonl")
    pack_encoder(run / "encoder", args.out)


def time_pretraining(settings: Any) -> float:
    """Seconds of a step, from a few that are thrown away."""
    import torch

    from gradvac.tagging import PretrainRecipe
    from gradvac.tagging.pretraining import TextData
    from gradvac.training import choose_device, seed_everything

    seed_everything(0)
    recipe = PretrainRecipe(settings, TextData(settings, say=print))
    device = choose_device(settings.train.device)
    recipe.model.to(device).train()
    optimizer = settings.optimizer.build(recipe.model)
    batches = recipe.batches()
    is_bf16 = settings.train.precision == "bf16"
    num = 3 if device.type == "cpu" else 60
    for step in range(num):
        if step == num // 3:
            wait(device)
            start = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            losses = recipe.losses(next(batches)).losses
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wait(device)
    return (time.monotonic() - start) / (num - num // 3)


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pack_encoder(encoder: Path, out: Path) -> None:
    """Weights in float16, tokenizer and config, in pieces."""
    import safetensors.torch

    weights = safetensors.torch.load_file(encoder / "model.safetensors")
    half = {name: value.half() for name, value in weights.items()}
    safetensors.torch.save_file(half, encoder / "model.safetensors", {"format": "pt"})
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        tar.add(encoder, "encoder")
    content = memory.getvalue()
    for number, first in enumerate(range(0, len(content), PIECE)):
        (out / f"encoder.tar.{number:02d}").write_bytes(content[first : first + PIECE])
    print(f"encoder: {len(content) / 2**20:.1f} MiB", flush=True)


def unpack_encoder(folder: Path, work: Path) -> Path:
    pieces = sorted(folder.glob("encoder.tar.*"))
    if not pieces:
        return folder
    content = b"".join(piece.read_bytes() for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(work, filter="data")
    return work / "encoder"


# Fine-tuning


def load_settings(args: argparse.Namespace, kind: str, extra: list[str]) -> Any:
    from gradvac.tagging import TaggingConfig
    from gradvac.training import config

    overrides = [
        f"data.root={args.data}",
        f"data.prepared={args.work / kind}",
        "data.dev_limit=300",
        f"model.encoder={args.encoder_folder}",
        "optimizer.lr=5e-4",
        "sampling.temperature=2.0",
        "train.writers=[]",
        "train.keep=1",
        "train.checkpoint_every=1000000",
        "train.log_every=50",
        "train.record_every=20",
        *(NER_SIZES if kind == "ner" else []),
        *(TINY_FINETUNE[kind] if args.tiny else []),
        *args.overrides,
        *extra,
    ]
    return config.load(TaggingConfig, CONFIGS / f"{kind}.toml", overrides)


def train_one(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """A whole run with its scores, or a few steps to see how long they take."""
    from rich.console import Console

    from gradvac.runs import RunFolder
    from gradvac.tagging import Prepared, score_run, train_tagging
    from gradvac.training import Display

    rule = [f"align.rule={job['rule']}", f"train.seed={job['seed']}"]
    if job["steps"]:
        length = ["batch.epochs=0", f"train.max_steps={job['steps']}", "train.validate_every=0"]
    else:
        settings = load_settings(args, job["kind"], [f"batch.epochs={job['epochs']}"])
        prepared = Prepared.open(settings)
        steps = settings.with_steps(sum(prepared.sizes["train"].values())).train.max_steps
        every = max(1, math.ceil(steps / 4))
        length = [f"batch.epochs={job['epochs']}", f"train.validate_every={every}"]
        length.append(f"optimizer.warmup_steps={steps // 10}")
    settings = load_settings(args, job["kind"], [*rule, *length])
    run = args.work / "runs" / f"{job['kind']}-{job['rule']}-{job['seed']}-{job['steps']}"
    display = Display(Console(file=io.StringIO()), quiet=True)
    result = train_tagging(settings, run, display=display)
    found = {**job, "num_steps": result.step, "seconds": result.seconds}
    if not job["steps"]:
        scores = score_run(run)
        folder = RunFolder(run)
        found["signature"] = folder.read_signature()["signature"]
        found["dev"], found["best_step"] = result.best_score, result.best_step
        found["skipped"] = result.skipped_steps
        metrics = [e for e in folder.read_metrics() if "train/update_cosine" in e]
        for name in ("update_cosine", "update_ratio", "active", "similarity"):
            values = [e[f"train/{name}"] for e in metrics if e[f"train/{name}"] is not None]
            found[name] = statistics.fmean(values) if values else None
        found["scores"] = {
            task: {"f1": s.f1, "accuracy": s.accuracy, "strict_f1": s.strict_f1}
            for task, s in scores.by_task.items()
        }
        for text in (run / "scores").glob("*.txt"):
            text.unlink()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return found


def work(args: argparse.Namespace, jobs: Any, results: Any) -> None:
    """One worker: jobs until there is none."""
    import torch

    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        try:
            results.put(train_one(args, job))
        except Exception:
            results.put({**job, "error": traceback.format_exc()})


def finetune(args: argparse.Namespace) -> None:
    from gradvac.tagging import prepare

    args.encoder_folder = unpack_encoder(args.encoder, args.work)
    windows = {}
    for kind in ("pos", "ner"):
        prepared = prepare(load_settings(args, kind, []), say=lambda _: None)
        windows[kind] = sum(prepared.sizes["train"].values())
    print(f"prepared: {windows}", flush=True)
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(args, jobs, results), daemon=True)
        for _ in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    per_step = calibrate(args, jobs, results)
    left = args.end - time.monotonic() - (0 if args.tiny else 25)
    scoring = 12 * len(RULES) * args.seeds * len(windows) / args.workers  # validation and scores
    per_epoch = args.seeds * sum(per_step.values()) * sum(windows.values()) / 32 / args.workers
    epochs = 0.9 * (left - scoring) / per_epoch
    epochs = 0.05 if args.tiny else round(max(0.2, min(args.most_epochs, epochs)), 2)
    shown = ", ".join(f"{rule} {1000 * seconds:.0f}" for rule, seconds in per_step.items())
    print(f"ms per step: {shown}; {epochs} epochs, {left:.0f} s left", flush=True)
    # Seed by seed, so that a late end costs whole seeds; within one, the longest runs first.
    waiting = [
        {"kind": kind, "rule": rule, "seed": seed, "epochs": epochs, "steps": 0}
        for seed in range(args.seeds)
        for rule in sorted(RULES, key=per_step.__getitem__, reverse=True)
        for kind in ("ner", "pos")
    ]
    collect(args, jobs, results, waiting)
    for worker in workers:
        worker.terminate()
    pack_runs(args)
    show(args)
    measure_maps(args)
    pack_runs(args)


def measure_maps(args: argparse.Namespace) -> None:
    """Gradient similarity between languages on the dev sets, of the first seed's best weights."""
    from gradvac.tagging.similarity import measure_run

    for run in first_runs(args):
        if time.monotonic() > args.end + 15:
            print(f"no time to measure {run.name}", flush=True)
            continue
        measured = measure_run(run, weights=["best"], num_lines=200)
        print(f"measured {run.name}: {measured[0].values.shape}", flush=True)


def first_runs(args: argparse.Namespace) -> list[Path]:
    """Runs of the first seed that ended: joint and GradVac."""
    names = [f"{kind}-{rule}-0-0" for kind in ("pos", "ner") for rule in ("sum", "gradvac")]
    runs = [args.work / "runs" / name for name in names]
    return [run for run in runs if (run / "scores" / "test.best.json").is_file()]


def calibrate(args: argparse.Namespace, jobs: Any, results: Any) -> dict[str, float]:
    """Seconds of a step by rule, while all workers are at work."""
    num = 4 if args.tiny else 60
    for steps in (2, num):  # imports and kernels first
        count = max(args.workers, len(RULES))
        for number in range(count):
            rule = RULES[number % len(RULES)]
            kind = ("pos", "ner")[number % 2]
            job = {"kind": kind, "rule": rule, "seed": 100 + number, "epochs": 0}
            jobs.put({**job, "steps": steps})
        found = [results.get() for _ in range(count)]
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            raise SystemExit(errors[0])
    return {
        rule: statistics.fmean(o["seconds"] / o["num_steps"] for o in found if o["rule"] == rule)
        for rule in RULES
    }


def collect(args: argparse.Namespace, jobs: Any, results: Any, waiting: list[Any]) -> None:
    """Hand out jobs and keep every result at once, until the time is over."""
    found: list[dict[str, Any]] = []
    for job in waiting:
        jobs.put(job)
    for _ in range(args.workers):
        jobs.put(None)
    while len(found) < len(waiting) and time.monotonic() < args.end:
        try:
            one = results.get(timeout=max(0.1, min(5.0, args.end - time.monotonic())))
        except Empty:
            continue
        found.append(one)
        (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        said = one["error"].splitlines()[-1] if "error" in one else mean_f1(one)
        print(f"{one['kind']} {one['rule']} seed {one['seed']}: {said}", flush=True)
    if len(found) < len(waiting):
        print(f"out of time: {len(waiting) - len(found)} runs are missing", flush=True)


def mean_f1(one: dict[str, Any]) -> str:
    mean = statistics.fmean(score["f1"] for score in one["scores"].values())
    return f"F1 {mean:.2f}, {one['num_steps']:,} steps, {one['seconds']:.0f} s"


def pack_runs(args: argparse.Namespace) -> None:
    files = ("record.bin", "similarity.npz", "config.toml", "signature.json", "metrics.jsonl")
    with tarfile.open(args.out / "runs.tar.gz", "w:gz") as tar:
        for run in first_runs(args):
            for name in (*files, "scores"):
                if (run / name).exists():
                    tar.add(run / name, f"{run.name}/{name}")


# Tables


def show(args: argparse.Namespace) -> None:
    found = [one for one in json.loads((args.out / "results.json").read_text()) if "scores" in one]
    lines = []
    for kind in ("pos", "ner"):
        runs = [one for one in found if one["kind"] == kind]
        if runs:
            lines += table(kind, runs, "f1") + table(kind, runs, "accuracy")
    text = "\n".join(lines)
    (args.out / "results.txt").write_text(text + "\n")
    print(text, flush=True)


def table(kind: str, runs: list[dict[str, Any]], metric: str) -> list[str]:
    """Mean over seeds, and half of the 95 % interval, by language and method."""
    rules = [rule for rule in RULES if any(one["rule"] == rule for one in runs)]
    languages = list(runs[0]["scores"])
    seeds = len({one["seed"] for one in runs})
    lines = [f"\n{kind} {metric}, {seeds} seeds, {runs[0]['epochs']} epochs", ""]
    lines.append("| | " + " | ".join(NAMES.get(rule, "GradVac") for rule in rules) + " |")
    lines.append("| --- |" + " --- |" * len(rules))
    groups = {lang: [lang] for lang in languages} | {"average": languages}
    if "tl" in languages and len(languages) > 2:
        groups["average without tl"] = [lang for lang in languages if lang != "tl"]
    for name, members in groups.items():
        cells = [interval(list(by_seed(runs, rule, members, metric).values())) for rule in rules]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    joint = by_seed(runs, "sum", languages, metric)
    cells = []
    for rule in rules:
        own = by_seed(runs, rule, languages, metric)
        cells.append(interval([own[seed] - joint[seed] for seed in own if seed in joint]))
    lines.append("| average minus joint, seed by seed | " + " | ".join(cells) + " |")
    return lines


def by_seed(
    runs: list[dict[str, Any]], rule: str, languages: list[str], metric: str
) -> dict[int, float]:
    """Mean over languages of every seed's run."""
    return {
        one["seed"]: statistics.fmean(one["scores"][lang][metric] for lang in languages)
        for one in runs
        if one["rule"] == rule
    }


def interval(values: list[float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    half = STUDENT.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.1f} ± {half:.1f}"


NER_SIZES = ["data.limit={de=2000, en=2000, es=2000, hi=2000, kk=2000, te=2000}"]
TINY_PRETRAIN = [
    "encoder.layers=1",
    "encoder.width=32",
    "encoder.heads=2",
    "encoder.inner=64",
    "tokenizer.lines=2000",
    "tokenizer.size=2000",
    "batch.rows=8",
    'text.languages=["de", "mr", "sw", "tl", "yo"]',
    "train.precision=fp32",
    "train.device=cpu",
]
TINY_FINETUNE = {
    kind: [
        f"data.languages={json.dumps(languages)}",
        f"data.limit={{{', '.join(f'{code}=40' for code in languages)}}}",
        "data.dev_limit=5",
        "train.precision=fp32",
        "train.device=cpu",
    ]
    for kind, languages in (("pos", ["mr", "te"]), ("ner", ["tl", "yo"]))
}

if __name__ == "__main__":
    main()
