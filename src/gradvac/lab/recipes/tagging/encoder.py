"""The encoder: a tokenizer and a model for token classification, from a hub name or a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer


def load_tokenizer(encoder: str) -> Any:
    """The tokenizer of an encoder.

    Raises:
        ValueError: It cannot be loaded, or is not a fast one.
    """
    with quiet_transformers():
        try:
            # Byte-level BPE attaches a blank to the word after it: split words need their own.
            config = AutoConfig.from_pretrained(encoder)
            is_bytes = config.model_type in _BYTE_LEVEL
            options = {"add_prefix_space": True} if is_bytes else {}
            tokenizer = AutoTokenizer.from_pretrained(encoder, **options)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(_cannot_load(encoder, error)) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"model.encoder: {encoder} has no fast tokenizer ({type(tokenizer).__name__}); only "
            "fast ones say which sub-words make up a word. Choose one with a tokenizer.json."
        )
    return tokenizer


_BYTE_LEVEL = ("roberta", "longformer", "gpt2", "deberta", "bart", "modernbert")


def load_model(encoder: str, labels: Sequence[str], *, dropout: float | None) -> nn.Module:
    """The encoder with a new layer that gives a score to every label.

    Raises:
        ValueError: It cannot be loaded, or has no weights for a part of the encoder itself.
    """
    options: dict[str, Any] = {} if dropout is None else _dropout(encoder, dropout)
    with quiet_transformers():
        try:
            model, loading = AutoModelForTokenClassification.from_pretrained(
                encoder, **_label_names(labels), **options, output_loading_info=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(_cannot_load(encoder, error)) from error
    lost = [name for name in loading["missing_keys"] if name.startswith(model.base_model_prefix)]
    if lost:
        raise ValueError(
            f"model.encoder: {encoder} has no weights for {len(lost)} parameters, such as "
            f"{sorted(lost)[0]}, which would stay random; give the folder of a trained model."
        )
    return model.float()  # type: ignore[no-any-return]


def build_model(folder: Path) -> nn.Module:
    """The model of a run, without weights: from the config that training kept."""
    with quiet_transformers():
        model: nn.Module = AutoModelForTokenClassification.from_config(
            AutoConfig.from_pretrained(folder)
        )
    return model


def _label_names(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def _dropout(encoder: str, dropout: float) -> dict[str, Any]:
    """The settings by which an architecture controls its dropout."""
    config = AutoConfig.from_pretrained(encoder)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    dropouts = {name: dropout for name in names if hasattr(config, name)}
    if not dropouts:
        raise ValueError(
            f"model.dropout: {encoder} ({config.model_type}) has none of {', '.join(names)}; leave "
            "it out."
        )
    return dropouts


def _cannot_load(encoder: str, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return (
        f"model.encoder: {encoder} cannot be loaded ({reason}). Give a folder in Hugging Face "
        "format, such as one made by `gradvac tagging pretrain`, or a name on the hub if it can be "
        "reached."
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence reports and progress bars; what matters in them is checked here."""
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
