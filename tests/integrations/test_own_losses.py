"""Trainers with a loss of their own: label smoothing, `compute_loss`, `compute_loss_func`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gradvac import GradNorm, GradVac, Sum
from gradvac.analysis import load_run
from gradvac.integrations._loss_parts import LossParts
from gradvac.integrations.transformers import (
    AlignedMixin,
    AlignedSeq2SeqTrainer,
    AlignedTrainer,
    MeasureConflicts,
)

TASKS = ["de", "fr", "sw"]
Make = Callable[..., Any]


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        own = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        self.steps.append(torch.cat(own))


class Weighted(Trainer):
    """As users write it: their own mean of token losses, by the labels of the step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * (1 + losses.detach().tanh())).sum() / num_items_in_batch


class AlignedWeighted(AlignedMixin, Weighted):
    pass


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    sums = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="sum")
    return 3 * sums / num_items_in_batch


CASES: list[tuple[str, Any, Any, dict[str, Any], dict[str, Any]]] = [
    ("tokens", Weighted, AlignedWeighted, {}, {}),
    ("tokens", Trainer, AlignedTrainer, {}, {"compute_loss_func": own_loss}),
    ("causal", Trainer, AlignedTrainer, {"label_smoothing_factor": 0.1}, {}),
    ("seq2seq", Seq2SeqTrainer, AlignedSeq2SeqTrainer, {"label_smoothing_factor": 0.1}, {}),
    ("classes", Trainer, AlignedTrainer, {"label_smoothing_factor": 0.2}, {}),
]


@pytest.mark.parametrize(("kind", "plain", "aligned", "args", "options"), CASES)
def test_sum_gives_the_trainers_own_gradients(
    kind: str,
    plain: Any,
    aligned: Any,
    args: dict[str, Any],
    options: dict[str, Any],
    make_model: Make,
    make_examples: Make,
    arguments: Make,
) -> None:
    """Five micro-batches in groups of two."""
    examples = make_examples(kind, 30)
    if kind == "seq2seq":  # as DataCollatorForSeq2Seq does
        for one in examples:
            one["decoder_input_ids"] = [2, *one["input_ids"][:-1]]
    rows = [{k: v for k, v in one.items() if k != "task"} for one in examples]
    found = []
    for make, data, extra in (
        (plain, rows, {}),
        (aligned, examples, {"tasks": TASKS, "rule": Sum()}),
    ):
        kept = Gradients()
        make_args = Seq2SeqTrainingArguments if kind == "seq2seq" else TrainingArguments
        trainer = make(
            make_model(kind),
            arguments(
                make=make_args,
                gradient_accumulation_steps=2,
                max_steps=-1,
                num_train_epochs=1,
                max_grad_norm=0.0,
                **args,
            ),
            train_dataset=data,
            callbacks=[kept],
            **options,
            **extra,
        )
        loss = trainer.train().training_loss
        found.append((kept.steps, loss))
    (theirs, their_loss), (mine, my_loss) = found
    assert len(mine) == len(theirs) == 3
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert my_loss == pytest.approx(their_loss, rel=1e-4)


def test_log_holds_the_mean_loss_of_every_task(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    """Per label, over all steps since the last entry; the model stands still."""
    examples = make_examples("tokens", 24)
    for number, one in enumerate(examples):  # as many labels in every batch
        one["labels"] = [(number + place) % 5 for place in range(8)]
    model = make_model("tokens")
    trainer = AlignedTrainer(
        model,
        arguments(learning_rate=0.0, logging_steps=4),
        train_dataset=examples,
        tasks=TASKS,
        rule=Sum(),
    )
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    for task in TASKS:
        own = [{k: v for k, v in one.items() if k != "task"} for one in examples]
        own = [row for row, one in zip(own, examples, strict=True) if one["task"] == task]
        batch = {k: torch.tensor([row[k] for row in own]) for k in own[0]}
        with torch.no_grad():
            expected = float(model(**batch).loss)
        assert entry[f"loss/{task}"] == pytest.approx(expected, rel=1e-4)


class Coupled(Trainer):
    """Negatives from the batch: every row is compared with all others."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        scores = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        return -(scores @ scores.T).log_softmax(1).diagonal().mean()


class AlignedCoupled(AlignedMixin, Coupled):
    pass


class Penalised(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss + sum(p.square().sum() for p in model.parameters())


class AlignedPenalised(AlignedMixin, Penalised):
    pass


def test_losses_that_cannot_be_taken_apart_are_refused(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    for trainer, rule, said in (
        (AlignedCoupled, GradVac(), "rows of different tasks influence each other"),
        (AlignedPenalised, GradVac(), "its loss has a term that reaches a parameter of shape"),
        (AlignedWeighted, GradNorm(), "rule: GradNorm looks at the tasks' losses"),
    ):
        kind = "classes" if trainer is not AlignedWeighted else "tokens"
        with pytest.raises(ValueError, match=said):
            trainer(
                make_model(kind),
                arguments(),
                train_dataset=make_examples(kind),
                tasks=TASKS,
                rule=rule,
            ).train()


def test_parts_of_a_loss() -> None:
    """A sum over rows has values; others have exact gradients alone, and say so."""
    torch.manual_seed(0)
    weight = torch.randn(3, requires_grad=True)
    outputs = torch.randn(4, 3) * weight
    parts = LossParts.find(outputs.sum() / 7, {"x": outputs, "loss": outputs.sum()}, 4)
    torch.testing.assert_close(parts.rows(), outputs.sum(1) / 7)
    assert parts.is_sum
    curved = LossParts.find(outputs.square().sum(), [outputs], 4)
    assert curved.rows().isnan().all()
    (gradient,) = torch.autograd.grad(curved.rows()[1:3].sum(), weight, retain_graph=True)
    (expected,) = torch.autograd.grad(outputs[1:3].square().sum(), weight, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    curved.check_separate(torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="influence each other"):
        LossParts.find(outputs.sum().square(), [outputs], 4).check_separate(torch.arange(4))
    with pytest.raises(ValueError, match=r"not computed from tensors with 5 rows .*\[4, 3\]"):
        LossParts.find(outputs.sum(), [outputs], 5)
    later = outputs * 2
    with pytest.raises(ValueError, match="and from what that was computed from"):
        LossParts.find(outputs.sum() + later.sum(), [outputs, later], 4)


def test_a_plain_trainer_measures_conflicts(
    make_model: Make, make_examples: Make, arguments: Make, tmp_path: Path
) -> None:
    """Weights are those of training without the callback; a resumed run goes on with the file."""
    examples = make_examples("tokens", 24)
    rows = [{k: v for k, v in one.items() if k != "task"} for one in examples]
    tensors = [{k: torch.tensor([v]) for k, v in row.items()} for row in rows]
    batches = {
        task: [t for t, one in zip(tensors, examples, strict=True) if one["task"] == task][:4]
        for task in TASKS
    }

    def train(folder: str, callbacks: list[Any], resume: bool = False) -> Any:
        args = arguments(output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=2)
        trainer = Trainer(make_model("tokens"), args, train_dataset=rows, callbacks=callbacks)
        checkpoint = str(tmp_path / folder / "checkpoint-2") if resume else None
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model

    plain = train("plain", [])
    folder = tmp_path / "run"
    measured = train("measured", [MeasureConflicts(folder, batches, every=1)])
    again = train("measured", [MeasureConflicts(folder, batches, every=1)], resume=True)
    for one, other, third in zip(
        plain.parameters(), measured.parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    run = load_run(folder)
    assert run.tasks == tuple(TASKS)
    assert run.measured[0].steps.tolist() == [1, 2, 3, 4]
    assert (abs(run.measured[0].values) <= 1).all()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_mixed_training_goes_on_exactly(
    accumulation: int,
    make_model: Make,
    make_examples: Make,
    arguments: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Passes of four batches; resumed in the middle of the second and at its beginning."""
    every = enumerate(make_examples("causal", 48))
    examples = [one for n, one in every if one["task"] == "de" or n < 24]
    seen: list[list[str]] = []

    class Watched(AlignedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            seen.append(list(inputs["tasks_of_rows"]))
            return super().training_step(model, inputs, *args, **options)

    def train(folder: str, resume: str | None = None) -> Any:
        trainer = Watched(
            make_model("causal"),
            arguments(
                output_dir=str(tmp_path / folder),
                gradient_accumulation_steps=accumulation,
                per_device_train_batch_size=8,
                max_steps=8,
                save_strategy="steps",
                save_steps=1,
            ),
            train_dataset=examples,
            tasks=TASKS,
            rule=GradVac(beta=0.3),
            sampling={"temperature": float("inf"), "most_epochs": 20.0},
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / folder / resume))
        return trainer

    whole = train("whole")
    table = capsys.readouterr().out.splitlines()
    assert table[:2] == ["What training will see:", "task  rows  share  rows seen  epochs"]
    batches, seen[:] = list(seen), []
    assert len(batches) == 8 * accumulation
    rows = [task for batch in batches for task in batch]
    assert rows.count("sw") > 0.2 * len(rows)  # of whom a sixth of the examples are
    for step in (3, 4):
        seen.clear()
        again = train("whole", f"checkpoint-{step}")
        assert seen == batches[step * accumulation :]
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
