"""Where the device's time goes in a training step: its kernels, by mode.

    python benchmarks/device_profile.py --size base --tasks 8 --modes compiled one_backward_tapped
    python benchmarks/device_profile.py --size base --tasks 8 --graph

Modes are those of `step.py`; `--graph` replays the step as a CUDA graph. For every mode the time of
all kernels in a step and the longest ones; then which names cost more than in the first mode.
Without a GPU the operators are shown instead, which is good for a trial.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from step import MODES, captured, make_step
from torch.profiler import ProfilerActivity, profile
from transformer import SIZES

STEPS = 5


def kernels(args: argparse.Namespace, mode: str) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and calls in a step of a mode, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = make_step(args, args.size, args.tasks, mode)
        for _ in range(12):  # the first probes are over then
            step()
        return kernels_of(captured(step) if args.graph else step, args.device, args.letters)


def kernels_of(
    step: Callable[[], object], device: str, letters: int = 90
) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and calls in a step, by name; without a GPU, of operators."""
    on_gpu = device == "cuda"
    step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    times, calls = Counter[str](), Counter[str]()
    for event in found.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key[:letters]] += spent / STEPS
        calls[event.key[:letters]] += event.count / STEPS
    return times, calls


def show(title: str, times: Counter[str], calls: Counter[str], most: int) -> None:
    print(f"\n{title}: {times.total() / 1e3:.2f} ms, {calls.total():.0f} calls")
    for name, spent in times.most_common(most):
        print(f"{spent / 1e3:9.3f} ms {calls[name]:7.0f} x  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["compiled", "one_backward_tapped"]
    )
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--interleaved", action="store_true", help="rows not sorted by task")
    parser.add_argument("--most", type=int, default=30, help="names shown per mode")
    parser.add_argument("--letters", type=int, default=90, help="of a name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    first = None
    for mode in args.modes:
        times, calls = kernels(args, mode)
        show(mode, times, calls, args.most)
        if first is None:
            first = times, calls
            continue
        more = Counter({n: times[n] - first[0][n] for n in {*times, *first[0]}})
        show(f"{mode} minus {args.modes[0]}", more, calls, args.most)


if __name__ == "__main__":
    main()
