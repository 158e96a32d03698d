"""Label sets: which tags a model can give, fixed before any file is read.

All languages share one label set, or their gradients would belong to different tasks. A training
tag outside it stops the preparation, with a count and the two ways out: rename it, or add it. In
dev and test such a tag stays as it is: a word that no prediction gets right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gradvac.lab.recipes.tagging.metrics import Kind
from gradvac.lab.recipes.tagging.spans import OUTSIDE

# The 17 universal parts of speech, and the entities of WikiAnn.
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
ENTITY_TAGS = (OUTSIDE, "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")


def default_labels(kind: Kind) -> tuple[str, ...]:
    """The labels of a kind of tagging, in the order of the model's outputs."""
    return UNIVERSAL_TAGS if kind == "pos" else ENTITY_TAGS


def check_labels(labels: Sequence[str], kind: Kind) -> None:
    """Refuse a label set that cannot be scored."""
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice or not labels:
        raise ValueError(f"labels: {twice[0]!r} appears twice" if twice else "labels: is empty")
    if kind == "pos":
        return
    bad = [label for label in labels if label != OUTSIDE and label[:2] not in ("B-", "I-")]
    if bad or OUTSIDE not in labels:
        what = f"{bad[0]!r} is no IOB2 tag" if bad else "O is missing"
        raise ValueError(f'labels: {what}; entities need "O" and "B-X", "I-X" for every type')
    alone = [label for label in labels if label[:2] == "I-" and f"B-{label[2:]}" not in labels]
    if alone:
        raise ValueError(f"labels: {alone[0]!r} has no B-{alone[0][2:]} to continue; add it")


def rename(tag: str, names: Mapping[str, str]) -> str:
    """A tag under its new name: a whole tag, or the type of an entity tag.

    A type renamed to "O" is no longer an entity.
    """
    if tag in names:
        return names[tag]
    prefix, hyphen, kind = tag.partition("-")
    if not hyphen or kind not in names:
        return tag
    return OUTSIDE if names[kind] == OUTSIDE else f"{prefix}-{names[kind]}"


def refuse_unknown(where: str, counts: Mapping[str, int], labels: Sequence[str]) -> None:
    """Refuse training tags that the model cannot predict.

    Args:
        where: Language and split, such as "fr train".
        counts: Tag -> how many words have it.
        labels: The label set.
    """
    unknown = {tag: count for tag, count in counts.items() if tag not in labels}
    if not unknown:
        return
    shown = ", ".join(f"{tag or 'an empty tag'} ({n:,} words)" for tag, n in _first(unknown))
    first = next(tag for tag, _ in _first(unknown))
    first = (first.partition("-")[2] if first[1:2] == "-" else first) or "_"
    raise ValueError(
        f"data: {where} has tags that are not in the label set: {shown}. The labels are "
        f'{", ".join(labels)}. Rename them, as in data.rename = {{ "{first}" = "{labels[-1][-3:]}" '
        "}, or list all labels in data.labels."
    )


def missing(counts: Mapping[str, int], labels: Iterable[str]) -> list[str]:
    """Labels that never occur in the training data of a language."""
    return [label for label in labels if not counts.get(label)]


def _first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return Counter(counts).most_common(6)
