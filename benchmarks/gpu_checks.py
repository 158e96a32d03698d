"""Parity of every CUDA path with its reference, on a GPU; exits with 1 if one deviates.

    python benchmarks/gpu_checks.py

Triton kernels against torch, the grouped weight gradient against a loop, and whole steps of
one_backward against per_task in float64, float32, bf16 autocast and fp16 with a GradScaler, with
and without a CUDA graph.
"""

import copy
import sys
import warnings

import torch
from torch import Tensor
from transformer import Size, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.gradients import _kernels, _triton
from gradvac.gradients._rows import Segments
from gradvac.rules import _pairwise

DEVICE = torch.device("cuda")
failures = 0


def report(name: str, deviation: float, limit: float) -> None:
    global failures
    good = deviation <= limit  # a NaN is not
    failures += not good
    print(
        f"{'ok  ' if good else 'FAIL'} {name:58} {deviation:9.2e} (limit {limit:.0e})", flush=True
    )


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def check_products() -> None:
    for num_tasks in (2, 4, 8, 25, 100):
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)):
            j = torch.randn(num_tasks, 1_000_003, device=DEVICE).to(dtype)
            report(
                f"gram T={num_tasks} {dtype}",
                error(_triton.gram(j), _kernels.gram_reference(j)),
                limit,
            )
            w = torch.randn(num_tasks, device=DEVICE, dtype=torch.float64)
            expected = _kernels.combine_reference(w, j.double())
            report(f"combine T={num_tasks} {dtype}", error(_triton.combine(w, j), expected), limit)


def check_sweep() -> None:
    for num_tasks, num_components in ((2, 3), (8, 14), (25, 14), (100, 3)):
        j = torch.randn(num_components, num_tasks, 200, dtype=torch.float64, device=DEVICE) + 0.1
        j[0, 1] = 0
        gram = j @ j.mT
        target = torch.rand_like(gram) * 1.2 - 0.2
        keys = torch.arange(num_tasks, device=DEVICE)
        step = torch.zeros((), dtype=torch.int64, device=DEVICE)
        order = _pairwise.random_order(0, step, torch.arange(num_components, device=DEVICE), keys)
        vaccinated = torch.arange(num_tasks, device=DEVICE) != 1
        found = _pairwise.sweep(gram, target, order, vaccinated)
        expected = _pairwise.sweep_reference(gram, target, order, vaccinated)
        name = f"sweep T={num_tasks} K={num_components}"
        report(f"{name} coefficients", error(found[0], expected[0]), 1e-10)
        report(f"{name} observed", error(found[1].nan_to_num(9), expected[1].nan_to_num(9)), 1e-10)
        report(f"{name} active", float((found[2] != expected[2]).sum()), 0)


def check_grouped() -> None:
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 1e-3), (torch.float16, 1e-2)):
        tasks = torch.tensor([0, 2, 2, 0, 3, 3, 3, 0, 2, 5, 5, 3])  # unsorted, 1 and 4 absent
        for index in (tasks, tasks.to(DEVICE), tasks.sort().values):
            segments = Segments(index, 6, DEVICE)
            left = torch.randn(12 * 37, 64, device=DEVICE).to(dtype)
            right = torch.randn(12 * 37, 128, device=DEVICE).to(dtype)
            found = _kernels.grouped_outer(left, right, segments)
            owner = index.to(DEVICE).repeat_interleave(37)
            expected = torch.stack(
                [left[owner == t].double().t() @ right[owner == t].double() for t in range(6)]
            )
            report(f"grouped outer {dtype} {index.device.type}", error(found, expected), limit)


def check_norms() -> None:
    for width in (64, 1000, 1024):
        for is_rms in (False, True):
            index = torch.tensor([0, 2, 1, 0, 2, 2, 1])
            layer = (torch.nn.RMSNorm if is_rms else torch.nn.LayerNorm)(width, device=DEVICE)
            torch.nn.init.normal_(layer.weight)
            x = torch.randn(7, 5, width, device=DEVICE, requires_grad=True)
            gy = torch.randn_like(x)
            (gx,) = torch.autograd.grad(layer(x), x, gy)
            flat = x.detach().flatten(0, 1)
            scale = (
                flat.square().mean(1).add(torch.finfo().eps).rsqrt()
                if is_rms
                else (flat.var(1, correction=0).add(layer.eps).rsqrt())
            )
            mean = torch.zeros_like(scale) if is_rms else flat.mean(1)
            for order in (index, index.sort().values):
                segments = Segments(order, 3, DEVICE)
                found = _triton.norm_backward(
                    gy.flatten(0, 1), flat, mean, scale, layer.weight, segments, is_rms
                )
                normal = ((flat - mean[:, None]) * scale[:, None]).view_as(gy) * gy
                owner = order.to(DEVICE)
                expected = torch.stack([normal[owner == t].sum((0, 1)) for t in range(3)])
                name = f"{'rms' if is_rms else 'layer'} norm D={width}"
                report(f"{name} input", error(found[0].view_as(gx), gx), 1e-4)
                report(f"{name} scale by task", error(found[1], expected), 1e-4)


def steps(engine: str, kind: str, *, graph: bool = False) -> dict[str, Tensor]:
    """Gradients after a few steps of one engine on a small Transformer."""
    torch.manual_seed(0)
    size = Size(512, 64, 4, 128, 2, 1024)
    model = Transformer(size).to(DEVICE)
    model = model.double() if kind == "float64" else model
    source, target, tasks = make_batch(size, 4, "cuda")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)
    aligner = gradvac.Aligner(
        model, list("abcd"), gradvac.GradVac(target=0.3), component, engine=engine
    )
    scaler = torch.amp.GradScaler("cuda", enabled=kind == "fp16", init_scale=1024.0)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cuda", low or torch.float32, enabled=low is not None):
            losses = row_losses(model, source, target)
        aligner.backward(scaler.scale(losses), tasks)

    for _ in range(3 if graph else 5):  # a graph adds one warm-up and one replay
        step()
    if graph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        recorded.replay()
    grads = {
        n: copy.deepcopy(p.grad).double() / scaler.get_scale() for n, p in model.named_parameters()
    }
    aligner.detach()
    return grads


def check_steps() -> None:
    limits = {"float64": 1e-9, "float32": 2e-3, "bf16": 6e-2, "fp16": 2e-2}
    for kind, limit in limits.items():
        expected = steps("per_task", kind)
        for graph in (False, True):
            found = steps("one_backward", kind, graph=graph)
            scale = max(float(g.norm()) for g in expected.values())
            worst = max(
                float((found[n] - g).norm()) / max(float(g.norm()), 1e-3 * scale)
                for n, g in expected.items()
            )
            report(f"step {kind}{' as a CUDA graph' if graph else ''}", worst, limit)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.simplefilter("ignore")
    for check in (check_products, check_sweep, check_grouped, check_norms, check_steps):
        try:
            check()
        except Exception as problem:  # one broken path must not hide the others
            report(f"{check.__name__}: {type(problem).__name__}: {problem}"[:400], float("nan"), 0)
    print("all good" if not failures else f"{failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
