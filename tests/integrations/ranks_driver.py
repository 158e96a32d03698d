"""Trains with each integration in one process and in two, and compares.

    python -m tests.integrations.ranks_driver FOLDER

Writes the largest difference of weights, or an error, to FOLDER/found.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    import transformers
    from accelerate import Accelerator
    from lightning.pytorch import LightningModule, Trainer
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from gradvac.integrations.accelerate import AcceleratedAligner
    from gradvac.integrations.lightning import AlignedModule
    from gradvac.integrations.transformers import AlignedTrainer

from gradvac import Aligner, GradVac

from ..ranks import failures, run_ranks

TASKS = ["de", "fr", "sw"]
SIZE = 2
Weights = dict[str, Tensor]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


# -- the same step three times -------------------------------------------------------------------


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **silent)).double()


def hugging_face(folder: Path, *, resume: bool = False) -> Weights:
    """A causal model, whose losses are divided by the labels of the whole step."""
    model = gpt2()
    rows = []
    for number in range(64):
        length = 3 + number * 7 % 6
        ids = [5 + (number * 11 + k * k) % 35 for k in range(length)] + [1] * (8 - length)
        labels = [i if i != 1 else -100 for i in ids]
        mask = [int(i != 1) for i in ids]
        task = TASKS[number % 3]
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "task": task})
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // size(),
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        report_to=[],
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = AlignedTrainer(model, args, train_dataset=rows, tasks=TASKS, rule=GradVac(beta=0.3))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return dict(model.state_dict())


def resumed(folder: Path) -> Weights:
    uninterrupted, weights = hugging_face(folder), hugging_face(folder, resume=True)
    assert all(torch.equal(uninterrupted[key], weights[key]) for key in weights)
    return weights


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Our half of eight batches of six rows; gradients are means, so losses are not halved."""
    generator = torch.Generator().manual_seed(1)
    tasks = torch.tensor([0, 1, 1, 2, 0, 1])
    every = [
        (torch.randn(6, 4, generator=generator).double(), torch.randn(6, generator=generator))
        for _ in range(8)
    ]
    ours = slice(rank() * 6 // size(), (rank() + 1) * 6 // size())
    return [(x[ours], y[ours].double(), tasks[ours]) for x, y in every]


def accelerate(folder: Path) -> Weights:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    aligner = AcceleratedAligner(accelerator, Aligner(model, TASKS, GradVac(beta=0.3)))
    for inputs, goals, tasks in batches():
        with accelerator.accumulate(model):
            losses = (model(inputs)[:, 0] - goals).square() / len(goals)
            aligner.backward(losses, tasks)
            optimizer.step()
            optimizer.zero_grad()
    weights: Weights = dict(accelerator.unwrap_model(model).state_dict())
    if size() > 1:
        alone = Aligner(network(), TASKS, process_group=None)
        with pytest.raises(ValueError, match=r"2 processes .*aligner .*1"):
            AcceleratedAligner(accelerator, alone)
    return weights


class Module(AlignedModule, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def configure_aligner(self) -> Aligner:
        group = torch.distributed.group.WORLD if size() > 1 else None
        return Aligner(self.net, TASKS, GradVac(beta=0.3), process_group=group)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, goals, tasks = batch
        losses = (self.net(inputs)[:, 0] - goals).square() / len(goals)
        return self.aligned_loss(losses, tasks)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


def lightning(folder: Path) -> Weights:
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=size(),
        strategy="ddp" if size() > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return dict(module.net.state_dict())


# -- one process, and two ------------------------------------------------------------------------


def gap(one: Weights, two: Weights) -> float:
    return max(float((one[key] - two[key]).abs().max()) for key in one)


def main(folder: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found: dict[str, Any] = {}
    for work in (hugging_face, resumed, accelerate, lightning):
        results: list[Any] = []
        for num in (1, SIZE):
            into = folder / f"{work.__name__}-{num}"
            results += run_ranks(
                lambda _, work=work, into=into: work(into), num, into, as_torchrun=True
            )
        if failed := failures(results):
            found[work.__name__] = failed
            continue
        one, *two = results
        assert all(torch.equal(two[0][key], two[1][key]) for key in one)
        first = (network() if work in (accelerate, lightning) else gpt2()).state_dict()
        found[work.__name__] = {"gap": gap(one, two[0]), "moved": gap(one, dict(first))}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
