"""TRL's trainers with LoRA: the same mixin, their own losses, mixing, a record and a report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gradvac import GradVac, Sum
from gradvac.analysis import load_run
from gradvac.integrations.transformers import AlignedMixin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .test_own_losses import Gradients

TASKS = ["code", "chat"]
WORDS = [f"w{n}" for n in range(40)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class AlignedSFT(AlignedMixin, SFTTrainer):
    pass


class AlignedDPO(AlignedMixin, DPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=44, pad_token_id=0, **sizes, **heads))


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (1 + number % 3)) % 40] for place in range(length))


def sft_rows(num: int = 24) -> list[dict[str, str]]:
    return [{"text": text(n, 3 + n % 5), "task": TASKS[n % 4 == 0]} for n in range(num)]


def dpo_rows(num: int = 16) -> list[dict[str, str]]:
    return [
        {
            "prompt": text(n, 3),
            "chosen": " " + text(n + 1, 2 + n % 3),
            "rejected": " " + text(n + 2, 4 - n % 3),
            "task": TASKS[n % 2],
        }
        for n in range(num)
    ]


def trainer(base: Any, rows: list[Any], folder: Path, *, lora: bool = True, **options: Any) -> Any:
    config = DPOConfig if issubclass(base, DPOTrainer) else SFTConfig
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    args = {k: options.pop(k) for k in list(options) if k in config.__dataclass_fields__}
    if not issubclass(base, AlignedMixin):
        rows = [{k: v for k, v in one.items() if k != "task"} for one in rows]
    kept = Gradients()
    made = base(
        model=model(),
        args=config(**given | args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        callbacks=[kept],
        **options,
    )
    made.kept = kept
    return made


@pytest.mark.parametrize(
    ("plain", "aligned", "rows", "args"),
    [
        (SFTTrainer, AlignedSFT, sft_rows(), {"gradient_checkpointing": True}),
        (SFTTrainer, AlignedSFT, sft_rows(), {"loss_type": "dft"}),
        (DPOTrainer, AlignedDPO, dpo_rows(), {}),
        (DPOTrainer, AlignedDPO, dpo_rows(), {"loss_type": ["sigmoid", "sft"]}),
    ],
)
def test_sum_gives_the_trainers_own_gradients(
    plain: Any, aligned: Any, rows: list[Any], args: dict[str, Any], tmp_path: Path
) -> None:
    """With LoRA; also that the engine needs one backward."""
    torch.manual_seed(0)
    theirs = trainer(plain, rows, tmp_path, **args)
    their_loss = theirs.train().training_loss
    torch.manual_seed(0)
    mine = trainer(aligned, rows, tmp_path, tasks=TASKS, rule=Sum(), **args)
    assert mine.train().training_loss == pytest.approx(their_loss, rel=1e-3)
    assert len(mine.kept.steps) == 3
    for one, other in zip(mine.kept.steps, theirs.kept.steps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert mine.aligner.engine == "one_backward", mine.aligner


@pytest.mark.parametrize(("aligned", "rows"), [(AlignedSFT, sft_rows()), (AlignedDPO, dpo_rows())])
def test_mixing_a_record_and_a_report(aligned: Any, rows: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = trainer(
        aligned,
        rows,
        tmp_path,
        tasks=TASKS,
        rule=GradVac(beta=0.3),
        sampling={"temperature": 5.0},
        record=folder,
        record_every=1,
    )
    made.train()
    run = load_run(folder)
    assert run.record is not None
    assert run.record.steps.tolist() == [1, 2, 3]
    assert run.record.tasks == ("code", "chat")
    assert [entry["step"] for entry in run.metrics] == [1, 2, 3]
    assert all(entry["train/loss"] > 0 for entry in run.metrics)
    if aligned is AlignedSFT:  # a sum over rows, so that its parts are known
        logged = [entry for entry in made.state.log_history if "loss" in entry]
        assert logged[0]["loss/code"] > 0
        assert "mean_token_accuracy" in logged[0]  # TRL's own are there too
    else:
        assert not [name for name in run.metrics[0] if name.startswith("train/loss/")]


def test_packing_is_refused(tmp_path: Path) -> None:
    packed = {"padding_free": True, "max_length": None}
    made = trainer(AlignedSFT, sft_rows(), tmp_path, tasks=TASKS, lora=False, **packed)
    with pytest.raises(ValueError, match=r"from tensors with 4 rows .* switch packing and fused"):
        made.train()
