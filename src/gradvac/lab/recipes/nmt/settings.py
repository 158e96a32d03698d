"""The config of a translation run: [data], [model], [batch], [validation], [decoding].

The other sections are those of every run: [train], [optimizer], [sampling], [align].
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gradvac.lab.recipes.nmt.data_settings import DataConfig
from gradvac.lab.recipes.nmt.model import SIZES, Size, Transformer
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, Section
from gradvac.lab.training.settings import TrainConfig


class ModelConfig(Section):
    """[model]: the Transformer.

    Attributes:
        init: A run folder to start from: its weights and its vocabulary; a language that it does
            not know gets a token `<2xx>` of its own. Model sizes must be those of that run.
        init_weights: Which of its weights: "best", "last", "averaged", or a step.
        size: "tiny", "small", "base" or "big"; the next five replace single numbers of it.
        width: Of the states between layers; a multiple of twice the heads.
        inner: Width between the two layers of a feed-forward network.
        heads: Attention heads.
        encoder_layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        dropout: Of embeddings, and of what a sub-layer adds.
        norm_first: Pre-norm (true) or post-norm.
        label_smoothing: In training.
        logits_per_chunk: Most logits held at once; of more, the loss is made in chunks, with less
            memory and the last product done twice. "auto": what a quarter of a GPU's memory holds,
            2^27 elsewhere.
    """

    init: Path | None = None
    init_weights: str | int = "best"
    size: Literal["tiny", "small", "base", "big"] = "base"
    width: int | None = Field(default=None, ge=2)
    inner: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    encoder_layers: int | None = Field(default=None, ge=1)
    decoder_layers: int | None = Field(default=None, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    norm_first: bool = True
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    logits_per_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"

    @classmethod
    def set_aside(cls, table: dict[str, Any], overridden: Set[str]) -> None:
        """Runs of version 0.1.0 say whether the loss was compiled, which changed no loss."""
        if "compile_loss" not in overridden:
            table.pop("compile_loss", None)

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        size = self.dimensions()
        if size.width % (2 * size.heads):
            raise ValueError(
                f"width = {size.width} must be a multiple of 2 * heads = {2 * size.heads}"
            )
        return self

    def dimensions(self) -> Size:
        """The size with its replacements."""
        given = {key: getattr(self, key) for key in Size._fields}
        return SIZES[self.size]._replace(**{k: v for k, v in given.items() if v is not None})

    def build(self, vocabulary_size: int) -> Transformer:
        """The model; its weights are drawn from torch's global generator."""
        return Transformer(
            self.dimensions(),
            vocabulary_size,
            dropout=self.dropout,
            norm_first=self.norm_first,
            label_smoothing=self.label_smoothing,
            logits_per_chunk=self.logits_per_chunk,
        )


class BatchConfig(Section):
    """[batch]: what one micro-batch holds.

    Attributes:
        tokens: Most tokens of either side, padding included.
        packed: One sentence after the other without padding: "auto" on a GPU with bf16, where
            attention knows the form.
        fixed: Fill packed batches up to one size, with sentences that do not count, so that a step
            can be recorded: "auto" unless `train.graph` is false, on a GPU with bf16. Of several
            processes, each takes its part of the same batches.
        chunk: Batches are cut from the sorted sentences of this many, so that a batch holds
            sentences of like length and every batch has all tasks. All of them are chosen at once.
    """

    tokens: int = Field(default=4096, ge=1)
    packed: bool | Literal["auto"] = "auto"
    fixed: bool | Literal["auto"] = "auto"
    chunk: int = Field(default=24, ge=1, le=1000)

    @model_validator(mode="after")
    def _fixed_is_packed(self) -> BatchConfig:
        if self.fixed is True and self.packed is False:
            raise ValueError("fixed = true is for packed batches, but packed is false")
        return self


class ValidationConfig(Section):
    """[validation]: what is measured during training.

    Attributes:
        sentences: Most development pairs of a task.
        bleu_sentences: Most pairs of a task to translate for BLEU ("dev/bleu"); 0: none.
    """

    sentences: int = Field(default=2000, ge=1)
    bleu_sentences: int = Field(default=0, ge=0)


class DecodingConfig(Section):
    """[decoding]: how translations are searched.

    Attributes:
        beams: 1 is greedy search.
        length_penalty: Exponent of ((5 + length) / 6); larger favours longer translations.
        max_ratio: A translation has at most `max_ratio * source + max_extra` tokens.
        max_extra: See `max_ratio`.
        graph: Record the steps of the search as CUDA graphs, on a GPU, where they say the same
            sooner. If recording fails, a warning says so, and steps go on as they are written.
        memory: GiB for what is kept of the sentences that are translated at a time; unset: a part
            of what is free.
    """

    beams: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    max_ratio: float = Field(default=2.0, gt=0)
    max_extra: int = Field(default=10, ge=1)
    graph: bool = True
    memory: float | None = Field(default=None, gt=0)

    @classmethod
    def set_aside(cls, table: dict[str, Any], overridden: Set[str]) -> None:
        """Runs of version 0.1.0 say how many tokens a batch has, which changed no translation."""
        if "tokens" not in overridden:
            table.pop("tokens", None)


class NmtTrainConfig(TrainConfig):
    """[train] of translation, where filling batches up to one size costs next to nothing."""

    graph: bool | Literal["auto"] = "auto"


class NmtConfig(RunConfig):
    """A translation run."""

    train: NmtTrainConfig = NmtTrainConfig()
    data: DataConfig
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    validation: ValidationConfig = ValidationConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _start_with_a_vocabulary(self) -> NmtConfig:
        """A run that starts from another one reads and says its pieces."""
        if self.model.init is not None and self.data.vocabulary.model is None:
            model = RunFolder(self.model.init).vocabulary
            vocabulary = self.data.vocabulary.model_copy(update={"model": model})
            # Settings stay as they are once they are made; this is part of making them.
            self.__dict__["data"] = self.data.model_copy(update={"vocabulary": vocabulary})
        return self

    @model_validator(mode="after")
    def _longest_sentence_fits(self) -> NmtConfig:
        longest = self.data.max_tokens + 2
        if self.batch.tokens < longest:
            raise ValueError(
                f"batch.tokens = {self.batch.tokens} is less than the longest sentence, "
                f"data.max_tokens + 2 = {longest}; raise it, or lower data.max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _metric_is_measured(self) -> NmtConfig:
        """Told now, and not after the hours until the first validation."""
        kinds = {"loss": False} | ({"bleu": True} if self.validation.bleu_sentences else {})
        is_bleu = self.train.metric.startswith("dev/bleu")
        hint = "; BLEU needs validation.bleu_sentences" if is_bleu else ""
        self.train.check_metric(kinds, self.data.all_tasks(), hint)
        return self
