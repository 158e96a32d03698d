"""The signature: one line that changes with what numbers depend on, and with nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradvac
from gradvac.lab.training import RunConfig
from gradvac.lab.training.settings import run_signature


def sign(data: str = "data", **sections: Any) -> dict[str, str]:
    settings = RunConfig.model_validate(sections)
    aligner = settings.align.build(nn.Linear(2, 1), ["fr", "hi"])
    return run_signature(
        settings, aligner, tasks=aligner.tasks, data=data, device=torch.device("cpu")
    )


def test_line_names_what_counts() -> None:
    fields = sign(align={"rule": "gradvac", "beta": 0.1}, train={"seed": 3})
    assert fields["rule"] == "gradvac(beta=0.1)"
    assert fields["seed"] == "3"
    assert fields["granularity"] == "all_layer"
    assert fields["engine"] == "one_backward"
    assert fields["torch"] == torch.__version__
    assert fields["version"] == gradvac.__version__
    line = fields.pop("signature")
    assert line == "|".join(f"{name}:{value}" for name, value in fields.items())


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"lr": 0.5}},
        {"train": {"max_steps": 5}},
        {"train": {"seed": 5}},
        {"sampling": {"temperature": 1.0}},
        {"data": "other data"},
    ],
)
def test_line_changes_with_the_experiment(change: Any) -> None:
    assert sign(**change)["signature"] != sign()["signature"]


def test_line_does_not_change_with_technicalities() -> None:
    change = {"device": "cpu", "threads": 3, "log_every": 7, "keep": 9, "writers": []}
    assert sign(train=change) == sign()
