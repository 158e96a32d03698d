"""The recipe in the loop: tasks, levels, validation, exact continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradvac.analysis.record import read_record
from gradvac.lab.recipes.nmt import NmtConfig, open_corpus, train_translation
from gradvac.lab.recipes.nmt.recipe import TranslationWorkload
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Display, checkpoint
from gradvac.utils.hints import log_to

Build = Callable[..., NmtConfig]
pytestmark = pytest.mark.usefixtures("is_prepared")


def build_recipe(config: NmtConfig) -> TranslationWorkload:
    return TranslationWorkload(config, open_corpus(config.data))


@pytest.mark.parametrize(
    ("changes", "tasks"),
    [
        ({}, ["en-xx", "en-yy"]),
        ({"directions": "any-to-en"}, ["xx-en", "yy-en"]),
        ({"directions": "any-to-any"}, ["en-xx", "en-yy", "xx-en", "yy-en"]),
        ({"tasks": ["en-yy"]}, ["en-yy"]),
    ],
)
def test_directions_share_one_preparation(
    toy_config: Build, changes: dict[str, Any], tasks: list[str]
) -> None:
    open_corpus(toy_config().data)
    config = toy_config(data=changes)
    log: list[str] = []
    with log_to(log.append):
        recipe = TranslationWorkload(config, open_corpus(config.data))
    assert log == []
    assert recipe.tasks == tasks
    batch = next(recipe.batches())
    vocabulary = recipe.prepared.vocabulary
    tags = [vocabulary.tag(task.partition("-")[2]) for task in tasks]
    assert batch.source.tokens[:, 0].tolist() == [tags[task] for task in batch.tasks]


def test_resource_levels_come_from_sizes(toy_config: Build) -> None:
    recipe = build_recipe(toy_config())
    assert recipe.resource_levels == {"en-xx": "high", "en-yy": "low"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_rule_that_divides_the_rows_of_tasks(
    toy_config: Build, tmp_path: Path, quiet: Display, packed: bool
) -> None:
    """`studies/halves.py` by a config: both engines do the same, and record whole tasks."""
    records = {}
    for engine in ("one_backward", "per_task"):
        config = toy_config(
            align={
                "rule": "studies/halves.py:Halves",
                "options": {"vaccinated": "low"},
                "engine": engine,
            },
            batch={"packed": packed},
            optimizer={"accumulation": 2},
            train={"max_steps": 3, "validate_every": 3, "checkpoint_every": 3, "record_every": 1},
        )
        train_translation(config, tmp_path / engine, display=quiet)
        records[engine] = read_record(RunFolder(tmp_path / engine).record)
    one, other = records.values()
    assert one.tasks == ("en-xx", "en-yy")
    assert one.vaccinated == ("en-yy",)
    np.testing.assert_allclose(one.target, other.target, rtol=1e-3, atol=1e-6)
    learned = one.target[2, :, 1, 0] / 0.0199  # from two steps of similar cosines
    assert (learned > 1.01 * one.similarity[:2, :, 1, 0].mean(0)).all()  # which have the noise


def test_a_rule_that_acts_here_and_there_is_recorded_and_continues(
    toy_config: Build, tmp_path: Path, quiet: Display
) -> None:
    """Limited to the encoder and later steps, on preconditioned gradients."""
    align = {"only": ["encoder*"], "from_step": 2, "space": "preconditioned"}
    train: dict[str, Any] = {"max_steps": 6, "record_every": 1, "log_every": 1}
    config = toy_config(align=align, train=train)
    train_translation(config, tmp_path / "whole", display=quiet)
    paused = toy_config(align=align, train=train | {"pause_at": 3})
    train_translation(paused, tmp_path / "parts", display=quiet)
    train_translation(config, tmp_path / "parts", display=quiet)
    whole, parts = (checkpoint.weights(tmp_path / name, "last") for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    record = read_record(RunFolder(tmp_path / "whole").record)
    assert list(record.tasks) == ["en-xx", "en-yy"]
    assert record.rule == "gradvac(only=['encoder*'],from_step=2,space=preconditioned)"
    is_one = np.isclose(record.weights, 1.0).all(-1)  # [S, K]
    outside = [not name.startswith("encoder") for name in record.components]
    assert is_one[:, outside].all()
    assert is_one[:2].all()


def test_losses_sum_to_the_mean_token_loss(toy_config: Build) -> None:
    recipe = build_recipe(toy_config())
    batch = next(recipe.batches())
    found = recipe.losses(batch)
    assert found.losses.shape == (len(batch),)
    logits = recipe.model.head(
        recipe.model.decode(batch.target, recipe.model.encode(batch.source), batch.source)
    )
    mean = torch.nn.functional.cross_entropy(logits, batch.labels)
    torch.testing.assert_close(found.losses.sum() / batch.num_tokens, mean)


def test_validation_by_task(toy_config: Build) -> None:
    changes = {"validation": {"bleu_sentences": 5}, "batch": {"tokens": 40}}
    recipe = build_recipe(toy_config(**changes))
    recipe.model.eval()
    with torch.no_grad():
        scores = recipe.validate()
        sources, targets = recipe.prepared.task_tokens("dev", "en-yy")
        assert len(sources) == len(targets) == 60
    assert set(scores) == {
        f"dev/{what}{task}" for what in ("loss", "bleu") for task in ("", "/en-xx", "/en-yy")
    }
    assert scores["dev/loss"] == pytest.approx(
        (scores["dev/loss/en-xx"] + scores["dev/loss/en-yy"]) / 2
    )
    # Other batches, same loss: the budget above was meant to cut them small.
    large = build_recipe(toy_config(validation={"sentences": 2000}, batch={"tokens": 4000}))
    large.model.load_state_dict(recipe.model.state_dict())
    large.model.eval()
    with torch.no_grad():
        again = large.validate()
    assert again["dev/loss/en-yy"] == pytest.approx(scores["dev/loss/en-yy"], rel=1e-5)


def test_effective_epochs_are_shown_before_training(
    toy_config: Build, tmp_path: Path, quiet: Display
) -> None:
    train_translation(toy_config(train={"max_steps": 1}), tmp_path / "run", display=quiet)
    shown: str = quiet.console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("What training will see") < shown.index("step 1")
    assert "epochs" in shown


def weights(run: Path) -> Mapping[str, torch.Tensor]:
    return checkpoint.weights(run, "last")


@pytest.mark.parametrize("batch", [{"packed": True}, {"packed": False}, {"fixed": True}])
def test_a_continued_run_is_the_uninterrupted_one(
    toy_config: Build, tmp_path: Path, quiet: Display, batch: dict[str, bool]
) -> None:
    def config(max_steps: int) -> NmtConfig:
        return toy_config(
            train={"max_steps": max_steps, "checkpoint_every": 2, "validate_every": 0},
            model={"dropout": 0.1},
            batch=batch,
            optimizer={"schedule": "constant", "accumulation": 2},
            align={"rule": "gradvac", "vaccinated": "low"},
            decoding={"cuda_graph": max_steps == 3},  # changes nothing, as it may have
        )

    train_translation(config(6), tmp_path / "whole", display=quiet)
    train_translation(config(3), tmp_path / "parts", display=quiet)  # within a chunk of batches
    train_translation(config(6), tmp_path / "parts", display=quiet)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_another_vocabulary_is_not_put_into_a_run(
    toy_config: Build, tmp_path: Path, quiet: Display
) -> None:
    short = {"max_steps": 1, "validate_every": 0}
    train_translation(toy_config(train=short), tmp_path / "run", display=quiet)
    other = {"vocabulary": {"size": 310, "threads": 1}, "prepared": str(tmp_path / "other")}
    with pytest.raises(ValueError, match="another vocabulary"):
        train_translation(toy_config(train=short, data=other), tmp_path / "run", display=quiet)


def test_a_language_smaller_than_a_batch_trains(
    toy_config: Build, tmp_path: Path, quiet: Display
) -> None:
    data = {"limit": {"yy": 2}, "prepared": str(tmp_path / "own")}
    config = toy_config(data=data, train={"max_steps": 3})
    result = train_translation(config, tmp_path / "run", display=quiet)
    assert result.step == 3


def test_fixed_batches_are_full_and_lose_no_sentence(toy_config: Build) -> None:
    recipe = build_recipe(toy_config(batch={"fixed": True, "tokens": 300, "chunk": 6}))
    batches = recipe.batches()
    seen, filled = 0, []
    for _ in range(60):
        batch = next(batches)
        assert batch.static_shape is not None
        assert batch.counts is not None
        assert len(batch.source.tokens) == batch.static_shape.source <= 300
        assert len(batch.labels) == batch.static_shape.target <= 300
        num = int(batch.counts.sum())
        assert batch.num_tokens == int(batch.target.ends[num])
        # Every sentence that counts starts with its language and ends with </s>.
        ends, starts = batch.source.ends[1 : num + 1].long(), batch.source.ends[:num].long()
        assert set(batch.source.tokens[ends - 1].tolist()) == {2}
        assert set(batch.source.tokens[starts].tolist()) <= {
            recipe.prepared.vocabulary.tag(code) for code in ("xx", "yy")
        }
        seen += num
        filled.append(batch.num_tokens / batch.static_shape.target)
    plain = build_recipe(toy_config(batch={"packed": True, "tokens": 300, "chunk": 6})).batches()
    assert seen > 0.95 * sum(len(next(plain)) for _ in range(60))
    assert sum(filled) / len(filled) > 0.88  # of 300 tokens; sentences of 20 do not fit gaplessly


@pytest.mark.parametrize("rule", ["sum", "pcgrad", "mgda", "gradnorm", "none"])
def test_every_rule_by_config(toy_config: Build, tmp_path: Path, quiet: Display, rule: str) -> None:
    config = toy_config(align={"rule": rule}, train={"max_steps": 2, "validate_every": 0})
    assert train_translation(config, tmp_path / "run", display=quiet).skipped_steps == 0
