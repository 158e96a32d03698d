"""sentence-transformers: batches of one task each, which meet by gradient accumulation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from gradvac import GradVac, Sum
from gradvac.analysis import load_run
from gradvac.integrations.transformers import AlignedMixin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
    from sentence_transformers.models import StaticEmbedding

from .test_own_losses import Gradients
from .test_trl import text, tokenizer

TASKS = ["pairs", "scores"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class AlignedSentences(AlignedMixin, SentenceTransformerTrainer):
    pass


def trainer(base: Any, folder: Path, *, has_one_loss: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    embedding = StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=16)
    model = SentenceTransformer(modules=[embedding], device="cpu")
    pairs = [{"anchor": text(n, 4), "positive": text(n + 1, 5)} for n in range(16)]
    scores = [
        {"sentence1": text(n, 3), "sentence2": text(n + 5, 4), "score": n / 16} for n in range(16)
    ]
    ranking, cosine = MultipleNegativesRankingLoss(model), CosineSimilarityLoss(model)
    kept = Gradients()
    made = base(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            multi_dataset_batch_sampler="round_robin",
        ),
        train_dataset={"pairs": Dataset.from_list(pairs), "scores": Dataset.from_list(scores)},
        loss=ranking if has_one_loss else {"pairs": ranking, "scores": cosine},
        callbacks=[kept],
        **options,
    )
    made.kept = kept
    return made


def test_sum_gives_the_trainers_own_gradients_and_rules_work(tmp_path: Path) -> None:
    theirs = trainer(SentenceTransformerTrainer, tmp_path)
    their_loss = theirs.train().training_loss
    known: dict[str, Any] = {"tasks": TASKS, "task_key": "dataset_name"}
    mine = trainer(AlignedSentences, tmp_path, rule=Sum(), **known)
    assert mine.train().training_loss == pytest.approx(their_loss, rel=1e-5)
    assert len(mine.kept.steps) == 3
    for one, other in zip(mine.kept.steps, theirs.kept.steps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    folder = tmp_path / "run"
    vaccinated = trainer(
        AlignedSentences, tmp_path, rule=GradVac(beta=0.3), record=folder, record_every=1, **known
    )
    vaccinated.train()
    assert vaccinated.alignment.tasks == tuple(TASKS)
    record = load_run(folder).record
    assert record is not None
    assert record.steps.tolist() == [1, 2, 3]
    logged = [entry for entry in vaccinated.state.log_history if "loss" in entry]
    assert logged[0]["loss/pairs"] > logged[0]["loss/scores"] > 0


def test_batches_that_do_not_name_their_data_set_are_refused(tmp_path: Path) -> None:
    made = trainer(
        AlignedSentences, tmp_path, has_one_loss=True, tasks=TASKS, task_key="dataset_name"
    )
    with pytest.raises(ValueError, match=r"task_key: .*'dataset_name'.*loss=\{name"):
        made.train()
