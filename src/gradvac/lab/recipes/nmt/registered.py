"""Translation in the registry of recipes."""

from gradvac.lab.recipes.nmt.preparation import prepare
from gradvac.lab.recipes.nmt.recipe import train_translation
from gradvac.lab.recipes.nmt.score import score_run
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.similarity import measure_run
from gradvac.lab.recipes.registry import Recipe

TRANSLATION = Recipe(
    "nmt",
    NmtConfig,
    prepare=lambda config: prepare(config.data),
    train=train_translation,
    score=score_run,
    measure=measure_run,
)
