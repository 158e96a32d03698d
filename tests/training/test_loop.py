"""The loop: bad steps, early stop, accumulation, what is logged and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gradvac import Alignment
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import (
    Display,
    DivergedError,
    Result,
    checkpoint,
    train,
)

Settings = Callable[..., Any]
RunToy = Callable[..., Result]


@pytest.mark.parametrize("rule", ["gradvac", "gradnorm", "sum"])
@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
def test_bad_steps_are_skipped_and_counted(
    tmp_path: Path, settings: Settings, run_toy: RunToy, rule: str, engine: str
) -> None:
    config = settings(align={"rule": rule, "engine": engine}, train={"log_every": 1})
    result = run_toy(config, tmp_path, spoil=frozenset({0, 5, 6}))
    assert (result.step, result.skipped_steps) == (12, 3)
    for value in checkpoint.weights(tmp_path, "last").values():
        assert value.isfinite().all()
    records = {r["step"]: r for r in RunFolder(tmp_path).read_metrics() if "train/loss" in r}
    assert records[7]["train/loss"] is None
    assert records[7]["train/skipped_steps"] == 3
    assert records[8]["train/loss"] > 0


def test_bad_step_is_as_if_it_had_not_been(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy
) -> None:
    """Weights before and after a bad step are equal, moments and targets of the rule too."""

    def stop_at(steps: int, folder: str) -> dict[str, Any]:
        config = settings(
            train={"max_steps": steps, "checkpoint_every": 1, "keep": 20},
            optimizer={"schedule": "constant"},
        )
        run_toy(config, tmp_path / folder, spoil=frozenset({5}))
        return toy.outcome(tmp_path / folder)

    five, seven = stop_at(5, "five"), stop_at(7, "seven")
    # step 6 was bad, so nothing was saved: the checkpoint before step 7 is that of step 5
    saved = sorted(path.name for path in (tmp_path / "seven" / "checkpoints").iterdir())
    assert saved[-2:] == ["step-00000005", "step-00000007"]
    counts = [key for key in seven if key.startswith("/optimizer/state") and "/step" in key]
    assert {seven[key] for key in counts} == {torch.tensor(6.0).numpy().tobytes()}
    assert seven["/aligner/step"] == five["/aligner/step"] + 1


@pytest.mark.parametrize("log_every", [1, 5])
def test_too_many_bad_steps_stop_with_the_last_good_checkpoint(
    tmp_path: Path, settings: Settings, run_toy: RunToy, log_every: int
) -> None:
    config = settings(
        train={"max_bad_steps": 3, "log_every": log_every, "checkpoint_every": 2, "max_steps": 40}
    )
    with pytest.raises(DivergedError, match="step 4") as caught:
        run_toy(config, tmp_path, spoil=frozenset(range(5, 40)))
    stopped = {1: 8, 5: 10}[log_every]  # 6, 7, 8 were bad; looked at when logging
    assert f"up to step {stopped}" in str(caught.value)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 4


def test_single_bad_steps_do_not_stop(tmp_path: Path, settings: Settings, run_toy: RunToy) -> None:
    config = settings(train={"max_bad_steps": 2, "log_every": 1})
    result = run_toy(config, tmp_path, spoil=frozenset({1, 3, 5, 7, 9, 11}))
    assert (result.reason, result.skipped_steps) == ("finished", 6)


class Worsening:
    """Validation scores from a list."""

    def __init__(self, recipe: Any, scores: list[float]) -> None:
        self._recipe, self._scores = recipe, iter(scores)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def validate(self) -> dict[str, float]:
        return {"dev/score": next(self._scores)}


@pytest.mark.parametrize(
    ("higher", "scores"), [(False, [3.0, 1.0, 2.0, float("nan")]), (True, [1.0, 2.0, 1.5, 1.9])]
)
def test_early_stop_keeps_the_best_weights(
    tmp_path: Path,
    toy: ModuleType,
    settings: Settings,
    shown: Display,
    higher: bool,
    scores: list[float],
) -> None:
    config = settings(
        train={
            "metric": "dev/score",
            "higher_is_better": higher,
            "patience": 2,
            "validate_every": 2,
            "checkpoint_every": 1,
            "keep": 20,
            "max_steps": 100,
        }
    )

    def run(given: list[float]) -> Result:
        return train(Worsening(toy.ToyRecipe(config), given), config, tmp_path, display=shown)

    result = run(scores)
    assert (result.reason, result.step, result.best_step) == ("early_stop", 8, 4)
    best, then = checkpoint.weights(tmp_path, "best"), checkpoint.weights(tmp_path, 4)
    assert all(torch.equal(best[name], then[name]) for name in then)
    assert checkpoint.resolve_weights(tmp_path, "best").step == 4
    again = run([])  # stopped is stopped
    assert (again.reason, again.step) == ("early_stop", 8)


def test_unknown_metric_is_named_with_the_nearest(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    with pytest.raises(ValueError, match=r"train\.metric: .*'dev/los'.*'dev/loss'"):
        run_toy(settings(train={"metric": "dev/los"}), tmp_path)


@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
def test_accumulation_equals_one_large_batch(
    tmp_path: Path, toy: ModuleType, settings: Settings, shown: Display, engine: str
) -> None:
    """Rows 6 + 2 in two micro-batches against the same 8 at once: losses are sums over tokens."""

    class Halves(toy.ToyStream):  # type: ignore[name-defined,misc]
        def __next__(self) -> Any:
            if not getattr(self, "_queue", None):
                batch = super().__next__()
                cuts = (slice(0, 6), slice(6, 8))
                self._queue = [
                    toy.ToyBatch(
                        batch.inputs[c], batch.goals[c], batch.tasks[c], len(batch.tasks[c])
                    )
                    for c in cuts
                ]
            return self._queue.pop(0)

    class Recipe(toy.ToyRecipe):  # type: ignore[name-defined,misc]
        def batches(self, part: Any) -> Any:
            kind = Halves if self.settings.optimizer.accumulation == 2 else toy.ToyStream
            sampler = self.settings.sampling.build(toy.SIZES, seed=0)
            return kind(self, sampler, 8, part)

        def losses(self, batch: Any) -> Any:
            np.random.seed(0)  # the toy draws noise once per call, here the same
            return super().losses(batch)

    weights = []
    for accumulation in (1, 2):
        config = settings(
            optimizer={"accumulation": accumulation, "schedule": "constant"},
            model={"dropout": 0.0},
            align={"engine": engine},
            train={"max_steps": 6, "validate_every": 0},
        )
        run = tmp_path / str(accumulation)
        train(Recipe(config), config, run, display=shown)
        weights.append(checkpoint.weights(run, "last"))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def test_plain_sum_equals_a_loop_written_by_hand(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy
) -> None:
    config = settings(
        align={"rule": "sum", "engine": "per_task"},
        optimizer={"clip_norm": 0.5},
        model={"dropout": 0.0},
    )
    run_toy(config, tmp_path)
    recipe = toy.ToyRecipe(config)
    toy.seed_everything(config.train.seed)
    optimizer = torch.optim.AdamW(
        recipe.model.parameters(), betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
    )
    stream = recipe.batches()
    for step in range(config.train.max_steps):
        optimizer.param_groups[0]["lr"] = config.optimizer.lr_at(step, max_steps=12)
        batch = next(stream)
        optimizer.zero_grad()
        (recipe.losses(batch).losses.sum() / batch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), 0.5)
        optimizer.step()
    found = checkpoint.weights(tmp_path, "last")
    for name, value in recipe.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_no_rule_is_joint_training_without_task_gradients(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    for rule in ("none", "sum"):
        run_toy(settings(align={"rule": rule}), tmp_path / rule)
    plain, joint = (checkpoint.weights(tmp_path / rule, "last") for rule in ("none", "sum"))
    for name, value in joint.items():
        torch.testing.assert_close(plain[name], value, rtol=1e-4, atol=1e-6)
    assert not (tmp_path / "none" / "record.bin").exists()
    records = [r for r in RunFolder(tmp_path / "none").read_metrics() if "train/loss" in r]
    assert records
    assert "train/similarity" not in records[0]
    assert json.loads((tmp_path / "none" / "signature.json").read_text())["engine"] == "none"


def test_a_graph_that_cannot_be_is_refused(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    with pytest.raises(ValueError, match=r"train\.cuda_graph .*GPU"):
        run_toy(settings(train={"cuda_graph": True, "device": "cpu"}), tmp_path)


def test_training_lowers_the_loss(tmp_path: Path, settings: Settings, run_toy: RunToy) -> None:
    config = settings(
        train={"max_steps": 100, "validate_every": 5, "checkpoint_every": 100},
        optimizer={"lr": 3e-2, "schedule": "constant"},
    )
    run_toy(config, tmp_path)
    scores = [r["dev/loss"] for r in RunFolder(tmp_path).read_metrics() if "dev/loss" in r]
    assert scores[-1] < 0.5 * scores[0]


def test_log_holds_means_per_token_and_geometry(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(train={"log_every": 12}), tmp_path / "once")
    run_toy(settings(train={"log_every": 4}), tmp_path / "thrice")
    once, thrice = (
        [r for r in RunFolder(tmp_path / run).read_metrics() if "train/loss" in r]
        for run in ("once", "thrice")
    )
    assert once[0]["train/loss"] == pytest.approx(sum(r["train/loss"] for r in thrice) / 3)
    assert once[0]["train/error"] == pytest.approx(sum(r["train/error"] for r in thrice) / 3)
    assert 0 <= once[0]["train/active"] <= 1
    assert 0.5 < once[0]["train/update_cosine"] <= 1
    assert once[0]["train/lr"] == pytest.approx(1e-2 * (4 / 12) ** 0.5)


@pytest.mark.parametrize("rule", ["gradvac", "none"])
def test_log_holds_the_loss_per_token_of_every_task(
    tmp_path: Path,
    toy: ModuleType,
    settings: Settings,
    run_toy: RunToy,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    """Of all steps since the last entry, without those that were skipped; a task may be absent."""
    seen: list[tuple[str, float]] = []
    own = toy.ToyRecipe.losses

    def losses(recipe: Any, batch: Any) -> Any:
        found = own(recipe, batch)
        if found.losses.isfinite().all():
            names = [recipe.tasks[task] for task in batch.tasks]
            seen.extend(zip(names, found.losses.tolist(), strict=True))
        return found

    monkeypatch.setattr(toy.ToyRecipe, "losses", losses)
    config = settings(
        align={"rule": rule},
        train={"log_every": 12},
        optimizer={"accumulation": 2},
        sampling={"temperature": 0.1},
    )
    run_toy(config, tmp_path, rows=2, spoil=frozenset({4, 5}))
    (entry,) = (r for r in RunFolder(tmp_path).read_metrics() if "train/loss" in r)
    by_task = {k.removeprefix("train/loss/"): v for k, v in entry.items() if "train/loss/" in k}
    expected = {task: [loss for name, loss in seen if name == task] for task, _ in seen}
    assert len(expected) < 3
    assert by_task == pytest.approx({t: sum(own) / len(own) for t, own in expected.items()})


def test_watch_sees_every_alignment(tmp_path: Path, settings: Settings, run_toy: RunToy) -> None:
    seen: list[tuple[int, Alignment]] = []
    run_toy(settings(), tmp_path, watch=lambda *each: seen.append(each))
    assert [step for step, _ in seen] == list(range(1, 13))
    assert all(set(alignment.tasks) <= {"north", "south", "west"} for _, alignment in seen)


def test_averaged_weights_are_of_the_last_checkpoints(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(train={"average_last": 2}), tmp_path)
    averaged = checkpoint.weights(tmp_path, "averaged")
    eight, twelve = checkpoint.weights(tmp_path, 8), checkpoint.weights(tmp_path, 12)
    for name, value in averaged.items():
        torch.testing.assert_close(value, (eight[name] + twelve[name]) / 2)


def test_model_is_left_as_it_was(tmp_path: Path, toy: ModuleType, settings: Settings) -> None:
    config = settings(align={"engine": "one_backward"})
    recipe = toy.ToyRecipe(config)
    before = [dict(vars(module)) for module in recipe.model.modules()]
    train(recipe, config, tmp_path, display=Display(quiet=True))
    after = [dict(vars(module)) for module in recipe.model.modules()]
    assert [set(each) for each in after] == [set(each) for each in before]


def test_signature_follows_the_engine(
    tmp_path: Path, toy: ModuleType, settings: Settings, shown: Display
) -> None:
    """engine="auto" finds out on the first batch that rows influence each other."""

    class Coupled(toy.ToyRecipe):  # type: ignore[name-defined,misc]
        def losses(self, batch: Any) -> Any:
            found = super().losses(batch)
            return type(found)(found.losses * found.losses.mean(), found.tasks)

    config = settings()
    with pytest.warns(UserWarning, match="per_task"):
        train(Coupled(config), config, tmp_path, display=shown)
    signed = json.loads((tmp_path / "signature.json").read_text(encoding="utf-8"))
    assert signed["engine"] == "per_task"
