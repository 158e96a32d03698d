"""Fixtures of the integrations: tiny random models of Hugging Face and examples with tasks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    TrainingArguments,
)

TASKS = ["de", "fr", "sw"]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    import transformers

    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    logging.set_verbosity(level)
    if bars:
        logging.enable_progress_bar()


def bert(**options: Any) -> BertConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rest = {"vocab_size": 40, "intermediate_size": 32, "max_position_embeddings": 16}
    silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**{**sizes, **rest, **silent, **options})


def m2m100() -> M2M100ForConditionalGeneration:
    return M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=40,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: BertForTokenClassification(bert(num_labels=5)),
    "classes": lambda: BertForSequenceClassification(bert(num_labels=3)),
    "values": lambda: BertForSequenceClassification(bert(num_labels=1)),
    "causal": gpt2,
    "seq2seq": m2m100,
}


@pytest.fixture
def make_model() -> Callable[[str], nn.Module]:
    """A tiny model of a kind, the same one every time."""

    def make(kind: str) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[kind]()

    return make


@pytest.fixture
def make_examples() -> Callable[..., list[dict[str, Any]]]:
    """Examples of a kind, of three tasks in turn, with padding that has no label."""

    def make(kind: str, num: int = 24) -> list[dict[str, Any]]:
        chance = random.Random(1)
        examples = []
        for number in range(num):
            length = chance.randint(3, 8)
            ids = [chance.randint(5, 39) for _ in range(length)] + [1] * (8 - length)
            labels: Any = [chance.randint(0, 4) for _ in range(length)] + [-100] * (8 - length)
            if kind == "classes":
                labels = chance.randint(0, 2)
            elif kind == "values":
                labels = chance.random()
            elif kind in ("causal", "seq2seq"):
                labels = [i if i != 1 else -100 for i in ids]
            mask = [int(i != 1) for i in ids]
            task = TASKS[number % 3]
            row = {"input_ids": ids, "attention_mask": mask, "labels": labels, "task": task}
            examples.append(row)
        return examples

    return make


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., TrainingArguments]:
    """Arguments of a short run on the CPU."""

    def make_arguments(make: Any = TrainingArguments, **options: Any) -> TrainingArguments:
        base: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 6,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 2,
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
        }
        made: TrainingArguments = make(**base | options)
        return made

    return make_arguments
