"""Parity of every CUDA path with its reference, on a GPU; exits with 1 if one deviates.

    python benchmarks/gpu_checks.py

Triton kernels against torch, the grouped weight gradient against a loop, and whole steps of
one_backward against per_task in float64, float32, bf16 autocast and fp16 with a GradScaler, with
and without a CUDA graph.
"""

import copy
import itertools
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformer import Size, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.engine import compile_tapped
from gradvac.engine.contributions import Lookup, OuterProduct
from gradvac.engine.kernels import (
    Segments,
    are_products_in_place,
    grouped_outer,
    norm_sums,
    outer_products,
    stacked,
    triton_kernels,
)
from gradvac.engine.kernels.stacks import HALF, combine_reference, gram_reference
from gradvac.engine.pairs_of_entries import gram_of_entries
from gradvac.rules import pairwise

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
            launched = triton_kernels.Launched([j], [0], 1)
            found, expected = launched.grams()[0], gram_reference(j)
            report(f"gram T={num_tasks} {dtype}", error(found, expected), limit)
            w = torch.randn(num_tasks, device=DEVICE, dtype=torch.float64)
            expected = combine_reference(w, j.double())
            (found,) = launched.combine(w[None])
            report(f"combine T={num_tasks} {dtype}", error(found, expected), limit)


def check_many() -> None:
    """Several parameters of two components, one of them a part of a wider stack."""
    for num_tasks in (3, 25, 100):
        wide = torch.randn(num_tasks, 5000, device=DEVICE)
        stacks = [
            torch.randn(num_tasks, 70_001, device=DEVICE).bfloat16(),
            wide[:, 1000:1777],
            torch.randn(num_tasks, 123, device=DEVICE).bfloat16(),
            wide[:, :1000],
        ]
        both = stacked(stacks, [0, 1, 1, 0], 2)
        on_host = stacked([s.cpu() for s in stacks], [0, 1, 1, 0], 2)
        report(f"many grams T={num_tasks}", error(both.grams().cpu(), on_host.grams()), 1e-5)
        weights = torch.randn(2, num_tasks, dtype=torch.float64)
        pairs = zip(both.combine(weights.to(DEVICE)), on_host.combine(weights), strict=True)
        worst = max(error(mine.cpu(), theirs) for mine, theirs in pairs)
        report(f"many updates T={num_tasks}", worst, 1e-5)


def check_sweep() -> None:
    for num_tasks, num_components in ((2, 3), (8, 14), (25, 14), (100, 3)):
        j = torch.randn(num_components, num_tasks, 200, dtype=torch.float64, device=DEVICE) + 0.1
        j[0, 1] = 0
        gram = j @ j.mT
        target = torch.rand_like(gram) * 1.2 - 0.2
        keys = torch.arange(num_tasks, device=DEVICE)
        step = torch.zeros((), dtype=torch.int64, device=DEVICE)
        components = torch.arange(num_components, device=DEVICE) - 1
        order = pairwise.random_order(-5, step + 7, components, keys)
        on_host = pairwise.random_order(-5, step.cpu() + 7, components.cpu(), keys.cpu())
        report(f"order T={num_tasks}", float((order.cpu() != on_host).sum()), 0)
        vaccinated = torch.arange(num_tasks, device=DEVICE) != 1
        found = pairwise.pairwise_sweep(gram, target, order, vaccinated)
        expected = pairwise.pairwise_sweep_reference(gram, target, order, vaccinated)
        name = f"sweep T={num_tasks} K={num_components}"
        report(f"{name} coefficients", error(found[0], expected[0]), 1e-10)
        report(f"{name} observed", error(found[1].nan_to_num(9), expected[1].nan_to_num(9)), 1e-10)
        report(f"{name} active", float((found[2] != expected[2]).sum()), 0)


def check_rules() -> None:
    """Some components and tasks of many, on the device and on the host; one is not finite."""
    tasks, components = [f"task{t}" for t in range(9)], [f"layer{k}" for k in range(5)]
    present, chosen = [7, 0, 3, 4, 8], [4, 0, 2]
    for preserve_norm in (False, True):
        found: list[Tensor] = []
        for device in (torch.device("cpu"), DEVICE):
            torch.manual_seed(0)
            rule = gradvac.GradVac(0.3, vaccinated=tasks[3:], preserve_norm=preserve_norm)
            rule.bind(tasks, components)
            for step in range(3):
                j = torch.randn(3, len(present), 60, dtype=torch.float64)
                gram = j @ j.mT
                if step == 1:
                    gram[1, 2, 0] = torch.nan
                rule.start_step(present, torch.ones(len(present), device=device))
                weighing = rule.weigh(chosen, gram.to(device))
                rule.commit()
                parts = (weighing.weights, weighing.target, weighing.active, rule.finite)
                found += [part.cpu().double() for part in parts]
            found.append(rule.state_dict()["target"].double())
        num = len(found) // 2
        pairs = zip(found[num:], found[:num], strict=True)
        worst = max(error(mine, theirs) for mine, theirs in pairs)
        report(f"GradVac, preserve_norm={preserve_norm}", worst, 1e-12)


def check_entries() -> None:
    """Gram matrices of a tied table by pairs of entries, and lookups in rows that lie apart."""
    tasks = torch.randint(0, 5, (16,))
    segments = Segments(tasks, 6, DEVICE)  # task 5 is absent
    tokens = torch.randint(0, 999, (16 * 7,), device=DEVICE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        left = torch.randn(16 * 7, 1003, device=DEVICE).to(dtype)
        right, values = (torch.randn(16 * 7, 40, device=DEVICE).to(dtype) for _ in range(2))
        wide = values if dtype == torch.float64 else values.float()  # as embeddings under autocast
        uses = [OuterProduct(left, right, segments), Lookup(wide, tokens, 1003, segments)]
        exact = OuterProduct(left.double(), right.double(), segments).task_gradients()
        exact = Lookup(values.double(), tokens, 1003, segments).add_to(exact).flatten(1)
        found = gram_of_entries(uses)
        assert found is not None
        limit = 1e-12 if dtype == torch.float64 else 2e-5
        report(f"pairs of entries {dtype}", error(found, exact @ exact.t()), limit)
        both = [torch.cat([left, -left]), torch.cat([right, 0.99 * right])]  # nearly cancel out
        both_segments = Segments(tasks.repeat(2), 6, DEVICE)
        found = gram_of_entries([OuterProduct(*both, both_segments)])
        assert found is not None
        small = OuterProduct(*(one.double() for one in both), both_segments).task_gradients()
        small = small.flatten(1) @ small.flatten(1).t()
        single = both[0].double().square().sum(1) * both[1].double().square().sum(1)
        off = float((found - small).abs().max() / single.sum())
        report(f"pairs that cancel, of what they contribute {dtype}", off, 2e-6)
        together = uses[1].add_to(uses[0].task_gradients())
        limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
        report(f"lookups beside products {dtype}", error(together.flatten(1), exact), limit)


def check_lookups() -> None:
    """Tables that are only looked up, few rows of them, and those that are also a head's."""
    for num_tasks, num_rows, width in ((3, 300, 40), (25, 50_000, 1024), (100, 4000, 768)):
        tasks = torch.randint(0, num_tasks, (256,))
        segments = Segments(tasks, num_tasks, DEVICE)
        tokens = (num_rows * torch.rand(256 * 16, device=DEVICE) ** 3).long()
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(256 * 16, width, device=DEVICE).to(dtype)
            if dtype == torch.bfloat16:  # column by column, as some gradients lie
                values = values.t().contiguous().t()
            exact = Lookup(values.double(), tokens, num_rows, segments).of_few_rows()[1].flatten(1)
            found = Lookup(values, tokens, num_rows, segments)
            name = f"lookups T={num_tasks} V={num_rows} {dtype}"
            report(f"{name}, Gram matrix", error(found.gram(), exact @ exact.t()), 1e-6)
            weights = 1 + 0.003 * torch.rand(num_tasks, device=DEVICE)
            dense = Lookup(values.double(), tokens, num_rows, segments).weighted(weights)
            report(f"{name}, weighted", error(found.weighted(weights), dense), 1e-6)
            start, end = num_rows // 3, num_rows // 2
            before = torch.randn(num_tasks, end - start + 5, width, device=DEVICE)
            for other, limit in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
                part = before.to(other)[:, : end - start]
                expected = part.double() + Lookup(
                    values.double(), tokens, num_rows, segments
                ).slice(start, end)
                found.add_to(part, start)
                report(f"{name}, added to {other}", error(part, expected), limit)


def check_grouped() -> None:
    for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 1e-6), (torch.float16, 1e-2)):
        tasks = torch.tensor([0, 2, 2, 0, 3, 3, 3, 0, 2, 5, 5, 3])  # unsorted, 1 and 4 absent
        in_order = tasks.sort().values
        ways = ((tasks, False), (tasks.to(DEVICE), False), (in_order, False))
        for index, ascending in (*ways, (in_order.to(DEVICE), True)):
            segments = Segments(index, 6, DEVICE, ascending=ascending)
            left = torch.randn(12 * 37, 63, device=DEVICE).to(dtype)  # not of whole 16 bytes
            right = torch.randn(12 * 37, 129, device=DEVICE).to(dtype)
            found = grouped_outer(left, right, segments)
            owner = index.to(DEVICE).repeat_interleave(37)
            expected = torch.stack(
                [left[owner == t].double().t() @ right[owner == t].double() for t in range(6)]
            )
            report(f"grouped outer {dtype} {index.device.type}", error(found, expected), limit)
            lefts, rights = torch.cat([left, 2 * left, left]), right.repeat(3, 1)
            three = grouped_outer(lefts, rights, segments.repeated(3)).unflatten(0, (3, -1))
            worst = max(error(three[0], expected), error(three[1], 2 * expected))
            report(f"three grouped outers {dtype} {index.device.type}", worst, limit)
            pairs = ([left, 2 * left], [right, right])
            for sums_of, values in ((0, None), (1, left), (2, right)):
                two, sums = outer_products(*pairs, segments, sums_of)
                worst = max(error(two[0], expected), error(two[1], 2 * expected))
                report(f"products where they lie {dtype}", worst, limit)
                if values is not None and sums is not None:
                    by_task = [values[owner == t].double().sum(0) for t in range(6)]
                    report(f"their sums {dtype}", error(sums[0], torch.stack(by_task)), 1e-3)
            is_half = dtype != torch.float32
            report(f"no copies {dtype}", are_products_in_place(left, 129, segments) != is_half, 0)
            same = grouped_outer(lefts, rights, segments.repeated(3, are_same=True))
            report(f"one use after the other {dtype}", error(same, 4 * expected), limit)


def check_rows() -> None:
    """Products of rows copied in blocks: not whole, of a wider matrix, at odd places, large."""
    tasks = torch.tensor([0, 2, 2, 0, 3, 3, 3, 0, 2, 5, 5, 3])  # unsorted, 1 and 4 absent
    shapes = ((37, 64, 264), (64, 8, 128), (197, 136, 1000), (300, 768, 256), (512, 2048, 2048))
    for (per_row, num_outputs, num_inputs), dtype in itertools.product(shapes, HALF):
        length = 12 * per_row
        rights = [torch.randn(length, num_inputs, device=DEVICE).to(dtype) for _ in range(3)]
        wider = torch.randn(length, 3 * num_outputs + 8, device=DEVICE).to(dtype)
        odd = torch.randn(3, length * num_outputs + 1, device=DEVICE).to(dtype)
        left = {
            "rows": [torch.randn(length, num_outputs, device=DEVICE).to(dtype) for _ in range(3)],
            "slices": [*wider.split(num_outputs, 1)[:3]],
            "odd places": [one[1:].view(length, -1) for one in odd],
        }
        ways = itertools.product(left.items(), (tasks, tasks.sort().values), range(3))
        for (name, lefts), index, sums_of in ways:
            owner = index.repeat_interleave(per_row).to(DEVICE)
            found, sums = outer_products(lefts, rights, Segments(index, 6, DEVICE), sums_of)
            of_products, of_sums = [], [0.0]
            for n, pair in enumerate(zip(lefts, rights, strict=True)):
                mine = [[one[owner == t].double() for one in pair] for t in range(6)]
                exact = torch.stack([a.t() @ b for a, b in mine])
                of_products.append(error(found[n], exact))
                if sums is not None:
                    exact = torch.stack([both[sums_of - 1].sum(0) for both in mine])
                    of_sums.append(error(sums[n], exact))
            where = f"{name} {per_row} x {num_outputs} x {num_inputs} {dtype} {sums_of}"
            report(where, max(of_products), 1e-2)
            report(f"sums of {where}", max(of_sums), 1e-3)


def check_sums() -> None:
    for width in (8, 64, 1000, 1024, 3000):
        index = torch.tensor([0, 2, 1, 0, 2, 2, 1])
        x, gy = (torch.randn(7, 50, width, device=DEVICE) for _ in range(2))
        scale, mean = x.square().mean(-1).rsqrt(), x.mean(-1)
        for order in (index, index.sort().values):
            segments = Segments(order, 4, DEVICE)  # task 3 is absent
            owner = order.to(DEVICE)

            def by_task(values: Tensor, owner: Tensor = owner) -> Tensor:
                return torch.stack([values[owner == t].double().sum((0, 1)) for t in range(4)])

            for dtype in (torch.float32, torch.bfloat16):
                flat = gy.to(dtype).flatten(0, 1)
                found = triton_kernels.segment_sums(flat, segments)
                report(f"sums {dtype} D={width}", error(found, by_task(gy.to(dtype))), 1e-4)
            normal = (x - mean[..., None]) * scale[..., None]
            flat_gy, flat_x = gy.flatten(0, 1), x.flatten(0, 1)
            its_mean, its_scale = mean.reshape(-1, 1), scale.reshape(-1, 1)
            by_scale, _ = norm_sums([flat_gy], [flat_x], [], [its_scale], segments)
            report(
                f"rms norm D={width}", error(by_scale[0], by_task(gy * x * scale[..., None])), 1e-4
            )
            pairs = [flat_gy, 2 * flat_gy], [flat_x, flat_x]
            scales, shifts = norm_sums(*pairs, [its_mean] * 2, [its_scale] * 2, segments)
            assert shifts is not None
            worst = max(error(scales[n], (n + 1) * by_task(gy * normal)) for n in range(2))
            report(f"two layer norms D={width} scale", worst, 1e-4)
            worst = max(error(shifts[n], (n + 1) * by_task(gy)) for n in range(2))
            report(f"two layer norms D={width} shift", worst, 1e-4)


def check_loss() -> None:
    """Also rows beyond 2^31 logits, and start gradients of 0."""
    # Here, because the laboratory needs packages that the other checks do not.
    from gradvac.lab.recipes.nmt import triton_kernels as nmt_kernels
    from gradvac.lab.recipes.nmt.loss import plain_cross_entropy

    for num, vocabulary in ((7, 50), (64, 4096), (33, 64_000), (34_000, 64_000)):
        labels = torch.randint(0, vocabulary, (num,), device=DEVICE)
        starts = torch.randn(num, device=DEVICE)
        starts[1] = 0.0
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            for smoothing in (0.0, 0.1):
                logits = torch.empty(num, vocabulary, device=DEVICE, dtype=dtype).normal_(0, 3)
                losses, sums = nmt_kernels.smoothed_losses(logits, labels, smoothing)
                found = nmt_kernels.logit_gradients(logits, labels, sums, starts, smoothing)
                rows = slice(max(0, num - 100), num)
                exact = logits[rows].double().requires_grad_()
                expected = plain_cross_entropy(exact, labels[rows], smoothing)
                (gradient,) = torch.autograd.grad((expected * starts[rows]).sum(), exact)
                name = f"{num} x {vocabulary} {dtype} smoothing {smoothing}"
                report(f"loss {name}", error(losses[rows], expected.detach()), 1e-5)
                report(f"its gradient {name}", error(found[rows], gradient), limit)
                del logits, found
    beyond = torch.tensor([50, -1, 3], device=DEVICE)
    losses, _ = nmt_kernels.smoothed_losses(torch.zeros(3, 50, device=DEVICE), beyond, 0.1)
    report("labels outside", float((losses.isfinite() != (beyond == 3)).sum()), 0)


def models() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """Models whose backward differs between CPU and GPU, and their losses per row."""
    x = torch.randn(8, 6, 16, device=DEVICE)
    image = torch.randn(8, 3, 8, 8, device=DEVICE)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    small = Transformer(Size(64, 32, 2, 64, 1, 256))
    tokens = torch.randint(0, 64, (8, 9), device=DEVICE)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )
    return {
        "LSTM (cuDNN)": (nn.LSTM(16, 16, batch_first=True), lambda m: squares(m(x)[0])),
        "LSTM, batch second": (
            nn.LSTM(16, 16),
            lambda m: squares(m(x.transpose(0, 1))[0].transpose(0, 1)),
        ),
        "encoder layer": (encoder, lambda m: squares(m(x))),
        "convolutions": (convolutions, lambda m: squares(m(image))),
        # The plain squares of a normalised row add up to a constant, whose gradient is rounding.
        "RMS norm": (nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16)), lambda m: squares(m(x) - x)),
        "compiled": (torch.compile(small), lambda m: row_losses(m, tokens[:, :8], tokens)),
        "compiled, parameters outside": (
            torch.compile(copy.deepcopy(small), backend=compile_tapped),
            lambda m: row_losses(m, tokens[:, :8], tokens),
        ),
    }


def squares(values: Tensor) -> Tensor:
    return values.flatten(1).square().mean(1)


def check_models() -> None:
    for name, (model, losses) in models().items():
        model = model.to(DEVICE)
        expected: dict[str, Tensor] = {}
        for engine in ("per_task", "one_backward"):
            aligner = gradvac.Aligner(
                model, list("abc"), gradvac.GradVac(target=0.3), "all_matrix", engine=engine
            )
            for _ in range(2):
                model.zero_grad()
                aligner.backward(losses(model), [2, 0, 1, 0, 2, 2, 1, 1])
            found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            expected = expected or found
        worst = max(error(found[n], g) for n, g in expected.items() if float(g.norm()) > 1e-5)
        report(f"{name}: one_backward against per_task", worst, 2e-3)


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
    for check in (
        check_products,
        check_many,
        check_sweep,
        check_rules,
        check_entries,
        check_lookups,
        check_grouped,
        check_rows,
        check_sums,
        check_loss,
        check_models,
        check_steps,
    ):
        try:
            check()
        except Exception as problem:  # one broken path must not hide the others
            report(f"{check.__name__}: {type(problem).__name__}: {problem}"[:400], float("nan"), 0)
    print("all good" if not failures else f"{failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
