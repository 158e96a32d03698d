"""Time and peak memory of a training step, relative to joint training, in one run.

    python benchmarks/step.py --size tiny --tasks 4 8             # CPU
    python benchmarks/step.py --size thin --modes joint one_backward --rounds 5 --clock processor
    python benchmarks/step.py --size base big --tasks 4 8 25      # GPU
    python benchmarks/step.py --size base --modes joint one_backward --graph
    python benchmarks/step.py --size base --modes compiled one_backward_tapped --rounds 3

Modes: `joint` is one backward of the summed loss, the floor; `one_backward` and `per_task` are this
library's engines with GradVac per layer; `measured` is one_backward where the model sorts its rows,
so that their owners are measured every step; `compiled` is joint with torch.compile, and
`one_backward_compiled` one_backward on such a model; `joint_tapped` and `one_backward_tapped` are
the same with `backend="gradvac"`; `torchjd` is TorchJD's GradVac per layer;
`pairwise` is GradVac on flat gradient vectors, as multi-task libraries commonly have it. A step
includes the optimizer. `--graph` replays the whole step as a CUDA graph, where launches cost
nothing. `--rounds 3` measures every mode three times, taking turns, and gives the median of the
rounds' ratios: a host whose speed changes within a run does not decide. Peak memory is that of
ordinary steps; `probes` that of all steps from the second on, those that verify the layout of rows
included.
"""

import argparse
import gc
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformer import SIZES, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.engine import compile_tapped

MODES = (
    "joint",
    "one_backward",
    "measured",
    "compiled",
    "one_backward_compiled",
    "joint_tapped",
    "one_backward_tapped",
    "per_task",
    "pairwise",
    "torchjd",
)
# Verify their first steps.
LOOKING = ("one_backward", "measured", "one_backward_compiled", "one_backward_tapped")
Backward = Callable[[], object]
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def joint(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:  # noqa: ARG001
    source, target, _ = batch
    return lambda: row_losses(model, source, target).sum().backward()


def compiled(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    return joint(torch.compile(model), batch, num_tasks)


def aligned_compiled(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    return aligned("one_backward")(torch.compile(model), batch, num_tasks)


def joint_tapped(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    return joint(torch.compile(model, backend=compile_tapped), batch, num_tasks)


def aligned_tapped(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    tapped = torch.compile(model, backend=compile_tapped)
    return aligned("one_backward")(tapped, batch, num_tasks)


def measured(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    source, target, tasks = batch
    names = [f"task{t}" for t in range(num_tasks)]
    aligner = gradvac.Aligner(model, names, gradvac.GradVac(), component, engine="one_backward")
    order = torch.randperm(len(source), device=source.device)
    back = order.argsort()

    def backward() -> None:
        losses = row_losses(model, source[order], target[order])
        aligner.backward(losses[back], tasks)

    return backward


def aligned(engine: str) -> Callable[[nn.Module, tuple, int], Backward]:
    def make(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
        source, target, tasks = batch
        names = [f"task{t}" for t in range(num_tasks)]
        aligner = gradvac.Aligner(model, names, gradvac.GradVac(), component, engine=engine)
        if engine == "one_backward":
            return lambda: aligner.backward(row_losses(model, source, target), tasks)

        def backward() -> None:
            losses = {n: task_loss(model, batch, t, num_tasks) for t, n in enumerate(names)}
            aligner.backward(losses)

        return backward

    return make


def torchjd(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    from torchjd.aggregation import GradVac
    from torchjd.autojac import backward as jacobians
    from torchjd.autojac import jac_to_grad

    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(component(name), []).append(parameter)
    aggregators = {name: GradVac(beta=1e-2) for name in groups}

    def backward() -> None:
        losses = [task_loss(model, batch, t, num_tasks) for t in range(num_tasks)]
        jacobians(losses, parallel_chunk_size=1)
        for name, parameters in groups.items():
            jac_to_grad(parameters, aggregators[name], optimize_gramian_computation=True)

    return backward


def pairwise(model: nn.Module, batch: tuple, num_tasks: int) -> Backward:
    parameters = list(model.parameters())
    target = torch.zeros(num_tasks, num_tasks, device=parameters[0].device)

    def backward() -> None:
        flat = []
        for task in range(num_tasks):
            grads = torch.autograd.grad(task_loss(model, batch, task, num_tasks), parameters)
            flat.append(torch.cat([g.reshape(-1) for g in grads]))
        original = torch.stack(flat)
        altered = original.clone()
        for i in range(num_tasks):
            for j in torch.randperm(num_tasks).tolist():
                if i != j:
                    _vaccinate(altered[i], original[j], target[i, j])
        update = altered.sum(0)
        for parameter, piece in zip(
            parameters, update.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = piece.view_as(parameter)

    return backward


def _vaccinate(own: Tensor, other: Tensor, goal: Tensor) -> None:
    phi = torch.dot(own, other) / (own.norm() * other.norm())
    if phi < goal:
        sine = (1 - goal**2).sqrt()
        own += (
            other * own.norm() * (goal * (1 - phi**2).sqrt() - phi * sine) / (other.norm() * sine)
        )
    goal.mul_(0.99).add_(0.01 * phi)


def task_loss(model: nn.Module, batch: tuple, task: int, num_tasks: int) -> Tensor:
    source, target, _ = batch
    rows = slice(task * len(source) // num_tasks, (task + 1) * len(source) // num_tasks)
    return row_losses(model, source[rows], target[rows]).sum()


MAKERS = {
    "joint": joint,
    "one_backward": aligned("one_backward"),
    "measured": measured,
    "compiled": compiled,
    "one_backward_compiled": aligned_compiled,
    "joint_tapped": joint_tapped,
    "one_backward_tapped": aligned_tapped,
    "per_task": aligned("per_task"),
    "torchjd": torchjd,
    "pairwise": pairwise,
}


def make_step(args: argparse.Namespace, size: str, num_tasks: int, mode: str) -> Callable[[], None]:
    """A training step of a new model on one batch; `args`: device, interleaved, graph."""
    device = args.device
    torch.compiler.reset()  # what another mode compiled may have given its buffers away
    torch.manual_seed(1)
    with torch.device(device):
        model = Transformer(SIZES[size])
    batch = make_batch(SIZES[size], num_tasks, device)
    if args.interleaved:
        batch = (*batch[:2], [row % num_tasks for row in range(len(batch[0]))])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, fused=device == "cuda", capturable=args.graph
    )
    backward = MAKERS[mode](model, batch, num_tasks)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            backward()
        optimizer.step()

    return step


def measure(args: argparse.Namespace, size: str, num_tasks: int, mode: str) -> dict[str, float]:
    """Median seconds of a step, and the peak GiB of ordinary steps and of all but the first."""
    device, clock = args.device, CLOCKS[args.clock]
    step = make_step(args, size, num_tasks, mode)
    repeat(step, 1, device, clock)
    peak_gib(device)
    # The probes of its first steps are not ordinary: they must be over, however long they take.
    patience = math.inf if mode in LOOKING else 6.0
    repeat(step, args.warmup, device, clock, patience)
    run = captured(step) if args.graph else step
    probes = peak_gib(device)
    times = repeat(run, args.iterations, device, clock)
    ordinary = peak_gib(device)
    return {"seconds": statistics.median(times), "gib": ordinary, "probes": max(probes, ordinary)}


def peak_gib(device: str) -> float:
    """The peak since the last call."""
    if device != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def compare(args: argparse.Namespace, size: str, num_tasks: int) -> Iterator[dict[str, Any]]:
    """A row per mode, relative to the first: medians over rounds in which the modes take turns."""
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    for _ in range(args.rounds):
        for mode in args.modes:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    rounds[mode].append(measure(args, size, num_tasks, mode))
            except torch.OutOfMemoryError:
                print(f"{size:5} {num_tasks:5} {mode:21} out of memory", flush=True)
            finally:
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    floor = rounds[args.modes[0]]
    for mode, measured in rounds.items():
        if len(measured) < len(floor):
            continue
        ratios = [own["seconds"] / one["seconds"] for own, one in zip(measured, floor, strict=True)]
        row: dict[str, Any] = {"size": size, "tasks": num_tasks, "mode": mode, "graph": args.graph}
        row |= {"seconds": statistics.median(own["seconds"] for own in measured)}
        row |= {"time": statistics.median(ratios), "ratios": ratios}
        row["gib"] = max(own["gib"] for own in measured)
        most = max(one["gib"] for one in floor)
        for column, peak in (("memory", "gib"), ("probes", "probes")):
            row[column] = max(own[peak] for own in measured) / most if most else 1.0
        yield row


def repeat(
    step: Callable[[], None],
    most: int,
    device: str,
    clock: Callable[[], float],
    patience: float = 6.0,
) -> list[float]:
    """Seconds of every call; slow steps are repeated less often."""
    times: list[float] = []
    while len(times) < most and (sum(times) < patience or len(times) < 2):
        start = clock()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return times


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The whole step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    kept = graph, step  # the step holds the model and the batch, which the graph reads
    return lambda: kept[0].replay()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--tasks", nargs="+", type=int, default=[4, 8])
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=["joint", "one_backward", "per_task", "pairwise", "torchjd"],
    )
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=11, help="the first probes are over then")
    parser.add_argument("--rounds", type=int, default=1, help="the modes take turns so often")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--interleaved", action="store_true", help="rows not sorted by task")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: its time alone, on a CPU that others use too (OMP_NUM_THREADS=1)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = []
    print(
        f"{'size':5} {'tasks':>5} {'mode':21} {'ms':>9} {'time':>6} {'GiB':>7} {'memory':>6}"
        f" {'probes':>6}"
    )
    for size in args.size:
        for num_tasks in args.tasks:
            for row in compare(args, size, num_tasks):
                rows.append(row)
                print(
                    f"{size:5} {num_tasks:5} {row['mode']:21} {1e3 * row['seconds']:9.2f} "
                    f"{row['time']:6.2f} {row['gib']:7.2f} {row['memory']:6.2f} "
                    f"{row['probes']:6.2f}",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
