"""Runs that follow advice: their configs, and the sweep that checks whether it was good.

Everything gets the steps that its tasks had in the joint run: groups share them equally, and a task
with n companions gets (1 + n) / T of them. Beside both stand controls of the same sizes, drawn at
random, because fewer tasks in a model may help or harm by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradvac.analysis.advice import Advice
from gradvac.files import write_text
from gradvac.lab.experiments.worker import load_settings
from gradvac.lab.recipes import recipe_of
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig
from gradvac.lab.training.config import write_toml, write_value
from gradvac.lab.training.settings import shortened

_SEEDS = [0, 1, 2, 3]
_MOST_COMPANIONS = 3


@dataclass(frozen=True)
class FollowUp:
    """Runs that stand together for one method of the sweep.

    Attributes:
        name: The method.
        tasks: Of every run.
        settings: Setting -> value, of all of them.
    """

    name: str
    tasks: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Any]

    @property
    def is_control(self) -> bool:
        """Whether it does not follow the advice."""
        return self.name.startswith("chance")


def follow_ups(advice: Advice, targets: Sequence[str], settings: RunConfig) -> Iterator[FollowUp]:
    """What to train next, each beside a control.

    Args:
        advice: What `advise` said.
        targets: Tasks that learn with their companions, if any were promised to them.
        settings: Of the joint run.
    """
    draw = np.random.default_rng(0)
    if advice.groups:
        shuffled = iter(draw.permutation(list(advice.tasks)).tolist())
        chance = tuple(tuple(next(shuffled) for _ in group) for group in advice.groups)
        steps = shortened(settings, 1 / len(advice.groups))
        yield FollowUp("groups", advice.groups, steps)
        yield FollowUp("chance", chance, steps)
    for target in targets:
        promised = [one.task for one in advice.companions(target) if one.promised]
        promised = promised[:_MOST_COMPANIONS]
        others = [task for task in advice.tasks if task not in (target, *promised)]
        if not promised or len(others) < len(promised):
            continue
        steps = shortened(settings, (1 + len(promised)) / len(advice.tasks))
        steps["train.metric"] = f"dev/loss/{target}"
        drawn = draw.permutation(others)[: len(promised)].tolist()
        yield FollowUp(f"with-{target}", ((target, *promised),), steps)
        yield FollowUp(f"chance-{target}", ((target, *drawn),), steps)


def write_follow_ups(
    run: Path, advice: Advice, out: Path, targets: Sequence[str]
) -> dict[str, Path]:
    """Write the configs of follow-up runs of translation, and the sweep `check.toml`.

    Args:
        run: The joint run that the advice is read off.
        advice: What `advise` said.
        out: The folder to write to.
        targets: As in `follow_ups`.

    Returns:
        Name -> file; empty if there is nothing to follow.
    """
    if not RunFolder(run).config.is_file() or recipe_of(run) != "nmt":
        raise ValueError(f"{run}: configs are written for runs of `gradvac nmt`; leave out --out.")
    table, config = RunFolder(run).read_table(), RunFolder(run).config
    planned = list(follow_ups(advice, targets, load_settings("nmt", config, {})))
    if not planned:
        return {}
    texts = {}
    for one in planned:
        for number, tasks in enumerate(one.tasks, start=1):
            name = one.name if len(one.tasks) == 1 else f"{one.name}-{number}"
            if not one.is_control:
                texts[name] = write_toml(
                    _changed(table, {**one.settings, "data.tasks": list(tasks)})
                )
    texts["check"] = _sweep(config, planned)
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


def _sweep(base: Path, planned: Sequence[FollowUp]) -> str:
    lines = [
        "# Does following the advice pay? Joint training, what was advised, and chance.",
        'recipe = "nmt"',
        f"base = {write_value(str(base))}",
        f'\n[grid]\n"train.seed" = {write_value(_SEEDS)}',
        '\n[[methods]]\nname = "joint"',
    ]
    for one in planned:
        tasks = [list(part) for part in one.tasks]
        lines += [
            f"\n[[methods]]\nname = {write_value(one.name)}",
            f"set = {write_value(one.settings)}",
            f"parts = {write_value({'data.tasks': tasks})}",
        ]
    return "\n".join(lines) + "\n"
