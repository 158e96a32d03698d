"""The paper's tagging experiment in small: pretrain an encoder, fine-tune it with five methods.

    python benchmarks/tagging.py prepare --data DATA --work WORK
    python benchmarks/tagging.py all --work WORK --out OUT --seconds 330 --pretrain-seconds 120

or `pretrain` and `finetune`, one after the other. DATA holds `mt`, `pos` and `ner` as
configs/tagging expects them. `prepare` needs no GPU: it learns the tokenizer, cuts text into blocks
and sentences into windows. WORK can then be copied, without DATA, to where it is used under the
same relative path. The others fit themselves into the time they are given: pretraining times a few
steps and chooses how many to take; fine-tuning lets all workers take a short run and chooses the
number of epochs. Several workers share the GPU (best with CUDA MPS), as one small model does not
fill it; steps are replayed as CUDA graphs.

OUT gets the encoder as encoder.tar.00, .01, ... in float16, results.json after every run (F1 and
accuracy by language), results.txt (tables: mean over seeds with a 95 % interval) and runs.tar.gz
(records of the first seed, for `gradvac report`). All methods have the same learning rate, epochs
and batches; nothing is tuned for any of them.
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
PRETRAIN = [
    "encoder.layers=4",
    "encoder.width=512",
    "encoder.heads=8",
    "encoder.inner=2048",
    "batch.rows=128",
    "optimizer.lr=7e-4",
    "train.writers=[]",
    "train.keep=1",
    "train.log_every=500",
    "train.graph=auto",
]
FINETUNE = [
    "data.dev_limit=300",
    "optimizer.lr=3e-4",
    "sampling.temperature=2.0",
    "train.writers=[]",
    "train.keep=1",
    "train.checkpoint_every=1000000",
    "train.record_every=20",
    "train.graph=auto",
]
# 97.5 % points of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phase", choices=("prepare", "pretrain", "finetune", "all", "show"))
    parser.add_argument("--data", type=Path, default=Path("."))
    parser.add_argument("--out", type=Path, help="where results go")
    parser.add_argument("--work", type=Path, default=Path("runs/tagging_experiment"))
    parser.add_argument("--seconds", type=float, default=300.0, help="of everything")
    parser.add_argument("--pretrain-seconds", type=float, default=120.0, help="of them, in `all`")
    parser.add_argument("--encoder", type=Path, help="folder with encoder.tar.*, or an encoder")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-epochs", type=float, default=10.0)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--length", nargs=2, type=float, metavar=("ROWS", "EPOCHS"))
    parser.add_argument("--tiny", action="store_true", help="a few steps on a CPU, to try it out")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every fine-tuning run")
    args = parser.parse_intermixed_args()
    args.end = time.monotonic() + args.seconds
    args.work.mkdir(parents=True, exist_ok=True)
    if args.phase != "prepare":
        args.out.mkdir(parents=True, exist_ok=True)
    phases = {
        "prepare": prepare_all,
        "pretrain": pretrain,
        "finetune": finetune,
        "all": do_all,
        "show": show,
    }
    phases[args.phase](args)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def do_all(args: argparse.Namespace) -> None:
    """Both phases in one command; workers start while the encoder is pretrained."""
    pool = Pool(args)
    whole = args.end
    args.end = time.monotonic() + args.pretrain_seconds
    pretrain(args)
    args.end = whole
    finetune(args, pool)


# Preparing


def prepare_all(args: argparse.Namespace) -> None:
    """Text, and what is fine-tuned on, with an encoder folder that has no weights yet."""
    from transformers import BertConfig

    from gradvac.tagging import prepare
    from gradvac.tagging.pretraining import TextData

    data = TextData(pretrain_settings(args, []), say=say)
    args.encoder_folder.mkdir(parents=True, exist_ok=True)
    data.tokenizer.save_pretrained(args.encoder_folder)
    BertConfig(vocab_size=len(data.tokenizer)).save_pretrained(args.encoder_folder)
    for kind in ("pos", "ner"):
        prepared = prepare(load_settings(args, kind, []), say=lambda _: None)
        say(f"{kind}: {prepared.sizes}")


# Pretraining


def pretrain_settings(args: argparse.Namespace, extra: list[str]) -> Any:
    from gradvac.tagging import PretrainConfig
    from gradvac.training import config

    args.encoder_folder = args.work / "encoder"
    overrides = [
        f"text.root={args.data}",
        f"text.prepared={args.work / 'text'}",
        *PRETRAIN,
        *(TINY_PRETRAIN if args.tiny else []),
        *extra,
    ]
    return config.load(PretrainConfig, CONFIGS / "pretrain.toml", overrides)


def pretrain(args: argparse.Namespace) -> None:
    from gradvac.tagging import pretrain as run_pretraining
    from gradvac.tagging.pretraining import TextData

    data = TextData.open(pretrain_settings(args, []).text.prepared)
    per_step = time_pretraining(args, data)
    left = args.end - time.monotonic() - (0 if args.tiny else 8)
    steps = 6 if args.tiny else max(200, min(20_000, int(0.95 * left / per_step)))
    say(f"{1000 * per_step:.1f} ms per step: {steps:,} steps in {left:.0f} s")
    length = [
        f"train.max_steps={steps}",
        f"optimizer.warmup_steps={min(1000, steps // 10)}",
        f"train.validate_every={max(1, steps // 3)}",
        f"train.checkpoint_every={steps}",
    ]
    run = args.work / "pretrain"
    result = run_pretraining(pretrain_settings(args, length), run, data=data)
    say(f"best dev loss {result.best_score:.4f} at step {result.best_step}")
    shutil.copy(run / "metrics.jsonl", args.out / "pretrain_metrics.jsonl")
    pack_encoder(run / "encoder", args.out)
    shutil.rmtree(args.encoder_folder)
    shutil.copytree(run / "encoder", args.encoder_folder)


def time_pretraining(args: argparse.Namespace, data: Any) -> float:
    """Seconds of a step, from a short run that is thrown away."""
    from gradvac.runs import RunFolder
    from gradvac.tagging import pretrain as run_pretraining

    num = 6 if args.tiny else 150
    length = [f"train.max_steps={num}", "train.validate_every=0", f"train.log_every={num // 3}"]
    length.append(f"train.checkpoint_every={num}")
    run = args.work / "timing"
    run_pretraining(pretrain_settings(args, length), run, data=data)
    return seconds_per_step(RunFolder(run))[0]


def seconds_per_step(folder: Any) -> tuple[float, float]:
    """Of the last part of a run; and what its first steps took beyond that."""
    seconds = {e["step"]: e["train/seconds"] for e in folder.read_metrics() if "train/seconds" in e}
    last = max(seconds)
    before = next(step for step in seconds if step >= 0.6 * last)
    end, first = seconds[last], seconds[before]
    per_step = (end - first) / (last - before)
    return per_step, max(0.0, end - last * per_step)


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
        f"model.encoder={args.encoder_folder}",
        *FINETUNE,
        *(NER_SIZES if kind == "ner" else []),
        *(TINY_FINETUNE[kind] if args.tiny else []),
        *args.overrides,
        *extra,
    ]
    return config.load(TaggingConfig, CONFIGS / f"{kind}.toml", overrides)


def train_one(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """A run with its scores."""
    from rich.console import Console

    from gradvac.runs import RunFolder
    from gradvac.tagging import score_run, train_tagging
    from gradvac.training import Display

    start = time.monotonic()
    steps = job["num_steps"]
    settings = load_settings(
        args,
        job["kind"],
        [
            f"align.rule={job['rule']}",
            f"train.seed={job['seed']}",
            f"batch.rows={job['rows']}",
            "batch.epochs=0",
            f"train.max_steps={steps}",
            f"train.validate_every={math.ceil(steps / job['num_validations'])}",
            f"train.log_every={max(1, steps // 30)}",
            f"optimizer.warmup_steps={steps // 10}",
        ],
    )
    run = args.work / "runs" / f"{job['kind']}-{job['rule']}-{job['seed']}"
    said = io.StringIO()
    result = train_tagging(settings, run, display=Display(Console(file=said), quiet=True))
    scores = score_run(run)
    folder = RunFolder(run)
    found = {**job, "seconds": result.seconds, "skipped": result.skipped_steps}
    found["per_step"], found["first_steps"] = seconds_per_step(folder)
    found["signature"] = folder.read_signature()["signature"]
    found["dev"], found["best_step"] = result.best_score, result.best_step
    found["said"] = [line for line in said.getvalue().splitlines() if "graph" in line]
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
    found["wall"] = time.monotonic() - start
    return found


class Pool:
    """Workers that train until there is no more to do."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        self.workers = [
            context.Process(target=work, args=(args.work, self.jobs, self.results), daemon=True)
            for _ in range(args.workers)
        ]
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()


def work(folder: Path, jobs: Any, results: Any) -> None:
    """One worker: jobs until there is none."""
    import torch

    import gradvac.tagging  # noqa: F401  while there is nothing to do yet

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    while (given := jobs.get()) is not None:
        args, job = given
        try:
            results.put(train_one(args, job))
        except Exception:
            results.put({**job, "error": traceback.format_exc()})
        name = f"{job['kind']}-{job['rule']}-{job['seed']}"
        if job["seed"] or job["rule"] not in ("sum", "gradvac"):  # others are measured later
            shutil.rmtree(folder / "runs" / name / "checkpoints", ignore_errors=True)


def finetune(args: argparse.Namespace, pool: Pool | None = None) -> None:
    from gradvac.tagging import Prepared

    args.encoder_folder = args.work / "encoder"
    if args.encoder is not None:
        shutil.rmtree(args.encoder_folder, ignore_errors=True)
        shutil.copytree(unpack_encoder(args.encoder, args.work / "unpacked"), args.encoder_folder)
    pool = pool or Pool(args)
    windows = {}
    for kind in ("pos", "ner"):
        prepared = Prepared.open(load_settings(args, kind, []))
        if prepared is None:
            raise SystemExit(f"{kind} is not prepared with these settings: run `prepare` first")
        windows[kind] = sum(prepared.sizes["train"].values())
    say(f"prepared: {windows}")
    costs = dict.fromkeys(combinations(args), (0.0, 0.0)) if args.length else calibrate(args, pool)
    left = args.end - time.monotonic() - (0 if args.tiny else 15)
    rows, epochs = choose_length(args, windows, costs, left)
    jobs = plan(args, windows, costs, rows, epochs)
    say(f"{rows} rows a batch, {epochs} epochs: {end_of(args, jobs):.0f} of {left:.0f} s")
    waiting = [{"num_validations": 4, **job} for _, job in jobs]
    collect(args, pool, waiting)
    pool.close()
    pack_runs(args)
    show(args)
    measure_maps(args)
    pack_runs(args)


Costs = dict[tuple[str, str], tuple[float, float]]  # seconds of a step, and of the rest of a run


def choose_length(
    args: argparse.Namespace, windows: dict[str, int], costs: Costs, left: float
) -> tuple[int, float]:
    """Rows of a batch and epochs: the paper's 32 rows if they allow for five epochs."""
    if args.length:
        return int(args.length[0]), args.length[1]
    if args.tiny:
        return 8, 1.0
    for rows in (32, 64):
        lengths = [round(0.1 * n, 1) for n in range(2, round(10 * args.most_epochs) + 1)]
        fitting = [
            epochs
            for epochs in lengths
            if end_of(args, plan(args, windows, costs, rows, epochs)) < 0.9 * left
        ]
        if max(fitting, default=0.0) >= 5:
            break
    return rows, max(fitting, default=lengths[0])


def plan(
    args: argparse.Namespace, windows: dict[str, int], costs: Costs, rows: int, epochs: float
) -> list[tuple[float, dict[str, Any]]]:
    """All runs with the seconds that each is expected to take, the longest first."""
    jobs = []
    for (kind, rule), (per_step, rest) in costs.items():
        steps = max(30, math.ceil(epochs * windows[kind] / rows))
        for seed in range(args.seeds):
            job = {"kind": kind, "rule": rule, "seed": seed, "rows": rows, "epochs": epochs}
            jobs.append((per_step * steps + rest, {**job, "num_steps": steps}))
    return sorted(jobs, key=lambda job: -job[0])


def end_of(args: argparse.Namespace, jobs: list[tuple[float, dict[str, Any]]]) -> float:
    """When the last worker is done, if each takes the next run as soon as it is free."""
    free = [0.0] * args.workers
    for seconds, _ in jobs:
        free[free.index(min(free))] += seconds
    return max(free)


def measure_maps(args: argparse.Namespace) -> None:
    """Gradient similarity between languages on the dev sets, of the first seed's best weights."""
    from gradvac.tagging.similarity import measure_run

    for run in first_runs(args):
        if time.monotonic() > args.end + 15:
            say(f"no time to measure {run.name}")
            continue
        measured = measure_run(run, weights=["best"], num_lines=200)
        say(f"measured {run.name}: {measured[0].values.shape}")


def first_runs(args: argparse.Namespace) -> list[Path]:
    """Runs of the first seed that ended: joint and GradVac."""
    names = [f"{kind}-{rule}-0" for kind in ("pos", "ner") for rule in ("sum", "gradvac")]
    runs = [args.work / "runs" / name for name in names]
    return [run for run in runs if (run / "scores" / "test.best.json").is_file()]


def combinations(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [(kind, rule) for rule in args.rules for kind in ("pos", "ner")]


def calibrate(args: argparse.Namespace, pool: Pool) -> Costs:
    """Kind and rule -> seconds of a step, and of all the rest of a run, with everybody at work."""
    every = combinations(args)
    count = max(args.workers, len(every))
    for number in range(count):
        kind, rule = every[number % len(every)]
        job = {"kind": kind, "rule": rule, "seed": 100 + number, "rows": 8 if args.tiny else 32}
        job |= {"num_steps": 30 if args.tiny else 150, "num_validations": 1}
        pool.jobs.put((args, job))
    found = [pool.results.get() for _ in range(count)]
    errors = [one["error"] for one in found if "error" in one]
    if errors:
        raise SystemExit(errors[0])
    for line in sorted({line for one in found for line in one["said"]}):
        say(line)
    # Kernels are compiled once: what the quickest took before its steps were even counts for all.
    first_steps = min(one["first_steps"] for one in found)
    costs = {}
    for kind, rule in every:
        own = [one for one in found if (one["kind"], one["rule"]) == (kind, rule)]
        per_step = statistics.fmean(one["per_step"] for one in own)
        rest = statistics.fmean(one["wall"] - one["seconds"] for one in own)
        costs[kind, rule] = (per_step, rest + first_steps)
        say(f"{kind} {rule}: {1000 * per_step:.1f} ms a step, {rest + first_steps:.1f} s besides")
    return costs


def collect(args: argparse.Namespace, pool: Pool, waiting: list[Any]) -> None:
    """Hand out jobs and keep every result at once, until the time is over."""
    found: list[dict[str, Any]] = []
    for job in waiting:
        pool.jobs.put((args, job))
    for _ in pool.workers:
        pool.jobs.put(None)
    while len(found) < len(waiting) and time.monotonic() < args.end:
        try:
            one = pool.results.get(timeout=max(0.1, min(5.0, args.end - time.monotonic())))
        except Empty:
            continue
        found.append(one)
        (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        said = one["error"].splitlines()[-1] if "error" in one else mean_f1(one)
        say(f"{one['kind']} {one['rule']} seed {one['seed']}: {said}")
    if len(found) < len(waiting):
        say(f"out of time: {len(waiting) - len(found)} runs are missing")


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
    length = f"{runs[0]['epochs']} epochs of batches of {runs[0]['rows']}"
    lines = [f"\n{kind} {metric}, {seeds} seeds, {length}", ""]
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
    "train.graph=false",
    'text.languages=["de", "mr", "sw", "tl", "yo"]',
    "train.precision=fp32",
    "train.device=cpu",
]
TINY_FINETUNE = {
    kind: [
        f"data.languages={json.dumps(languages)}",
        f"data.limit={{{', '.join(f'{code}=40' for code in languages)}}}",
        "data.dev_limit=20",
        "train.graph=false",
        "train.precision=fp32",
        "train.device=cpu",
    ]
    for kind, languages in (("pos", ["mr", "te"]), ("ner", ["tl", "yo"]))
}

if __name__ == "__main__":
    main()
