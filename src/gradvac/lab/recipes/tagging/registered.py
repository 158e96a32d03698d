"""Tagging in the registry of recipes."""

from gradvac.lab.recipes.registry import Recipe
from gradvac.lab.recipes.tagging.preparation import prepare
from gradvac.lab.recipes.tagging.recipe import train_tagging
from gradvac.lab.recipes.tagging.score import score_run
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.recipes.tagging.similarity import measure_run

TAGGING = Recipe(
    "tagging",
    TaggingConfig,
    prepare=prepare,
    train=train_tagging,
    score=score_run,
    measure=measure_run,
)
