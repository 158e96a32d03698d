"""The registry of recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradvac.utils.plugins import import_plugin

if TYPE_CHECKING:
    from gradvac.lab.training import Result, RunConfig

_BUILT_IN = {
    "nmt": "gradvac.lab.recipes.nmt.recipe:TRANSLATION",
    "tagging": "gradvac.lab.recipes.tagging.recipe:TAGGING",
}
_registered: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Recipe:
    """What commands and sweeps need to know of a recipe.

    Attributes:
        name: What `recipe_named` finds it by, and `recipe = "..."` in a sweep. A recipe that is not
            built in also has it in its settings, as a field `recipe`: its runs' configs name it.
        settings: The class of its configs.
        prepare: `prepare(config)` writes the folder of prepared data, or keeps what is there.
        train: `train(config, run)` trains into a run folder, or continues the run there.
        score: `score(run, split=, weights=, device=, overrides=)` writes the scores of a set.
        measure: `measure(run, split=, device=, ...)` writes RUN/similarity.npz, as `measure_run`.
    """

    name: str
    settings: type[RunConfig]
    prepare: Callable[..., object]
    train: Callable[..., Result]
    score: Callable[..., Any]
    measure: Callable[..., Any]


def register_recipe(recipe: Recipe) -> Recipe:
    """Make a recipe known by its name; the same name again replaces it."""
    _registered[recipe.name] = recipe
    return recipe


def recipe_named(name: str) -> Recipe:
    """The recipe of that name: built in, registered, or `MODULE:NAME` (or `FILE.py:NAME`).

    Raises:
        ValueError: There is none.
    """
    if name not in _registered:
        place, _, attribute = _BUILT_IN.get(name, name).rpartition(":")
        if not place:
            known = ", ".join(_BUILT_IN | _registered)
            raise ValueError(
                f"recipe: {name!r} is not one of {known}; a recipe of your own is MODULE:NAME."
            )
        found = getattr(import_plugin(place, "recipe"), attribute, None)
        if not isinstance(found, Recipe):
            raise ValueError(f"recipe: {place} has no Recipe called {attribute!r}.")
        _registered[name] = found
    return _registered[name]


def recipe_of(run: Path) -> str:
    """The name of the recipe that trained a run."""
    from gradvac.lab.runs import RunFolder  # with torch, which `gradvac --help` does without

    table = RunFolder(run).read_table()
    built_in = "tagging" if "kind" in table.get("data", {}) else "nmt"
    return str(table.get("recipe", built_in))
