"""What recording costs: steps with a `Recorder` against steps without, in turn, in one run.

    python benchmarks/record.py --size tiny --tasks 4 25             # CPU
    python benchmarks/record.py --size tiny base --tasks 4 8 25      # GPU

Blocks of steps with and without recording alternate, and every second round begins with the other,
so that a machine that gets slower or faster meets both. `time` is the median over rounds of the
ratio of the two; `inside` is the share of all time that the program spent in the recorder itself,
which no noise of the steps can hide.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from transformer import SIZES, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.analysis import Recorder


def measure(args: argparse.Namespace, size: str, num_tasks: int) -> dict[str, float]:
    """Seconds per step without recording, ratio with it, share of time inside, bytes per record."""
    device = args.device
    torch.manual_seed(1)
    model = Transformer(SIZES[size]).to(device)
    source, target, tasks = make_batch(SIZES[size], num_tasks, device)
    names = [f"task{t}" for t in range(num_tasks)]
    aligner = gradvac.Aligner(model, names, gradvac.GradVac(), component)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    inside, step = 0.0, 0

    def block(recorder: Recorder | None) -> float:
        nonlocal inside, step
        start = time.perf_counter()
        for _ in range(args.block):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                losses = row_losses(model, source, target)
            alignment = aligner.backward(losses, tasks)
            optimizer.step()
            if recorder is not None:
                step += 1
                before = time.perf_counter()
                recorder(step, alignment)
                inside += time.perf_counter() - before
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.bin"
        with Recorder(path, every=args.every, chunk=args.chunk) as recorder:
            block(recorder)  # warm up: caches, pinned memory
            inside, first = 0.0, step
            plain, recorded = [], []
            for number in range(args.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    (recorded if which else plain).append(block(recorder if which else None))
            recorder.flush()
        num_records = step // args.every
        size_of_record = path.stat().st_size / num_records
    assert step - first == args.rounds * args.block
    ratios = [a / b for a, b in zip(recorded, plain, strict=True)]
    return {
        "seconds": statistics.median(plain) / args.block,
        "time": statistics.median(ratios),
        "inside": inside / sum(recorded),
        "bytes": size_of_record,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--tasks", nargs="+", type=int, default=[4, 25])
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=20, help="records of a chunk")
    parser.add_argument("--block", type=int, default=200, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    rows = []
    print(f"{'size':5} {'tasks':>5} {'ms':>8} {'time':>7} {'inside':>7} {'bytes per record':>15}")
    for size in args.size:
        for num_tasks in args.tasks:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = measure(args, size, num_tasks)
            rows.append({"size": size, "tasks": num_tasks, "every": args.every} | found)
            print(
                f"{size:5} {num_tasks:5} {1e3 * found['seconds']:8.2f} {found['time']:7.4f} "
                f"{found['inside']:7.2%} {found['bytes']:15,.0f}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
