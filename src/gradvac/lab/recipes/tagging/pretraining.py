"""`pretrain`: a small multilingual encoder by masked language modelling, in Hugging Face's format.

It is a recipe like the others: the same loop, log, checkpoints and exact resume. A task is a
language; with `align.rule = "none"` it is plain training. At the end RUN/encoder/
holds the best weights and the tokenizer, for `AutoModel` and `AutoTokenizer`.
"""

# B rows, S sub-words, M hidden ones, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from gradvac.lab.recipes.tagging.encoder import quiet_transformers
from gradvac.lab.recipes.tagging.masking import Blocks, MaskedBatch, cut_blocks, hide
from gradvac.lab.recipes.tagging.tagger import ENCODER
from gradvac.lab.recipes.tagging.text import read_text
from gradvac.lab.recipes.tagging.tokenizer import TokenizerConfig, train_tokenizer
from gradvac.lab.runs.files import FolderLock, hash_of, read_json, replacing, write_json
from gradvac.lab.training import (
    WHOLE,
    Ahead,
    Display,
    Part,
    Result,
    RowStream,
    RunConfig,
    Section,
    StepLosses,
    checkpoint,
    choose_device,
    join,
    seed_everything,
    train,
)
from gradvac.lab.training.config import Folder
from gradvac.sampling.epochs import Numbers

_TOKENIZER, _MANIFEST = "tokenizer", "manifest.json"


class TextConfig(Section):
    """[text]: what the encoder reads.

    Attributes:
        prepared: Folder for tokenizer and blocks.
        root: What sources are relative to.
        languages: Codes, which replace `{lang}`.
        sources: `gradvac.lab.recipes.tagging.text` explains them.
        dev_share: Share of every language's blocks that is held out for validation.
    """

    prepared: Folder
    root: Folder = Path(".")
    languages: list[str] = Field(min_length=1)
    sources: list[str] = Field(min_length=1)
    dev_share: float = Field(default=0.01, gt=0, lt=1)


class EncoderConfig(Section):
    """[encoder]: BERT's architecture, in any size.

    Attributes:
        layers: Number of layers.
        width: Width of the hidden states.
        heads: Number of attention heads; `width` must be a multiple of it.
        inner: Width of the feed-forward layers.
        max_tokens: Number of positions; fine-tuning cannot use more.
        dropout: Dropout everywhere.
    """

    layers: PositiveInt = 6
    width: PositiveInt = 384
    heads: PositiveInt = 6
    inner: PositiveInt = 1536
    max_tokens: int = Field(default=256, ge=8)
    dropout: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> EncoderConfig:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        return self


class BlockConfig(Section):
    """[batch]: blocks of a micro-batch.

    Attributes:
        rows: Number of blocks.
        tokens: Sub-words per block.
        hidden: Share of them that is hidden.
    """

    rows: PositiveInt = 256
    tokens: int = Field(default=128, ge=8)
    hidden: float = Field(default=0.15, gt=0, lt=1)


class PretrainConfig(RunConfig):
    """A pretraining run."""

    text: TextConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    encoder: EncoderConfig = EncoderConfig()
    batch: BlockConfig = BlockConfig()

    @model_validator(mode="after")
    def _block_fits(self) -> PretrainConfig:
        if self.batch.tokens > self.encoder.max_tokens:
            raise ValueError(
                f"batch.tokens = {self.batch.tokens} is more than encoder.max_tokens = "
                f"{self.encoder.max_tokens}"
            )
        self.train.check_metric({"loss": False}, self.text.languages)
        return self


class TextData:
    """Tokenizer and blocks of a pretraining run, made once and kept."""

    def __init__(self, config: PretrainConfig, *, say: Any) -> None:
        self._folder = config.text.prepared
        with FolderLock(self._folder, busy=None):
            texts, self.counts = read_text(
                config.text.sources, config.text.languages, config.text.root
            )
            relevant = config.text.model_dump(
                mode="json", exclude={"prepared", "root", "dev_share"}
            )
            settings = [relevant, config.tokenizer.model_dump(), config.batch.tokens]
            self.signature = hash_of([settings, config.encoder.max_tokens, texts])
            if read_json(self._folder / _MANIFEST).get("signature") != self.signature:
                self._make(config, texts, say)
        self.tokenizer = AutoTokenizer.from_pretrained(self._folder / _TOKENIZER)

    def _make(self, config: PretrainConfig, texts: Mapping[str, list[str]], say: Any) -> None:
        (self._folder / _MANIFEST).unlink(missing_ok=True)
        say(f"Learning a tokenizer from {sum(map(len, texts.values())):,} lines")
        tokenizer = train_tokenizer(
            texts,
            config.tokenizer,
            max_tokens=config.encoder.max_tokens,
            seed=config.train.seed,
        )
        tokenizer.save_pretrained(self._folder / _TOKENIZER)
        for lang, lines in texts.items():
            say(f"Cutting {lang} into blocks")
            with replacing(self._folder / f"{lang}.npy") as file:
                np.save(file, cut_blocks(tokenizer, lines, config.batch.tokens))
        write_json(self._folder / _MANIFEST, {"signature": self.signature, "lines": self.counts})

    def blocks(self, lang: str) -> Blocks:
        """All blocks of a language, `[blocks, S]`."""
        blocks: Blocks = np.load(self._folder / f"{lang}.npy", mmap_mode="r")
        return blocks


class PretrainRecipe:
    """One encoder, many languages, nothing but text.

    Args:
        config: The run's settings.
        data: Its text.
    """

    def __init__(self, config: PretrainConfig, data: TextData) -> None:
        self.config, self.data, self.tokenizer = config, data, data.tokenizer
        self.tasks = config.text.languages
        self.resource_levels: dict[str, str] = {}
        self.model = self._build()
        self._train: dict[str, Blocks] = {}
        self._dev: dict[str, Blocks] = {}
        for lang in config.text.languages:
            blocks = data.blocks(lang)
            num_dev = max(1, round(config.text.dev_share * len(blocks)))
            if num_dev >= len(blocks):
                raise ValueError(
                    f"text: {lang} fills {len(blocks)} block(s) of {config.batch.tokens} tokens, "
                    "too few to train and validate on; give more text or a smaller batch.tokens."
                )
            self._dev[lang], self._train[lang] = blocks[:num_dev], blocks[num_dev:]

    def _build(self) -> BertForMaskedLM:
        size = self.config.encoder
        return BertForMaskedLM(
            BertConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=size.inner,
                max_position_embeddings=size.max_tokens,
                hidden_dropout_prob=size.dropout,
                attention_probs_dropout_prob=size.dropout,
                pad_token_id=self.tokenizer.pad_token_id,
                type_vocab_size=1,
            )
        )

    def batches(self, part: Part = WHOLE) -> Ahead[MaskedBatch]:
        """The text, from its beginning."""
        config = self.config
        on_gpu = choose_device(config.train.device).type == "cuda"
        is_framed = on_gpu and config.train.graph is not False and part.of == 1

        def make(chosen: Sequence[Numbers], number: int) -> MaskedBatch:
            parts = [blocks[n] for blocks, n in zip(self._train.values(), chosen, strict=True)]
            languages = [lang for lang, numbers in enumerate(chosen) for _ in numbers]
            generator = np.random.default_rng([config.train.seed, 1, number])
            batch = self._hide(np.concatenate(parts), languages, generator)
            return batch.framed() if is_framed else batch

        stream = RowStream(
            {lang: len(blocks) for lang, blocks in self._train.items()},
            config.sampling,
            make,
            rows=config.batch.rows,
            accumulation=config.optimizer.accumulation,
            num_steps=config.train.max_steps,
            seed=config.train.seed,
            part=part,
        )
        return Ahead(stream, prepare=MaskedBatch.pin if on_gpu else None)

    def _hide(
        self, blocks: Blocks, languages: list[int], generator: np.random.Generator
    ) -> MaskedBatch:
        return hide(
            blocks,
            languages,
            share=self.config.batch.hidden,
            mask=self.tokenizer.mask_token_id,
            vocabulary=len(self.tokenizer),
            generator=generator,
        )

    def losses(self, batch: MaskedBatch) -> StepLosses:
        """The loss of every row, summed over what is hidden in it."""
        batch = batch.to(next(self.model.parameters()).device)
        return StepLosses(self._row_losses(batch), batch.languages)

    def _row_losses(self, batch: MaskedBatch) -> Tensor:
        states = self.model.bert(input_ids=batch.tokens).last_hidden_state  # [B, S, D]
        width = states.shape[-1]
        # Logits are computed only for what is hidden.
        places = batch.places[:, :, None].expand(-1, -1, width)
        logits = self.model.cls(states.gather(1, places))  # [B, M, V]
        losses = F.cross_entropy(logits.float().transpose(1, 2), batch.hidden, reduction="none")
        return losses.sum(1) if batch.counts else losses.sum(1) * 0.0

    def validate(self) -> Mapping[str, float]:
        """Every language's loss per hidden sub-word, always on the same ones."""
        scores: dict[str, float] = {}
        device = next(self.model.parameters()).device
        rows = self.config.batch.rows
        for number, (lang, blocks) in enumerate(self._dev.items()):
            total = torch.zeros((), dtype=torch.float64, device=device)
            num_hidden = 0
            for first in range(0, len(blocks), rows):
                some = np.asarray(blocks[first : first + rows])
                generator = np.random.default_rng([0, number, first])
                batch = self._hide(some, [number] * len(some), generator)
                total += self._row_losses(batch.to(device)).double().sum()
                num_hidden += batch.num_tokens
            scores[f"dev/loss/{lang}"] = float(total) / num_hidden
        return scores | {"dev/loss": float(np.mean(list(scores.values())))}

    def data_signature(self) -> str:
        """A hash of text and tokenizer settings."""
        return self.data.signature

    def table(self) -> Table:
        """A table of what there is to read."""
        shown = Table(title="What the encoder reads", title_justify="left")
        shown.add_column("language")
        for column in ("lines", "blocks", "sources"):
            shown.add_column(column, justify="right")
        for lang, counts in self.data.counts.items():
            blocks = len(self._train[lang]) + len(self._dev[lang])
            shown.add_row(lang, f"{sum(counts.values()):,}", f"{blocks:,}", str(len(counts)))
        return shown


def pretrain(config: PretrainConfig, run: str | Path, *, display: Display | None = None) -> Result:
    """Learn a tokenizer, pretrain an encoder, and save both in RUN/encoder.

    Args:
        config: The run's settings.
        run: The run folder; a run that stopped is continued.
        display: Where progress and messages go.
    """
    if config.train.parallel == "fsdp":
        raise ValueError('train.parallel: pretraining keeps whole models; use "ddp".')
    with join(config.train.device) as job:
        display = job.display(display)
        say = display.say
        data = job.first_then_others(lambda: TextData(config, say=say))
        seed_everything(config.train.seed)
        recipe = PretrainRecipe(config, data)
        display.console.print(recipe.table())
        result = train(recipe, config, run, display=display)
        if result.reason != "interrupted":
            job.on_first(lambda: _save_encoder(recipe, result, say))
        return result


def _save_encoder(recipe: PretrainRecipe, result: Result, say: Callable[[str], None]) -> None:
    which = "last" if result.best_step is None else "best"
    folder = result.run / ENCODER
    checkpoint.load_into(recipe.model, result.run, which)
    with quiet_transformers():
        recipe.model.cpu().save_pretrained(folder)
        recipe.tokenizer.save_pretrained(folder)
    say(f"The encoder ({which} weights) is in {folder}.")
