"""A zoo of awkward models, for engines to be compared on.

A case is a factory: it gives a model, a function from the model and a batch to one loss per row,
and the inputs. `structure` has models that share, freeze and leave out parameters, `layers` single
layers, `sequences` attention, recurrence, checkpoints and packed batches, `huggingface` the real
architectures at toy size.
"""

from . import huggingface, layers, sequences, structure
from ._case import ZOO, Case, distance, make

__all__ = [
    "ZOO",
    "Case",
    "distance",
    "huggingface",
    "layers",
    "make",
    "sequences",
    "structure",
]
