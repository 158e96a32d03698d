"""On a GPU: the recorder waits for nothing, and both read what a CPU would have said."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac
from gradvac.analysis import Recorder, measure, read_record

from .. import needs

pytestmark = [
    needs.GPU,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
TASKS = ("fr", "hi", "tr")


def test_recorder_does_not_wait_for_the_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).cuda()
    aligner = Aligner(model, TASKS, GradVac(beta=0.3))
    alignments = [
        aligner.backward(model(torch.randn(9, 4, device="cuda")).square().sum(1), list(TASKS) * 3)
        for _ in range(12)
    ]
    recorder = Recorder(tmp_path / "r", every=1, chunk=5, tasks=TASKS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, alignment in enumerate(alignments, start=1):
            recorder(step, alignment)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    record = read_record(tmp_path / "r")
    assert record.steps.tolist() == list(range(1, 13))
    expected = np.stack([alignment.similarity.cpu().numpy() for alignment in alignments])
    np.testing.assert_allclose(record.similarity, expected, atol=5e-4)


@pytest.mark.parametrize("offload", [False, True])
def test_measure_is_that_of_the_cpu(offload: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64))
    inputs = {task: torch.randn(4, 8, 64) for task in TASKS}

    def loss(device: str, x: Tensor) -> Tensor:
        value: Tensor = model(x.to(device)).square().sum()
        return value

    def found(device: str) -> list[np.ndarray]:
        model.to(device)
        batches = {task: [partial(loss, device, x) for x in own] for task, own in inputs.items()}
        return [one.values for one in measure(model, batches, offload=offload).parts]

    for one, other in zip(found("cpu"), found("cuda"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
