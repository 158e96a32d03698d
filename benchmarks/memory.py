"""Memory over many steps: live tensors, Python's objects and the process, early and at the end.

    python benchmarks/memory.py                  # 2,000 steps of three small models
    python benchmarks/memory.py --steps 200
    python benchmarks/memory.py --peaks          # the largest number of bytes within a step

A step that left something behind (a graph, a plan for every length) would show as growth. Lengths
vary from step to step where the model allows it. Ends with an error if live tensors or Python's
objects have grown by more than a kilobyte a step would.
"""

import argparse
import gc
import resource
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradvac

ROWS, TASKS = 6, ["a", "b", "c"]
Step = Callable[[int], Tensor]


def llama() -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)

    def losses(step: int) -> Tensor:
        tokens = torch.randint(0, 64, (ROWS, 5 + step % 9))
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(1)

    return model, losses


def vit() -> tuple[nn.Module, Step]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    model = ViTForImageClassification(config)

    def losses(_: int) -> Tensor:
        logits = model(torch.randn(ROWS, 3, 8, 8)).logits
        return F.cross_entropy(logits, torch.randint(0, 5, (ROWS,)), reduction="none")

    return model, losses


def encoder() -> tuple[nn.Module, Step]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def losses(step: int) -> Tensor:
        result: Tensor = model(torch.randn(ROWS, 5 + step % 9, 16))
        return result.square().mean((1, 2))

    return model, losses


MODELS = {"llama": llama, "vit": vit, "encoder": encoder}


def live_bytes() -> int:
    """Of all tensors that Python can see, each piece of memory once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            try:
                storage = thing.untyped_storage()
            except NotImplementedError:  # a wrapper of torch.func's: the tensor inside counts
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(name: str, steps: int, warmup: int) -> list[dict[str, int]]:
    """Bytes after the warm-up and at the end."""
    torch.manual_seed(0)
    model, losses = MODELS[name]()
    model.train()
    aligner = gradvac.Aligner(model, TASKS, gradvac.GradVac(), engine="one_backward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found: list[dict[str, int]] = []
    tracemalloc.start()
    for step in range(1, steps + 1):
        aligner.backward(losses(step), [row % len(TASKS) for row in range(ROWS)])
        optimizer.step()
        optimizer.zero_grad()
        if step in (warmup, steps):
            live = live_bytes()
            python, _ = tracemalloc.get_traced_memory()
            found.append({"tensors": live, "python": python, "process": resident_bytes()})
    tracemalloc.stop()
    return found


def growth(found: list[dict[str, int]]) -> dict[str, int]:
    return {what: found[-1][what] - found[0][what] for what in found[0]}


def peak(step: Callable[[], object]) -> int:
    """The largest number of bytes that a step allocates at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        step()
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peaks() -> None:
    """A small Transformer at 8 tasks: joint training, a step that verifies, an ordinary one."""
    from transformer import Size, Transformer, component, make_batch, row_losses

    size, tasks = Size(2000, 64, 4, 512, 3, 2048), [str(task) for task in range(8)]
    source, target, of_rows = make_batch(size, len(tasks), "cpu")
    model = Transformer(size)

    def joint() -> None:
        model.zero_grad()
        row_losses(model, source, target).sum().backward()

    joint()
    bytes_of = {"joint": peak(joint)}
    for engine in ("one_backward", "auto"):
        aligner = gradvac.Aligner(model, tasks, gradvac.GradVac(), component, engine=engine)

        def step(aligner: gradvac.Aligner = aligner) -> None:
            model.zero_grad()
            aligner.backward(row_losses(model, source, target), of_rows)

        step()
        bytes_of[f"{engine}, verifying"] = peak(step)
        bytes_of[engine] = peak(step)
    for what, most in bytes_of.items():
        print(f"{what:24} {most:14,} {most / bytes_of['joint']:6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--peaks", action="store_true", help="of single steps, instead of growth")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.peaks:
        peaks()
        return
    leaks: list[Any] = []
    print(f"{'model':10} {'':>9} {'tensors':>12} {'python':>12} {'process':>14}")
    for name in args.models:
        found = measure(name, args.steps, args.warmup)
        for when, row in zip((f"step {args.warmup}", f"step {args.steps}"), found, strict=True):
            print(f"{name:10} {when:>9} " + " ".join(f"{own:12,}" for own in row.values()))
        grown = growth(found)
        allowed = 1024 * (args.steps - args.warmup)
        leaks += [(name, what) for what in ("tensors", "python") if grown[what] > allowed]
        print(f"{name:10} {'growth':>9} " + " ".join(f"{own:12,}" for own in grown.values()))
    if leaks:
        sys.exit(f"memory grows: {leaks}")


if __name__ == "__main__":
    main()
