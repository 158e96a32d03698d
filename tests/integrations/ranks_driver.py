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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    import transformers
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from gradvac.integrations.accelerate import AcceleratedAligner
    from gradvac.integrations.lightning import AlignedModule
    from gradvac.integrations.transformers import AlignedTrainer

from gradvac import Aligner, GradVac
from gradvac.analysis import load_run

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


def hugging_face(folder: Path, *, resume: bool = False, **options: Any) -> Weights:
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
        **{key: options.pop(key) for key in list(options) if key.startswith("fsdp")},
    )
    if args.fsdp:
        assert args.world_size == SIZE  # which begins with a new state
        allow_fsdp_on_cpus()
    trainer = AlignedTrainer(
        model, args, train_dataset=rows, tasks=TASKS, rule=GradVac(beta=0.3), **options
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    is_divided = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert is_divided == trainer.is_fsdp_enabled == bool(args.fsdp)
    return whole(trainer.model)


def allow_fsdp_on_cpus() -> None:
    """Accelerate knows FSDP on GPUs alone: let it take these processes for some."""
    state = PartialState(cpu=True)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def whole(model: nn.Module) -> Weights:
    """All weights, wherever their parts are."""
    found = model.state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def resumed(folder: Path) -> Weights:
    uninterrupted, weights = hugging_face(folder), hugging_face(folder, resume=True)
    assert all(torch.equal(uninterrupted[key], weights[key]) for key in weights)
    return weights


def mixed(folder: Path) -> Weights:
    """Tasks mixed, resumed in the middle of a pass, and recorded by the first process."""
    options: dict[str, Any] = {"sampling": {"temperature": 5.0}, "record": folder / "record"}
    uninterrupted = hugging_face(folder, **options)
    weights = hugging_face(folder, resume=True, record_every=1, **options)
    assert all(torch.equal(uninterrupted[key], weights[key]) for key in weights)
    if rank() == 0:
        record = load_run(folder / "record").record
        assert record is not None
        assert record.steps.tolist() == [3, 4]
    return weights


def hugging_face_fsdp2(folder: Path) -> Weights:
    """The same model divided among processes, and continued."""
    if size() == 1:
        return hugging_face(folder)
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    uninterrupted = hugging_face(folder, fsdp=True, fsdp_config=dict(config))
    weights = hugging_face(folder, resume=True, fsdp=True, fsdp_config=dict(config))
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


def accelerate_fsdp2(folder: Path) -> Weights:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=30
    )
    if size() == 1:
        return accelerate(folder)
    allow_fsdp_on_cpus()
    return accelerate(folder, fsdp_plugin=plugin)


def accelerate(folder: Path, **options: Any) -> Weights:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
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
    is_divided = any(isinstance(p, DTensor) for p in model.parameters())
    assert is_divided == ("fsdp_plugin" in options)
    weights = whole(accelerator.unwrap_model(model))
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


class Sharded(Module):
    def configure_model(self) -> None:
        if size() > 1:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for part in (self.net[0], self.net[2], self.net):  # type: ignore[index]
                fully_shard(part, mesh=mesh)

    def configure_aligner(self) -> Aligner:
        return Aligner(self.net, TASKS, GradVac(beta=0.3))


def lightning_fsdp2(folder: Path) -> Weights:
    return lightning(folder, Sharded(), ModelParallelStrategy(size(), 1))


def lightning(folder: Path, module: Module | None = None, strategy: Any = "ddp") -> Weights:
    module = module or Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=size(),
        strategy=strategy if size() > 1 else "auto",
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
    assert any(isinstance(p, DTensor) for p in module.parameters()) == (
        size() > 1 and strategy != "ddp"
    )
    return whole(module.net)


# -- one process, and two ------------------------------------------------------------------------


def gap(one: Weights, two: Weights) -> float:
    return max(float((one[key] - two[key]).abs().max()) for key in one)


def main(folder: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found: dict[str, Any] = {}
    every = (hugging_face, resumed, mixed, hugging_face_fsdp2)
    for work in (*every, accelerate, accelerate_fsdp2, lightning, lightning_fsdp2):
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
        first = (gpt2() if work in every else network()).state_dict()
        found[work.__name__] = {"gap": gap(one, two[0]), "moved": gap(one, dict(first))}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
