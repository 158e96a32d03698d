"""Where a run starts: from the weights of another one, and with a schedule that can work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.model import Size, Transformer
from gradvac.lab.recipes.nmt.settings import ModelConfig, NmtConfig
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, checkpoint, config
from gradvac.sampling.tasks import TaskEpochs

_BY_PIECE = ("embedding.weight", "head.weight")  # one and the same: a row for every piece
_MOST_EPOCHS = 100


def require_parent(settings: ModelConfig) -> None:
    """Refuse, before anything is prepared, to start from no run, other sizes or absent weights."""
    if settings.init is None:
        return
    folder = RunFolder(settings.init)
    if not folder.config.is_file():
        raise ValueError(f"model.init: {settings.init} is no run folder: it has no config.toml.")
    theirs = config.load(NmtConfig, folder.config).model
    for name in (*Size._fields, "norm_first"):
        own, other = (
            getattr(model if name == "norm_first" else model.dimensions(), name)
            for model in (settings, theirs)
        )
        if own != other:
            raise ValueError(
                f"model.init: {settings.init} has model.{name} = {other}, but this run {own}; take "
                "over its [model] settings."
            )
    checkpoint.resolve_weights(settings.init, settings.init_weights)


def start_from(settings: ModelConfig, model: Transformer, vocabulary: Vocabulary) -> str:
    """Give a model the weights of the run that `model.init` names; empty without one.

    Pieces that the other run does not have keep the embedding they were drawn with.

    Returns:
        A hash of those weights: what a run starts from is part of its data.

    Raises:
        ValueError: The other run has another vocabulary or another size.
    """
    if settings.init is None:
        return ""
    folder = RunFolder(settings.init)
    pieces = Vocabulary.load(folder.vocabulary).pieces()
    if vocabulary.pieces()[: len(pieces)] != pieces:
        raise ValueError(
            f"model.init: {settings.init} has other pieces than the prepared data; leave "
            "data.vocabulary.model unset, and choose another folder for data.prepared."
        )
    weights = dict(checkpoint.weights(settings.init, settings.init_weights))
    drawn = model.state_dict()
    wrong = [
        name
        for name in {*drawn, *weights}
        if name not in drawn
        or name not in weights
        or drawn[name].shape[1:] != weights[name].shape[1:]
    ]
    wrong = wrong or [n for n in drawn if n not in _BY_PIECE and len(drawn[n]) != len(weights[n])]
    if wrong:
        raise ValueError(
            f"model.init: {settings.init} has a model of another size: {min(wrong)!r} differs; "
            "take over its [model] settings."
        )
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    model.load_state_dict({n: _enlarged(weights[n], drawn[n]) for n in drawn})
    return digest.hexdigest()


def _enlarged(values: Tensor, drawn: Tensor) -> Tensor:
    return torch.cat([values, drawn[len(values) :]])


def _epochs(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def warn_of_schedule(settings: RunConfig, epochs: Sequence[TaskEpochs]) -> Iterator[str]:
    """What a schedule cannot do, with the settings that decide it, to say before training."""
    steps, warmup = settings.train.max_steps, settings.optimizer.warmup_steps
    if warmup >= steps:
        yield (
            f"warning: optimizer.warmup_steps = {warmup:,} is not less than train.max_steps = "
            f"{steps:,}: the learning rate never reaches optimizer.lr, and little is learned."
        )
    for what, rows in (
        ("never sees all of", [row for row in epochs if row.epochs < 1]),
        (f"sees more than {_MOST_EPOCHS} times", [r for r in epochs if r.epochs > _MOST_EPOCHS]),
    ):
        if rows:
            shown = ", ".join(f"{row.task} ({_epochs(row.epochs)} epochs)" for row in rows[:4])
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            yield (
                f"note: training {what} {shown}{more}; it depends on train.max_steps, batch.tokens "
                "and sampling.temperature."
            )
