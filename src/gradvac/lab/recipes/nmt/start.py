"""Before a run starts: the weights of another one to start from, and warnings of its schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from gradvac.lab.recipes.nmt.model import Size, Transformer
from gradvac.lab.recipes.nmt.settings import ModelConfig, NmtConfig
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, checkpoint, config
from gradvac.sampling.tasks import TaskEpochs

_MOST_EPOCHS = 100


def require_parent(settings: ModelConfig) -> None:
    """Check, before anything is prepared, the run to start from: its sizes and its weights.

    Raises:
        ValueError: There is no such run, its model has another size, or the weights are missing.
    """
    if settings.init is None:
        return
    folder = RunFolder(settings.init)
    if not folder.config.is_file():
        raise ValueError(f"model.init: {settings.init} is no run folder: it has no config.toml.")
    theirs = config.load(NmtConfig, folder.config).model
    for name in (*Size._fields, "norm_first"):
        wanted, found = (
            getattr(model if name == "norm_first" else model.dimensions(), name)
            for model in (settings, theirs)
        )
        if wanted != found:
            raise ValueError(
                f"model.init: {settings.init} has model.{name} = {found}, but this run {wanted}; "
                "take over its [model] settings."
            )
    checkpoint.resolve_weights(settings.init, settings.init_weights)


def start_from(settings: ModelConfig, model: Transformer, vocabulary: Vocabulary) -> str:
    """Give a model the weights of the run that `model.init` names; empty without one.

    Pieces that the other run does not have keep the embedding they were drawn with.

    Returns:
        A hash of those weights: what a run starts from is part of its data.

    Raises:
        ValueError: The other run has another vocabulary.
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
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    # Only the embedding can have more rows: new pieces follow the others.
    model.load_state_dict(
        {name: torch.cat([weights[name], new[len(weights[name]) :]]) for name, new in drawn.items()}
    )
    return digest.hexdigest()


def warn_of_schedule(settings: RunConfig, epochs: Sequence[TaskEpochs]) -> Iterator[str]:
    """What a schedule cannot do, with the settings that decide it, to log before training."""
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
            shown = ", ".join(f"{row.task} ({_shown(row.epochs)} epochs)" for row in rows[:4])
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            yield (
                f"note: training {what} {shown}{more}; it depends on train.max_steps, batch.tokens "
                "and sampling.temperature."
            )


def _shown(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
