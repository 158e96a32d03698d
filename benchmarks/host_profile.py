"""Where the host's time goes in a step of one_backward.

python benchmarks/host_profile.py --size base --tasks 8 [--compiled]
"""

import argparse
import cProfile
import pstats
import warnings

import torch
from transformer import SIZES, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.engine import compile_tapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--compiled", action="store_true", help='with backend="gradvac"')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    model = Transformer(SIZES[args.size]).to(args.device)
    called = torch.compile(model, backend=compile_tapped) if args.compiled else model
    source, target, tasks = make_batch(SIZES[args.size], args.tasks, args.device)
    names = [f"task{t}" for t in range(args.tasks)]
    aligner = gradvac.Aligner(called, names, None, component, engine="one_backward")

    def step() -> None:
        model.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            losses = row_losses(called, source, target)
        aligner.backward(losses, tasks)

    for _ in range(12):
        step()
    profile = cProfile.Profile()
    # Hooks run on autograd's own thread on CUDA: threads are profiled from Python 3.12 on.
    profile.enable()
    for _ in range(20):
        step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
