"""Cost of one weighing: all components of a step from Gram matrices to weights, in one run.

    python benchmarks/rules.py                  # CPU, or a GPU where there is one

`gradvac` weighs all components at once; `torchjd` is TorchJD's GradVac weighting, one object per
component, as its users write it. On a GPU the table also says whether gradvac's weighing waited for
the device.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gradvac


def timed(run: Callable[[], object], device: str, seconds: float) -> float:
    """Median milliseconds of a call."""
    times: list[float] = []
    run()
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def weighing(num_tasks: int, gram: Tensor) -> Callable[[], None]:
    rule = gradvac.GradVac(beta=1e-2)
    names = [f"task{t}" for t in range(num_tasks)]
    rule.bind(names, [f"component{k}" for k in range(len(gram))])
    losses, components = gram.new_ones(num_tasks), range(len(gram))

    def run() -> None:
        rule.start_step(range(num_tasks), losses)
        rule.weigh(components, gram)
        rule.commit()

    return run


def torchjd_weighing(gram: Tensor) -> Callable[[], None]:
    from torchjd.aggregation import GradVacWeighting

    weightings = [GradVacWeighting(beta=1e-2) for _ in gram]

    def run() -> None:
        for weighting, one in zip(weightings, gram, strict=True):
            weighting(one)

    return run


def synchronises(run: Callable[[], object]) -> bool:
    """Whether a call waits for the GPU."""
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", type=int, default=[4, 8, 25, 100])
    parser.add_argument("--components", nargs="+", type=int, default=[1, 14, 200])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--longest", type=float, default=60.0, help="skip TorchJD beyond this (s)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = []
    print(
        f"{'tasks':>5} {'components':>10} {'gradvac ms':>11} {'torchjd ms':>11} {'ratio':>7} waits"
    )
    for num_tasks in args.tasks:
        for num_components in args.components:
            j = torch.randn(num_components, num_tasks, 4 * num_tasks, device=args.device) + 0.3
            gram = (j @ j.mT).double()
            run = weighing(num_tasks, gram)
            ours = timed(run, args.device, args.seconds)
            waits = args.device == "cuda" and synchronises(run)
            expected = 1e-4 * num_tasks**2 * num_components  # seconds, roughly
            theirs = float("nan")
            if expected < args.longest:
                theirs = timed(torchjd_weighing(gram), args.device, args.seconds)
            rows.append(
                {"tasks": num_tasks, "components": num_components, "gradvac_ms": ours}
                | {"torchjd_ms": theirs, "ratio": theirs / ours, "waits": waits}
            )
            print(
                f"{num_tasks:5} {num_components:10} {ours:11.3f} {theirs:11.2f} "
                f"{theirs / ours:7.1f} {'yes' if waits else 'no'}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
