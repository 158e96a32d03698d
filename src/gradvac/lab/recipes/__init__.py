"""Recipes: what is trained, scored and measured.

A `Recipe` is five functions under one name. Commands, sweeps, comparisons and similarity work for
every recipe that `recipe_named` finds: the two built in, one that `register_recipe` was given, or
one in a module or file of your own, such as "my_package.vision:VISION" or "vision.py:VISION".

registry.py   `Recipe`, `register_recipe`, `recipe_named`, `recipe_of`
common/       what recipes share: readers, prepared folders, scoring, measuring
nmt/          multilingual translation: data, Transformer, beam search, scores
tagging/      parts of speech and named entities with Hugging Face encoders
"""

from gradvac.lab.recipes.registry import Recipe, recipe_named, recipe_of, register_recipe

__all__ = ["Recipe", "recipe_named", "recipe_of", "register_recipe"]
