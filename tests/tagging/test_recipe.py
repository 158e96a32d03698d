"""Tagging runs end to end: they learn, resume bit for bit, score, tag and show their geometry."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradvac import Aligner, Sum
from gradvac.analysis import load_run
from gradvac.lab.recipes.tagging import (
    Tagger,
    TaggingConfig,
    prepare_sentences,
    score_tagging,
    train_tagging,
)
from gradvac.lab.recipes.tagging.encoder import NO_LABEL
from gradvac.lab.recipes.tagging.recipe import TaggingWorkload, measure_tagging
from gradvac.lab.recipes.tagging.tagger import make_tag_batch
from gradvac.lab.runs import RunFolder, read_scores
from gradvac.lab.runs.counts import read_counts
from gradvac.lab.training import BatchSlice, checkpoint, seed_everything, train
from gradvac.lab.training.config import load as load_config
from gradvac.utils.hints import log_to

Settings = Callable[..., TaggingConfig]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, settings_in: Settings) -> Path:
    """A run that learned something."""
    folder = tmp_path_factory.mktemp("trained")
    config = settings_in(folder)
    config = settings_in(
        folder,
        data=config.data.model_dump()
        | {"resource_levels": {"aa": "high", "bb": "low", "cc": "low"}},
        model={"encoder": config.model.encoder, "max_tokens": 32, "dropout": 0.0},
        batch={"rows": 12, "epochs": 4.0},
        optimizer={"lr": 1e-2, "warmup_steps": 5, "schedule": "linear"},
        train=config.train.model_dump()
        | {"log_every": 10, "record_every": 5, "validate_every": 30, "checkpoint_every": 30},
    )
    train_tagging(config, folder / "run")
    return folder / "run"


def test_the_loss_is_the_models_own(settings: Settings) -> None:
    """Rows that are summed and divided by words are the loss that Hugging Face computes."""
    config = settings()
    recipe = TaggingWorkload(config, prepare_sentences(config))
    recipe.model.eval()
    batch = next(recipe.batches())
    theirs = recipe.model(
        input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=batch.labels
    ).loss
    ours = recipe.losses(batch).losses.sum() / batch.num_tokens
    torch.testing.assert_close(ours, theirs)
    assert batch.num_tokens == int((batch.labels != NO_LABEL).sum())


def test_batches_mix_languages_and_see_every_sentence(settings: Settings) -> None:
    config = settings(sampling={"temperature": 1.0})
    recipe = TaggingWorkload(config, prepare_sentences(config))
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for batch in islice(recipe.batches(), 45):  # three passes, so that every one is through
        assert batch.tasks == sorted(batch.tasks)
        assert len(batch.tasks) == 12
        rows = zip(batch.tasks, batch.tokens.tolist(), batch.mask.tolist(), strict=True)
        seen |= {(t, tuple(x for x, m in zip(xs, ms, strict=True) if m)) for t, xs, ms in rows}
    prepared = prepare_sentences(config)
    for number, task in enumerate(config.data.languages):
        windows = prepared.windows("train", task)
        own = {
            tuple(windows.tokens[a:b].tolist())
            for a, b in zip(windows.starts[:-1], windows.starts[1:], strict=True)
        }
        assert own == {tokens for t, tokens in seen if t == number}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slots_give_every_process_few_tasks(settings: Settings, size: int) -> None:
    """Four slots: one for each of four processes, two for two; parts and state of whole batches."""
    config = settings(sampling={"slots": 4}, batch={"rows": 12, "epochs": 0.0})
    recipe = TaggingWorkload(config, prepare_sentences(config))
    whole, parts = recipe.batches(), [recipe.batches(BatchSlice(n, size)) for n in range(size)]
    for _ in range(6):
        batch, own = next(whole), [next(part) for part in parts]
        assert all(len(set(one.tasks)) <= max(1, 4 // size) for one in own)
        assert [task for one in own for task in one.tasks] == batch.tasks
        seen = torch.cat([one.tokens[one.mask] for one in own])
        assert torch.equal(seen, batch.tokens[batch.mask])
        assert all(part.state_dict() == whole.state_dict() for part in parts)
    whole.load_state_dict(parts[-1].state_dict())
    assert torch.equal(next(whole).tokens[0, :2], next(parts[0]).tokens[0, :2])


def test_more_slots_than_rows_are_refused(settings: Settings) -> None:
    config = settings(sampling={"slots": 13}, batch={"rows": 12, "epochs": 0.0})
    recipe = TaggingWorkload(config, prepare_sentences(config))
    with pytest.raises(ValueError, match=r"sampling\.slots = 13 .*batch\.rows = 12"):
        recipe.batches()


def test_batches_of_one_size_train_alike(settings: Settings, tmp_path: Path, shown: Any) -> None:
    """Wider batches whose tasks are a tensor: what a recorded step needs, and nothing else."""
    model = {"encoder": settings().model.encoder, "max_tokens": 32, "dropout": 0.0}
    runs = {}
    for fixed in (True, False):
        config = settings(model=model, batch={"rows": 12, "epochs": 0.0, "fixed": fixed})
        recipe = TaggingWorkload(config, prepare_sentences(config))
        batches = list(islice(recipe.batches(), 5))
        if fixed:
            shapes = {(tuple(batch.tokens.shape), batch.static_shape) for batch in batches}
            assert len(shapes) == 1
            own = batches[0].copy()
            own.copy_(batches[1])
            assert torch.equal(own.tokens, batches[1].tokens)
            assert torch.equal(torch.as_tensor(own.tasks), torch.as_tensor(batches[1].tasks))
            assert not torch.equal(own.tokens, batches[0].tokens)
        train_tagging(config, tmp_path / str(fixed), display=shown)
        runs[fixed] = checkpoint.weights(tmp_path / str(fixed), "last")
    for name, value in runs[False].items():
        torch.testing.assert_close(runs[True][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_batches_of_one_size_are_for_one_process(settings: Settings) -> None:
    config = settings(batch={"rows": 12, "epochs": 0.0, "fixed": True})
    recipe = TaggingWorkload(config, prepare_sentences(config))
    with pytest.raises(ValueError, match=r"batch\.fixed.*2 train"):
        recipe.batches(BatchSlice(0, 2))


@pytest.mark.parametrize(
    ("rule", "granularity"),  # rules see no parameters: not every one with every other
    [
        ("sum", "whole_model"),
        ("gradvac", "all_layer"),
        ("pcgrad", "all_matrix"),
        ("mgda", "whole_model"),
        ("gradnorm", "all_layer"),
    ],
)
def test_every_rule_and_granularity_runs(
    settings: Settings, tmp_path: Path, shown: Any, rule: str, granularity: str
) -> None:
    config = settings(
        align={"rule": rule, "granularity": granularity},
        train=settings().train.model_dump() | {"max_steps": 2, "validate_every": 0},
    )
    result = train_tagging(config, tmp_path / "run", display=shown)
    assert (result.step, result.skipped_steps) == (2, 0)


@pytest.mark.parametrize("align", [{"rule": "gradvac", "beta": 0.1}, {"rule": "gradnorm"}])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_exact(
    settings: Settings, tmp_path: Path, align: dict[str, Any], accumulation: int
) -> None:
    optimizer = settings().optimizer.model_dump() | {"accumulation": accumulation}
    config = settings(align=align, optimizer=optimizer)
    train_tagging(config, tmp_path / "whole")

    class CrashError(Exception):
        pass

    def crash(step: int, _: object) -> None:
        if step == 7:
            raise CrashError

    seed_everything(config.train.seed)
    recipe = TaggingWorkload(config, prepare_sentences(config))
    with pytest.raises(CrashError):
        train(recipe, config, tmp_path / "parts", watch=crash)
    train_tagging(config, tmp_path / "parts")
    whole, parts = (checkpoint.latest(tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    assert whole.step == parts.step == 8
    for name, value in whole.weights().items():
        assert torch.equal(value, parts.weights()[name]), name
    assert str(whole.state()["aligner"]) == str(parts.state()["aligner"])
    assert whole.state()["batches"] == parts.state()["batches"]
    logs = [
        [
            {key: value for key, value in entry.items() if not re.search("second|memory", key)}
            for entry in RunFolder(tmp_path / name).read_metrics()
        ]
        for name in ("whole", "parts")
    ]
    assert logs[0] == logs[1]


def test_both_engines_give_the_same_gradients(settings: Settings) -> None:
    config = settings(model=settings().model.model_dump() | {"dropout": 0.0})
    recipe = TaggingWorkload(config, prepare_sentences(config))
    model = recipe.model.double()
    batch = next(recipe.batches())
    gradients = []
    for engine in ("per_task", "auto"):
        model.zero_grad()
        aligner = Aligner(model, recipe.tasks, Sum(), engine=engine)
        losses = recipe.losses(batch)
        aligner.backward(losses.losses, losses.tasks)
        aligner.detach()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    recipe.losses(batch).losses.sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) > 10
    for own in gradients:
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-7)


def test_it_learns_and_scores(trained: Path) -> None:
    scores = score_tagging(trained)
    assert all(score.f1 > 95 for score in scores.by_task.values())
    assert scores.by_metric()[0].by_level().keys() == {"high", "low", "all"}
    kept = read_scores(trained / "scores" / "test.best.json")
    assert [one.metric for one in kept] == ["F1", "accuracy"]
    assert kept[0].by_task == {task: score.f1 for task, score in scores.by_task.items()}
    lines = (trained / "scores" / "test.best.bb.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines[0].split("\t")) == 3
    assert sum(not line for line in lines[:-1]) == 11  # between 12 sentences
    json.dumps(scores.to_dict())
    counts = read_counts(trained / "scores" / "test.best.npz")
    for metric in kept:
        for task, value in metric.by_task.items():
            assert counts[metric.metric].score(task) == pytest.approx(value)
            assert len(counts[metric.metric].by_task[task]) == 12


def test_epochs_set_the_steps(trained: Path) -> None:
    assert RunFolder(trained).read_metrics()[-1]["step"] == 4 * 180 // 12


def test_steps_that_do_not_count_are_told(settings: Settings) -> None:
    said: list[str] = []
    config = settings(batch={"rows": 12, "epochs": 4.0}, train={"max_steps": 7})
    with log_to(said.append):
        assert config.with_steps(24).train.max_steps == 8
    assert "train.max_steps = 7 does not count, because batch.epochs = 4 makes 8 steps" in said[0]
    assert "batch.epochs=0" in said.pop()
    with log_to(said.append):
        settings(batch={"rows": 12, "epochs": 4.0}, train={"max_steps": 8}).with_steps(24)
    assert not said


def test_the_record_shows_similarity_between_languages(trained: Path) -> None:
    run = load_run(trained)
    assert run.record is not None
    assert run.record.tasks == ("aa", "bb", "cc")
    assert len(run.record.steps) == 12


def test_similarity_at_every_checkpoint(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    measured = measure_tagging(tmp_path / "run", split="train", num_lines=40)
    assert [one.granularity for one in measured[::2]] == ["all_layer", "whole_model"]
    assert measured[0].steps.tolist() == [30, 60]
    assert measured[0].tasks == ("aa", "bb", "cc")
    loaded = load_run(tmp_path / "run")
    assert len(loaded.measured) == 4
    again = measure_tagging(tmp_path / "run", split="train", num_lines=40)
    assert again[0].values.tobytes() == measured[0].values.tobytes()
    with pytest.raises(ValueError, match=r"set = train, .*dev"):
        measure_tagging(tmp_path / "run")


def test_both_engines_measure_the_same(trained: Path, tmp_path: Path) -> None:
    found = []
    for engine in ("per_task", "one_backward"):
        shutil.copytree(trained, tmp_path / engine)
        options = {"split": "train", "num_lines": 20, "weights": ["last"], "engine": engine}
        found.append(measure_tagging(tmp_path / engine, **options)[0].values)
    np.testing.assert_allclose(*found, atol=1e-4)


def test_similarity_is_that_of_plain_gradients(trained: Path, tmp_path: Path) -> None:
    """One checkpoint, by hand: losses of all chosen windows, two gradients, their cosine."""
    shutil.copytree(trained, tmp_path / "run")
    same, *_ = measure_tagging(
        tmp_path / "run", split="test", weights=["last"], granularities=["whole_model"]
    )
    config = load_config(TaggingConfig, trained / "config.toml")
    recipe = TaggingWorkload(config, prepare_sentences(config))
    recipe.model.load_state_dict(checkpoint.weights(trained, "last"))
    recipe.model.eval()
    gradients = []
    for task in ("aa", "bb"):
        windows = recipe.prepared.windows("test", task)
        batch = make_tag_batch([windows], [np.arange(12)], pad=0)
        recipe.model.zero_grad()
        recipe.losses(batch).losses.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in recipe.model.parameters()]))
    expected = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert same.values[0, 0, 0, 1] == pytest.approx(float(expected), abs=1e-4)


def test_a_damaged_copy_of_the_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "encoder" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"tree", b"eert", 1))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tagger.from_run(tmp_path / "run")


def test_a_moved_run_tags_without_its_data_and_encoder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    tagger = Tagger.from_run("moved", device="cpu")
    sentences = [["oldaa", "treeaa", "seesaa", "houseaa", "."], [], ["treeaa"] * 60]
    tags = tagger.tag(sentences)
    assert tags[0] == ["ADJ", "NOUN", "VERB", "NOUN", "PUNCT"]
    assert [len(own) for own in tags] == [5, 0, 60]
    assert tagger.counts["sentences cut into windows"] == 1


def test_predictions_do_not_depend_on_the_batch(trained: Path) -> None:
    sentences = [["oldaa", "treeaa"] * n + ["."] for n in (1, 5, 2, 9, 1)]
    tagger = Tagger.from_run(trained, device="cpu")
    alone = [tagger.tag([one])[0] for one in sentences]
    assert tagger.tag(sentences) == alone


def test_scoring_without_the_data_says_what_to_do(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gradvac tagging prepare"):
        score_tagging(trained, overrides=[f"data.prepared={tmp_path}"])


def test_a_run_of_another_kind_is_refused(tmp_path: Path, trained: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "encoder")
    with pytest.raises(ValueError, match="not a tagging run"):
        Tagger.from_run(tmp_path / "run")


def test_unknown_labels_and_broken_predictions_are_told(trained: Path) -> None:
    from gradvac.lab.recipes.tagging import score_tags
    from gradvac.lab.recipes.tagging.score import TaggingScores

    gold, predicted = [["B-PER", "B-PLANET"]], [["I-PER", "O"]]
    score = score_tags(gold, predicted, "ner")
    scores = TaggingScores(
        "run", "test", "best", {"aa": score}, {}, "", kind="ner", unknown={"aa": 1},
        without_entities=["bb"],
    )  # fmt: skip
    assert [one.metric for one in scores.by_metric()] == ["F1", "accuracy", "strict F1"]
    caption = str(scores.table().caption)
    assert "1 predicted tags break IOB2" in caption
    assert "counted as wrong: aa 1" in caption
    assert "Without any entity, so that F1 is 0 by definition: bb" in caption
    assert (score.f1, score.strict_f1) == (pytest.approx(200 / 3), 0)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"metric": "dev/f1s"}, "'dev/f1s' .*dev/loss, dev/loss/aa"),
        ({"metric": "dev/f1", "higher_is_better": False}, "true for 'dev/f1'"),
    ],
)
def test_a_wrong_metric_is_told_before_training(
    settings: Settings, train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(train=train)
    f1 = {"metric": "dev/f1/aa", "higher_is_better": True}
    assert settings(train=f1).train.metric == "dev/f1/aa"
