"""AlignedTrainer: the plain Trainer's gradients with Sum(), a bare Aligner's with any rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from gradvac import Aligner, GradVac, PCGrad, Sum
from gradvac.engine.compiled import split_and_compile
from gradvac.integrations._loss_parts import check_logits
from gradvac.integrations.transformers import (
    AlignedMixin,
    AlignedSeq2SeqTrainer,
    AlignedTrainer,
    Normaliser,
    TaskCollator,
    sum_by_row,
)

TASKS = ["de", "fr", "sw"]
KINDS = ["tokens", "classes", "values", "causal", "seq2seq"]
Make = Callable[..., Any]


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.steps.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )


def assert_same(one: Gradients, other: Gradients) -> None:
    assert len(one.steps) == len(other.steps) > 0
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("accumulation", "engines"), [(1, ["auto"]), (3, ["auto", "per_task"])])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_gives_the_plain_trainers_gradients(
    kind: str,
    accumulation: int,
    engines: list[str],
    make_model: Make,
    make_examples: Make,
    arguments: Make,
) -> None:
    """Seven micro-batches in groups of three: the last group is a single one."""
    examples = make_examples(kind, 42)
    options: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "max_steps": -1,
        "num_train_epochs": 2 if accumulation > 1 else 1,
        "max_grad_norm": 0.0,
    }
    plain_rows = [{k: v for k, v in one.items() if k != "task"} for one in examples]

    def run(trainer_class: Any, rows: Any, **aligned: Any) -> tuple[Gradients, float]:
        kept = Gradients()
        trainer = trainer_class(
            model=make_model(kind),
            args=arguments(**options),
            train_dataset=rows,
            callbacks=[kept],
            **aligned,
        )
        return kept, trainer.train().training_loss

    plain, plain_loss = run(Trainer, plain_rows)
    for engine in engines:
        kept, loss = run(AlignedTrainer, examples, tasks=TASKS, rule=Sum(), engine=engine)
        assert_same(kept, plain)
        assert loss == pytest.approx(plain_loss, rel=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_a_model_compiled_with_our_backend(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    """As `model.compile(backend="gradvac")` splits it, with no compiler to wait for."""
    split = partial(split_and_compile, compile_inside=aot_eager)
    found = []
    for is_compiled in (False, True):
        model, kept = make_model("tokens"), Gradients()
        if is_compiled:
            model.compile(backend=split)
        trainer = AlignedTrainer(
            model=model,
            args=arguments(),
            train_dataset=make_examples("tokens", 42),
            callbacks=[kept],
            tasks=TASKS,
            engine="one_backward",  # which refuses what is compiled as a whole
        )
        trainer.train()
        found.append(kept)
    torch.compiler.reset()
    assert_same(*found)


def bare_loop(kind: str, model: nn.Module, examples: list[dict[str, Any]], rule: Any) -> list[Any]:
    """The loop a reader would write: two steps of two micro-batches of six.

    The Trainer's GPT-2 divides by all labels of the step, its BERT by those of the micro-batch.
    """
    aligner = Aligner(model, TASKS, rule, engine="per_task")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    is_causal = kind == "causal"
    alignments = []
    for step in range(2):
        groups = [examples[12 * step + 6 * n : 12 * step + 6 * (n + 1)] for n in (0, 1)]
        rows = [[{k: v for k, v in one.items() if k != "task"} for one in own] for own in groups]
        batches = [default_data_collator(own) for own in rows]
        labels = [batch.pop("labels") for batch in batches]
        counts = [int((own != -100).sum()) for own in labels]
        for number, (batch, own) in enumerate(zip(batches, groups, strict=True)):
            sums, _ = sum_by_row(model(**batch).logits, labels[number], shifted=is_causal)
            divisor = sum(counts) if is_causal else counts[number]
            alignment = aligner.backward(
                sums / divisor, [one["task"] for one in own], accumulate=number == 0
            )
        alignments.append(alignment)
        optimizer.step()
        optimizer.zero_grad()
    return alignments


class InOrder(AlignedTrainer):
    """Examples in the order they come, so that a bare loop can follow."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("kind", ["tokens", "causal"])
@pytest.mark.parametrize("rule", [GradVac, PCGrad])
def test_equal_to_a_bare_aligner_loop(
    rule: Any, kind: str, make_model: Make, make_examples: Make, arguments: Make
) -> None:
    examples = make_examples(kind, 24)
    model, bare = make_model(kind), make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = InOrder(
        model=model,
        args=arguments(gradient_accumulation_steps=2, max_steps=2, max_grad_norm=0.0),
        train_dataset=examples,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        tasks=TASKS,
        rule=rule(),
        engine="per_task",
    )
    trainer.train()
    alignments = bare_loop(kind, bare, examples, rule())
    assert trainer.alignment is not None
    torch.testing.assert_close(trainer.alignment.gram, alignments[-1].gram, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(trainer.alignment.weights, alignments[-1].weights)
    for (name, mine), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(("accumulation", "engine"), [(1, "per_task"), (2, "one_backward")])
def test_a_resumed_trainer_equals_an_uninterrupted_one(
    accumulation: int,
    engine: str,
    make_model: Make,
    make_examples: Make,
    arguments: Make,
    tmp_path: Path,
) -> None:
    def trainer(folder: str, **options: Any) -> AlignedTrainer:
        return AlignedTrainer(
            model=make_model("tokens"),
            args=arguments(
                output_dir=str(tmp_path / folder),
                gradient_accumulation_steps=accumulation,
                save_strategy="steps",
                save_steps=2,
                **options,
            ),
            train_dataset=make_examples("tokens"),
            tasks=TASKS,
            rule=GradVac(beta=0.3),
            engine=engine,
        )

    whole = trainer("whole")
    whole.train()
    trainer("parts").train()  # writes the checkpoint of step 2 as well
    again = trainer("parts")
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert again.state.global_step == 4
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert str(again.aligner.state_dict()) == str(whole.aligner.state_dict())
    logged = [
        [entry[f"loss/{task}"] for task in TASKS if f"loss/{task}" in entry]
        for one in (again, whole)
        for entry in one.state.log_history
        if entry["step"] == 4 and "loss" in entry
    ]
    assert logged[0] == pytest.approx(logged[1])
    fresh = trainer("fresh")
    assert str(fresh.aligner.state_dict()) != str(whole.aligner.state_dict())


def test_a_checkpoint_without_the_aligner_is_refused(
    make_model: Make, make_examples: Make, arguments: Make, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    rows = [{k: v for k, v in one.items() if k != "task"} for one in make_examples("tokens")]
    Trainer(make_model("tokens"), arguments(**options), train_dataset=rows).train()
    trainer = AlignedTrainer(
        make_model("tokens"),
        arguments(**options),
        train_dataset=make_examples("tokens"),
        tasks=TASKS,
        engine="per_task",
    )
    with pytest.raises(ValueError, match=r"has no aligner\.pt"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_logging_and_evaluation(make_model: Make, make_examples: Make, arguments: Make) -> None:
    trainer = AlignedSeq2SeqTrainer(
        model=make_model("seq2seq"),
        args=seq2seq(arguments()),
        train_dataset=make_examples("seq2seq"),
        eval_dataset=make_examples("seq2seq", 6),
        tasks=TASKS,
        rule=GradVac(),
        engine="per_task",
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for name in ("similarity", "active", "update_cosine", "update_ratio"):
        assert f"gradvac/{name}" in logged[0]
    for task in TASKS:
        assert logged[0][f"loss/{task}"] > 0
        assert logged[0][f"gradvac/norm/{task}"] > 0
    assert -1 <= logged[0]["gradvac/similarity/de~sw"] <= 1
    assert 0 <= logged[0]["gradvac/conflicts"] <= 1
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(make_examples("seq2seq", 6)).predictions is not None


def seq2seq(args: Any) -> Any:
    from transformers import Seq2SeqTrainingArguments

    known = {"output_dir": args.output_dir, "max_steps": 4, "per_device_train_batch_size": 6}
    rest = {"report_to": [], "save_strategy": "no", "logging_steps": 2, "use_cpu": True}
    return Seq2SeqTrainingArguments(**known, **rest, disable_tqdm=True)


class OddLoss(BertForTokenClassification):
    """A model whose own loss is no plain cross-entropy, by a little."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **rest: Any) -> Any:
        outputs = super().forward(input_ids, attention_mask, labels=labels, **rest)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.005
        return outputs


def test_a_loss_of_ones_own_is_noticed_and_can_be_given(
    make_examples: Make, arguments: Make
) -> None:
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
    )

    def trainer(**options: Any) -> AlignedTrainer:
        return AlignedTrainer(
            OddLoss(config),
            arguments(max_steps=1),
            train_dataset=make_examples("tokens"),
            tasks=TASKS,
            engine="per_task",
            **options,
        )

    with pytest.raises(ValueError, match=r"row_losses: .*Give row_losses"):
        trainer().train()

    def rows(outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        sums, _ = sum_by_row(outputs.logits, labels, shifted=False)
        return sums / num_items + 0.005 / len(labels)

    trainer(row_losses=rows).train()
    with pytest.raises(ValueError, match="1 entries for 6 rows"):
        trainer(row_losses=lambda outputs, *_: outputs.loss[None]).train()


@pytest.mark.parametrize("kind", ["tokens", "classes", "causal"])
def test_logits_and_labels_of_other_sizes(kind: str, make_model: Make, make_examples: Make) -> None:
    """As with the virtual tokens of prompt tuning."""
    batch = default_data_collator(
        [{k: v for k, v in one.items() if k != "task"} for one in make_examples(kind, 6)]
    )
    logits, labels = make_model(kind)(**batch).logits, batch["labels"]
    sum_by_row(logits, labels, shifted=kind == "causal")
    more = torch.cat([logits, logits], 0 if logits.dim() == 2 else 1)
    with pytest.raises(ValueError, match=r"cannot be guessed .*row_losses"):
        sum_by_row(more, labels, shifted=kind == "causal")


def test_labels_of_other_names(make_model: Make, make_examples: Make, arguments: Make) -> None:
    examples = [
        {"start_positions" if k == "labels" else k: v for k, v in one.items()}
        for one in make_examples("classes")
    ]
    args = arguments(remove_unused_columns=False)
    with pytest.raises(ValueError, match=r"no labels \(but .*start_positions\).*compute_loss"):
        AlignedTrainer(make_model("classes"), args, train_dataset=examples, tasks=TASKS).train()


def test_what_replaces_the_backward_pass_is_refused(
    make_model: Make, make_examples: Make, arguments: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("tokens")
    with pytest.raises(ValueError, match="optim: LOMO"):
        AlignedTrainer(model, arguments(optim="adalomo"), tasks=TASKS)

    class Own(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            return super().training_step(*args, **options)

    class AlignedOwn(AlignedMixin, Own):
        pass

    with pytest.raises(ValueError, match=r"Own\.training_step: would be left out"):
        AlignedOwn(model, arguments(), tasks=TASKS)
    with monkeypatch.context() as patch:
        trainer = AlignedTrainer(model, arguments(), tasks=TASKS)
        config = property(lambda _: SimpleNamespace(cp_enabled=True))
        patch.setattr(Accelerator, "parallelism_config", config)
        with pytest.raises(ValueError, match="args: cp_size divides every row among processes"):
            trainer._check_options()
    for kind, said in (
        ("DEEPSPEED", r"args: DeepSpeed \(ZeRO\) runs the backward pass in its own engine"),
        ("FSDP", "args: the first FSDP flattens parameters"),
        ("MEGATRON_LM", "args: MEGATRON_LM runs the backward pass itself"),
    ):
        own = property(lambda _, kind=kind: DistributedType(kind))
        monkeypatch.setattr(Accelerator, "distributed_type", own)
        with pytest.raises(ValueError, match=said):
            AlignedTrainer(model, arguments(), tasks=TASKS)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_a_stream_that_one_process_would_read_for_all_is_refused(
    make_model: Make, make_examples: Make, arguments: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(**options: Any) -> AlignedTrainer:
        rows = Stream(make_examples("tokens"))
        return AlignedTrainer(
            make_model("tokens"), arguments(**options), train_dataset=rows, tasks=TASKS
        )

    trainer().train()
    own = trainer(accelerator_config={"dispatch_batches": False})
    dispatched = trainer()
    monkeypatch.setattr(type(dispatched.args), "world_size", property(lambda _: 2))
    with pytest.raises(ValueError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
        dispatched.get_train_dataloader()
    assert next(iter(own.get_train_dataloader()))["tasks_of_rows"] == sorted(TASKS * 2)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_what_a_user_says_of_scaling_holds(
    is_scaled: bool, make_model: Make, make_examples: Make, arguments: Make
) -> None:
    """`loss_is_scaled_for_ga`: whether accumulation divides the loss once more."""
    examples = make_examples("causal", 24)

    def run(base: Any, rows: Any, **aligned: Any) -> Gradients:
        class Saying(base):  # type: ignore[misc]
            loss_is_scaled_for_ga = is_scaled

        kept, args = Gradients(), arguments(gradient_accumulation_steps=2, max_grad_norm=0.0)
        model = make_model("causal")
        Saying(model, args, train_dataset=rows, callbacks=[kept], **aligned).train()
        return kept

    plain_rows = [{k: v for k, v in one.items() if k != "task"} for one in examples]
    assert_same(run(AlignedTrainer, examples, tasks=TASKS, rule=Sum()), run(Trainer, plain_rows))


def test_the_divisor_is_learned_where_both_are_the_same() -> None:
    """A process that has all labels of its first step learns what its model divides by."""
    sums, counts = torch.tensor([3.0, 5.0]), torch.tensor([2, 2])
    for by_items, wanted in ((True, 12), (False, 4)):
        normaliser = Normaliser()
        loss = sums.sum() / (8 if by_items else 4)
        normaliser.learn(sums, counts, 8, loss)
        assert normaliser.is_known
        assert normaliser.divisor(counts, 12) == wanted


@pytest.mark.parametrize("begins", [0, 4])
def test_a_term_without_logits_is_refused_however_small(
    begins: int, make_examples: Make, arguments: Make
) -> None:
    """The balance of a router, which losses of rows would leave out; also if it begins later."""

    class Begin(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
            model.config.output_router_logits = state.global_step >= begins

    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    router = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 1e-6}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=40, num_hidden_layers=2, **sizes, **heads, **router)
    )
    trainer = AlignedTrainer(
        model,
        arguments(max_steps=12),
        train_dataset=make_examples("causal", 72),
        tasks=TASKS,
        callbacks=[Begin()],
    )
    with pytest.raises(ValueError, match=r"router .*output_router_logits.*left out"):
        trainer.train()
    assert trainer.state.global_step == (9 if begins else 0)  # batches 1, 2, 10, ... are compared


def test_logits_that_were_cast_after_the_loss() -> None:
    """As Accelerate does in mixed precision."""
    head, gate = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))
    logits = head(torch.randn(2, 4))
    loss = logits.double().square().mean()
    check_logits(loss, logits.double())
    with pytest.raises(ValueError, match=r"shape \[\] without the logits"):
        check_logits(loss + gate, logits.double())


def test_several_gpus_of_one_process_are_refused(
    make_model: Make, arguments: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    monkeypatch.setattr(type(args), "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match=r"2 GPUs \(DataParallel\)"):
        AlignedTrainer(make_model("tokens"), args, tasks=TASKS)


def test_processes_the_aligner_does_not_know_of_are_refused(
    make_model: Make, arguments: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    monkeypatch.setattr(type(args), "world_size", property(lambda _: 2))
    with pytest.raises(ValueError, match=r"2 processes .*aligner .*1"):
        AlignedTrainer(make_model("tokens"), args, tasks=TASKS)


def test_examples_without_a_task_are_named(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    examples = make_examples("tokens")
    rows = [{k: v for k, v in one.items() if k != "task"} for one in examples]
    with pytest.raises(ValueError, match=r"example 0 .*'task'"):
        AlignedTrainer(make_model("tokens"), arguments(), train_dataset=rows, tasks=TASKS).train()
    with pytest.raises(ValueError, match="sw"):
        AlignedTrainer(
            make_model("tokens"), arguments(), train_dataset=examples, tasks=["de", "fr"]
        ).train()


def test_a_collator_of_ones_own_stays_in_use(make_examples: Make) -> None:
    collator = TaskCollator(lambda rows: {"num": len(rows), "keys": sorted(rows[0])})
    batch = collator(make_examples("tokens", 3))
    assert batch == {
        "num": 3,
        "keys": ["attention_mask", "input_ids", "labels"],
        "tasks_of_rows": TASKS,
    }


def test_rows_of_a_task_lie_together_where_something_is_learned(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    """And only there: predictions come in the order of the examples."""
    examples = make_examples("tokens", 12)
    model = make_model("tokens")
    trainer = AlignedTrainer(model, arguments(), train_dataset=examples, tasks=TASKS)
    for batch in trainer.get_train_dataloader():
        tasks = batch["tasks_of_rows"]
        assert sorted(tasks, key=tasks.index) == tasks
        for row, labels, task in zip(batch["input_ids"], batch["labels"], tasks, strict=True):
            own = next(one for one in examples if one["input_ids"] == row.tolist())
            assert (own["labels"], own["task"]) == (labels.tolist(), task)
    unnamed = [{k: v for k, v in one.items() if k != "task"} for one in examples]
    for given in (examples, unnamed):
        found = trainer.predict(given)
        assert found.label_ids.tolist() == [one["labels"] for one in examples]
    with pytest.raises(ValueError, match=r"example 1 .*'task'"):
        trainer.predict([examples[0], *unnamed])


def test_numbers_that_name_the_tasks_otherwise_are_refused(
    make_model: Make, make_examples: Make, arguments: Make
) -> None:
    """A `ClassLabel` of datasets: number 0 is the first of its names, not of the tasks."""

    class Numbered(list[dict[str, Any]]):
        features: ClassVar = {"task": SimpleNamespace(names=["fr", "de", "sw"])}

    examples = Numbered(one | {"task": n % 3} for n, one in enumerate(make_examples("tokens", 6)))
    with pytest.raises(ValueError, match=r"\['fr', 'de', 'sw'\], .*tasks .*\['de'"):
        AlignedTrainer(make_model("tokens"), arguments(), train_dataset=examples, tasks=TASKS)
    tasks = ["fr", "de", "sw", "zu"]
    AlignedTrainer(make_model("tokens"), arguments(), train_dataset=examples, tasks=tasks).train()
