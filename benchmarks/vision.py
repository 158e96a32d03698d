"""A Hugging Face ViT, with class and position tokens, at many tasks: a step against the plain one.

    OMP_NUM_THREADS=1 python benchmarks/vision.py

Rows of the tasks are interleaved. Forward and backward, without an optimizer; the two take turns,
and the ratio is that of the shortest times. The scale and shift that all rows share (class token,
positions) once were computed task by task.
"""

import argparse
import copy
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from gradvac import Aligner, GradVac


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    plain = ViTForImageClassification(config)
    aligned = copy.deepcopy(plain)
    images = torch.randn(args.rows, 3, 64, 64)
    labels = torch.randint(0, 10, (args.rows,))
    tasks = [row % args.tasks for row in range(args.rows)]
    names = [f"task{n}" for n in range(args.tasks)]
    aligner = Aligner(aligned, names, GradVac(), engine="one_backward")

    def losses(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images).logits, labels, reduction="none")

    def joint() -> None:
        plain.zero_grad()
        losses(plain).sum().backward()

    def ours() -> None:
        aligned.zero_grad()
        aligner.backward(losses(aligned), tasks)

    for _ in range(11):  # the first probes are over then
        joint()
        ours()
    pairs = [(timed(joint), timed(ours)) for _ in range(args.rounds)]
    floor, cost = min(a for a, _ in pairs), min(b for _, b in pairs)
    print(f"joint {1e3 * floor:.1f} ms, one_backward {1e3 * cost:.1f} ms, ratio {cost / floor:.2f}")
    print(aligner)


if __name__ == "__main__":
    main()
