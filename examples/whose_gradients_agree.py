"""Your own training loop, with the geometry of its gradients recorded, measured and shown.

Eight tasks, two families: each task fits a curve that is nearly that of its family. The gradients
should reveal the families; the report says whether they do.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac
from gradvac.analysis import Recorder, load_run, measure, save_similarities
from gradvac.analysis.report import summarise, write_report

FAMILIES = {f"{kind}{n}": kind for kind in ("sine", "step") for n in (1, 2, 3, 4)}
CURVES = {"sine": torch.sin, "step": torch.sign}


def losses(model: nn.Module, tasks: list[str], num_points: int) -> Tensor:
    """Loss of every point of every task's curve, [tasks * points]."""
    x = torch.rand(len(tasks), num_points) * 6 - 3
    y = [CURVES[FAMILIES[t]](own + 0.1 * int(t[-1])) for t, own in zip(tasks, x, strict=True)]
    return (model(x.reshape(-1, 1))[:, 0] - torch.cat(y)).square()


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tasks = list(FAMILIES)
    aligner = Aligner(model, tasks, GradVac())
    with Recorder(folder / "record.bin", every=10, rule="gradvac", after=0) as recorder:
        for step in range(1, 201):
            rows = losses(model, tasks, 16) / 16
            optimizer.zero_grad()
            recorder(step, aligner.backward(rows, [task for task in tasks for _ in range(16)]))
            optimizer.step()
    batches = {t: [lambda t=t: losses(model, [t], 500).sum()] * 4 for t in tasks}
    measured = measure(model, batches, "all_layer", step=200)
    save_similarities(folder / "similarity.npz", measured.parts)
    run = load_run(folder, families=FAMILIES)
    for sentence in summarise(run):
        print(f"{sentence.about}: {sentence.text}")
    print(write_report([run], folder / "report.html"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else folder))
