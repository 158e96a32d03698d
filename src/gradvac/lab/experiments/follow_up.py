"""Runs that follow advice: their configs, and the sweep that checks whether it was good.

Everything gets the steps that its tasks had in the joint run: groups share them equally, and a task
with n companions gets (1 + n) / T of them. Beside both stand controls of the same sizes, drawn at
random, because fewer tasks in a model may help or harm by themselves.

What needs no gradients stands beside them: joint training up to four fifths, and the last fifth
divided among the targets, each alone from there (`LAST_ALONE`). It goes on with the learning rate
that the joint run had there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradvac.analysis.advice import Advice
from gradvac.analysis.run_files import ALL
from gradvac.lab.experiments.methods import JOINT
from gradvac.lab.experiments.worker import load_settings
from gradvac.lab.recipes import recipe_of
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig
from gradvac.lab.training.config import write_toml, write_value
from gradvac.lab.training.optimizer import OptimizerConfig
from gradvac.lab.training.settings import shortened
from gradvac.utils.files import write_text
from gradvac.utils.hints import some

LAST_ALONE = "last-alone"
_SEEDS = [0, 1, 2, 3]
_MOST_COMPANIONS = 3
_NEARLY_CONSTANT = ("constant", "inverse_sqrt")  # schedules, in a last fifth


@dataclass(frozen=True)
class FollowUp:
    """Runs that stand together for one method of the sweep.

    Attributes:
        name: The method.
        tasks: Of every run.
        settings: Setting -> value, of all of them.
        asked: Tasks, or all, on which it is to be better than joint training; none of controls.
    """

    name: str
    tasks: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Any]
    asked: tuple[str, ...] = ()

    def named_runs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Names and tasks of its runs."""
        for number, tasks in enumerate(self.tasks, start=1):
            if len(tasks) == 1:
                yield f"{self.name}-{tasks[0]}", tasks
            else:
                yield (self.name if len(self.tasks) == 1 else f"{self.name}-{number}"), tasks


def follow_ups(advice: Advice, targets: Sequence[str], settings: RunConfig) -> Iterator[FollowUp]:
    """What to train next, each beside a control.

    Args:
        advice: What `advise` found.
        targets: Tasks that learn with their companions, if any were promised to them.
        settings: Of the joint run.
    """
    draw = np.random.default_rng(0)
    if advice.groups:
        shuffled = iter(draw.permutation(list(advice.tasks)).tolist())
        chance = tuple(tuple(next(shuffled) for _ in group) for group in advice.groups)
        steps = _shorter(settings, 1 / len(advice.groups))
        yield FollowUp("groups", advice.groups, steps, (ALL,))
        yield FollowUp("chance", chance, steps)
    for target in targets:
        promised = [one.task for one in advice.companions(target) if one.promised]
        promised = promised[:_MOST_COMPANIONS]
        others = [task for task in advice.tasks if task not in (target, *promised)]
        if not promised or len(others) < len(promised):
            continue
        steps = _shorter(settings, (1 + len(promised)) / len(advice.tasks))
        steps["train.metric"] = f"dev/loss/{target}"
        drawn = draw.permutation(others)[: len(promised)].tolist()
        yield FollowUp(f"with-{target}", ((target, *promised),), steps, (target,))
        yield FollowUp(f"chance-{target}", ((target, *drawn),), steps)


def last_alone(targets: Sequence[str], settings: RunConfig, run: str, start: int) -> FollowUp:
    """Each target alone, in an equal part of what joint training has left."""
    part = last_part(settings, run, start, num_models=len(targets))
    return FollowUp(LAST_ALONE, tuple((target,) for target in targets), part, tuple(targets))


def last_part(settings: RunConfig, run: str, start: int, *, num_models: int = 1) -> dict[str, Any]:
    """Setting -> value of models that share what joint training has left after step `start`.

    The learning rate begins where the joint run's was, and ends as low: at 0, or about as high.
    """
    max_steps, schedule = settings.train.max_steps, settings.optimizer.schedule
    lr = settings.optimizer.lr_at(start, max_steps=max_steps)
    begin = {
        "model.init": run,
        "model.init_weights": str(start),
        "optimizer.lr": float(f"{lr:.5g}"),
        "optimizer.schedule": "constant" if schedule in _NEARLY_CONSTANT else "linear",
    }
    if schedule == "wsd":  # no other schedule has a share
        begin["optimizer.decay_share"] = OptimizerConfig().decay_share
    return _shorter(settings, (max_steps - start) / max_steps / num_models) | begin


def _fifth(settings: RunConfig) -> int:
    return max(1, settings.train.max_steps // 5)


def _shorter(settings: RunConfig, part: float) -> dict[str, Any]:
    """Settings of a part of the steps; what the joint run's weights were chosen by may be gone."""
    by_loss = {"train.metric": "dev/loss", "train.higher_is_better": False}
    return shortened(settings, part) | by_loss


def write_follow_ups(
    run: Path, advice: Advice, out: Path, targets: Sequence[str]
) -> dict[str, Path]:
    """Write the configs of follow-up runs of translation, and the sweep `check.toml`.

    Returns:
        Name -> file. Of `last_alone` there are configs if the run has kept a checkpoint near four
        fifths of its steps; the sweep trains its own.
    """
    if not RunFolder(run).config.is_file() or recipe_of(run) != "nmt":
        raise ValueError(f"{run}: configs are written for runs of `gradvac nmt`; leave out --out.")
    table, config = RunFolder(run).read_table(), RunFolder(run).config
    settings = load_settings("nmt", config, {})
    given = {*settings.align.weights, *_named(settings.align.vaccinated)} & {*advice.tasks}
    if given:
        raise ValueError(
            f"{run}: align.weights or align.vaccinated name single tasks ({some(sorted(given))}), "
            "which not every follow-up has; train with resource levels there, or leave out --out."
        )
    planned = list(follow_ups(advice, targets, settings))
    start = min(4 * _fifth(settings), settings.train.max_steps - 1)
    in_sweep = last_alone(targets, settings, f"{{run:{JOINT}}}", start)
    texts = {"check": _sweep(config, [*planned, in_sweep], settings)}
    kept = [step for step, _ in RunFolder(run).kept_checkpoints()]
    near = [step for step in kept if abs(step - start) <= _fifth(settings) / 2]
    if near:
        nearest = min(near, key=lambda step: abs(step - start))
        planned.append(last_alone(targets, settings, str(run), nearest))
    for one in planned:
        for name, tasks in one.named_runs() if one.asked else ():
            values = {**one.settings, "data.tasks": list(tasks)}
            texts[name] = write_toml(_changed(table, values))
    out.mkdir(parents=True, exist_ok=True)
    files = {name: out / f"{name}.toml" for name in texts}
    for name, text in texts.items():
        write_text(files[name], text)
    return files


def _changed(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A nested table in which single settings are replaced."""
    new = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        new.setdefault(section, {})[name] = value
    return new


def _named(tasks: str | Sequence[str] | None) -> Sequence[str]:
    return [tasks] if isinstance(tasks, str) else tasks or ()


def _sweep(base: Path, planned: Sequence[FollowUp], settings: RunConfig) -> str:
    train, fifth = settings.train, _fifth(settings)
    start = min(4 * fifth, train.max_steps - 1)
    after = -(-(train.max_steps - start) // fifth)
    kept = {"train.checkpoint_every": fifth, "train.keep": max(after + 1, train.keep)}
    kept["train.patience"] = 0  # the last fifth begins where it would end early
    lines = [
        "# Does following the advice pay? Joint training, what was advised, and chance; and joint",
        "# training whose last fifth is divided among some tasks, each alone.",
        'recipe = "nmt"',
        f"base = {write_value(str(base))}",
        f'\n[grid]\n"train.seed" = {write_value(_SEEDS)}',
        f'\n[[methods]]\nname = "{JOINT}"\nset = {write_value(kept)}',
    ]
    for one in planned:
        tasks = [list(part) for part in one.tasks]
        lines += [
            f"\n[[methods]]\nname = {write_value(one.name)}",
            f"set = {write_value(one.settings)}",
            f"parts = {write_value({'data.tasks': tasks})}",
        ]
    for one in planned:
        for on in one.asked:
            method, row = write_value(one.name), write_value(on)
            lines.append(f"\n[[primary]]\nmethod = {method}\non = {row}")
    return "\n".join(lines) + "\n"
