"""The config of a translation run: [data], [model], [batch], [validation], [decoding].

The other sections are those of every run: [train], [optimizer], [sampling], [align].
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from gradvac.analysis.run_files import RESOURCE_LEVELS
from gradvac.lab.recipes.nmt.cleaning import CleaningConfig
from gradvac.lab.recipes.nmt.model import SIZES, Size, Transformer
from gradvac.lab.recipes.nmt.readers import fill
from gradvac.lab.recipes.nmt.vocabulary import VocabularyConfig
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, Section, TrainConfig
from gradvac.lab.training.config import Folder
from gradvac.tasks import DEFAULT_PIVOT, Direction, parse, turned

Source = str | list[str]
Sources = Source | dict[str, Source]
TRAIN, DEV, TEST = "train", "dev", "test"
# They become names of files and of pieces, so that nothing else may be in them.
_CODE, _SET = re.compile(r"\w{1,32}", re.ASCII), re.compile(r"\w[\w-]{0,63}", re.ASCII)


class ResourceLevels(Section):
    """[data.resource_levels]: training pairs from which a task is of a level.

    The defaults are those of the paper's massively multilingual data, in sentence pairs.

    Attributes:
        high: From so many pairs on.
        medium: From so many pairs on.
        low: From so many pairs on; tasks with fewer are "extremely_low".
    """

    high: int = Field(default=100_000_000, ge=1)
    medium: int = Field(default=10_000_000, ge=1)
    low: int = Field(default=5_000_000, ge=1)

    @model_validator(mode="after")
    def _fall(self) -> ResourceLevels:
        if not self.high >= self.medium >= self.low:
            raise ValueError(
                f"high, medium and low must fall, got {self.high}, {self.medium}, {self.low}"
            )
        return self

    def of(self, num_pairs: int) -> str:
        """The level of a number of training pairs."""
        thresholds = (self.high, self.medium, self.low, 0)
        return next(
            level
            for level, least in zip(RESOURCE_LEVELS, thresholds, strict=True)
            if num_pairs >= least
        )


class DataConfig(Section):
    """[data]: the text, and what is learned from it.

    Attributes:
        prepared: Folder for what `gradvac nmt prepare` makes.
        root: What the files below are relative to.
        pivot: The language that all others are paired with.
        languages: The others.
        pairs: Instead of `languages`: pairs such as "fr-de", pivot or not.
        columns: What the columns of TSV and CSV files hold, by code, as in ["de", "en"]; "{xx}"
            stands for the second language of a pair, any other name for a column to pass over.
            Empty: a header says so, or else the two columns are in the order of the pair's name.
        train: Sources of training pairs; see `gradvac.lab.recipes.nmt.readers`. A source, a list of
            them, or one of either for every language or pair: {de = "a.tsv", fr = ["b.tsv"]}.
        dev: Source of the pairs that choose the checkpoint; may differ by language likewise.
        test: Source of the pairs to score on; may be left out.
        extra: Further named sets to score on, such as {ntrex = "eval.{lang}.gz"}.
        limit: Language or pair -> most training pairs.
        directions: Which way to translate the pairs; "en" stands for the first of each.
        tasks: Only these tasks, such as ["en-fr"] for a bilingual model.
        max_tokens: Training pairs with a longer side are dropped; `translate` cuts its input there.
        processes: Processes that clean large corpora, and threads that tokenise them; 0: one for
            every core. They change nothing.
        backend: What cleans and tokenises large corpora: "processes" of this machine, or "ray"
            (extra `ray`): the cluster that RAY_ADDRESS names, or an instance of this machine. It
            changes nothing. Files are read and written here.
        resource_levels: Thresholds.
        cleaning: What else is dropped.
        vocabulary: The shared vocabulary.
    """

    prepared: Folder
    root: Folder = Path(".")
    pivot: str = DEFAULT_PIVOT
    languages: list[str] = Field(default_factory=list)
    pairs: list[str] = Field(default_factory=list)
    columns: list[str] = Field(default_factory=list)
    train: Sources
    dev: Sources
    test: Sources | None = None
    extra: dict[str, Sources] = Field(default_factory=dict)
    limit: dict[str, PositiveInt] = Field(default_factory=dict)
    directions: Literal["en-to-any", "any-to-en", "any-to-any"] = "en-to-any"
    tasks: list[str] = Field(default_factory=list)
    max_tokens: int = Field(default=256, ge=1)
    processes: int = Field(default=0, ge=0)
    backend: Literal["processes", "ray"] = "processes"
    resource_levels: ResourceLevels = ResourceLevels()
    cleaning: CleaningConfig = CleaningConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if bool(self.languages) == bool(self.pairs):
            raise ValueError("give either languages or pairs")
        for pair in self.pairs:
            try:
                parse(pair)
            except ValueError as error:
                raise ValueError(f"pairs: {error}") from None
        codes = (self.pivot, *self.languages, *(c for p in self.pairs for c in parse(p)))
        bad = [code for code in codes if not _CODE.fullmatch(code)]
        if bad or self.pivot in self.languages:
            name, what = (bad or [self.pivot])[0], "is no code" if bad else "is the pivot"
            what = "has a hyphen" if "-" in name else what
            raise ValueError(
                f"languages: {name!r} {what}; write codes such as 'fr' or 'zh_tw': letters, digits "
                "and _"
            )
        names = self.all_pairs()
        if len(set(names)) != len(names):
            raise ValueError("languages or pairs: one appears twice")
        known = {*names, *(code for pair in names for code in parse(pair))}
        for what, given in (("tasks", self.tasks), ("limit", list(self.limit))):
            choices = self._all_tasks() if what == "tasks" else sorted(known)
            unknown = [name for name in given if name not in choices]
            if unknown:
                raise ValueError(f"{what}: {unknown[0]!r} is none of {', '.join(choices)}")
        reserved = {TRAIN, DEV, TEST} & set(self.extra)
        if reserved:
            raise ValueError(f"extra: {min(reserved)!r} is taken; choose another name")
        bad = [name for name in self.extra if not _SET.fullmatch(name)]
        if bad:
            raise ValueError(
                f"extra: {bad[0]!r} becomes part of file names; use letters, digits, - and _"
            )
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice or len(self.columns) == 1:
            raise ValueError(f"columns: {self.columns} must name two languages, each once")
        for split in self.sources():
            for pair in names:
                for source in self.sources_of(split, pair):
                    fill(source, "en", "xx", "en")  # raises if a placeholder is wrong
        return self

    def all_pairs(self) -> list[str]:
        """All language pairs, as in "en-fr"."""
        return self.pairs or [Direction(self.pivot, code).name for code in self.languages]

    def all_languages(self) -> list[str]:
        """The codes of all languages, pivot included."""
        return list(dict.fromkeys(code for pair in self.all_pairs() for code in parse(pair)))

    def all_tasks(self) -> list[str]:
        """The tasks to train: directions, as in "en-fr" or "fr-en"."""
        return self.tasks or self._all_tasks()

    def _all_tasks(self) -> list[str]:
        there = self.all_pairs()
        back = [turned(pair) for pair in there]
        return {"en-to-any": there, "any-to-en": back, "any-to-any": [*there, *back]}[
            self.directions
        ]

    def limit_of(self, pair: str) -> int | None:
        """The most training pairs: the pair's own limit, or the lower one of its languages."""
        language_limits = [self.limit[code] for code in parse(pair) if code in self.limit]
        return self.limit.get(pair, min(language_limits, default=None))

    def sources(self) -> dict[str, Sources]:
        """Split -> its sources, as they were given."""
        test = {} if self.test is None else {TEST: self.test}
        return {TRAIN: self.train, DEV: self.dev, **test, **self.extra}

    def sources_of(self, split: str, pair: str) -> list[str]:
        """The sources of a pair in a split."""
        given = self.sources()[split]
        if isinstance(given, dict):
            names = [pair, *(code for code in reversed(parse(pair)) if code != self.pivot)]
            unknown = given.keys() - {*self.all_pairs(), *self.all_languages()}
            sources = [given[name] for name in names if name in given]
            if unknown or not sources:
                what = f"{min(unknown)!r} is none of them" if unknown else f"none for {pair}"
                raise ValueError(
                    f"{split}: gives sources by language or pair, but {what}; write as in "
                    f'{{{names[-1]} = "..."}}'
                )
            given = sources[0]
        return [given] if isinstance(given, str) else given


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
            can be recorded: "auto" unless `train.cuda_graph` is false, on a GPU with bf16. Of
            several processes, each takes its part of the same batches.
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
        cuda_graph: Record the steps of the search as CUDA graphs, on a GPU, where they say the same
            sooner. If recording fails, a warning says so, and steps go on as they are written.
        memory: GiB for what is kept of the sentences that are translated at a time; unset: a part
            of what is free.
        engine: "ctranslate2" searches with CTranslate2 (extra `export`) instead: the same
            translations but for rounding, and what our own search cannot do, the n best
            (`translate --n-best`) and sampling.
        sampling_topk: ctranslate2: Draw every token from this many of the likeliest, instead of
            searching; 0: from all of them. With `beams = 1`. Other draws in every call.
        sampling_temperature: ctranslate2: Of these draws; larger is bolder. Unset: 1.
    """

    beams: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    max_ratio: float = Field(default=2.0, gt=0)
    max_extra: int = Field(default=10, ge=1)
    cuda_graph: bool = True
    memory: float | None = Field(default=None, gt=0)
    engine: Literal["ctranslate2"] | None = None
    sampling_topk: int | None = Field(default=None, ge=0)
    sampling_temperature: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _can_be_drawn(self) -> DecodingConfig:
        if self.sampling_topk is None:
            if self.sampling_temperature is not None:
                raise ValueError("sampling_temperature: is of sampling; set sampling_topk too")
        elif self.engine is None or self.beams > 1:
            raise ValueError('sampling_topk: needs engine = "ctranslate2" and beams = 1')
        return self


class NmtTrainConfig(TrainConfig):
    """[train] of translation, where filling batches up to one size costs next to nothing."""

    cuda_graph: bool | Literal["auto"] = "auto"


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
        """A run that starts from another one has its vocabulary."""
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
        """Raised now, and not after the hours until the first validation."""
        kinds = {"loss": False} | ({"bleu": True} if self.validation.bleu_sentences else {})
        is_bleu = self.train.metric.startswith("dev/bleu")
        hint = "; BLEU needs validation.bleu_sentences" if is_bleu else ""
        self.train.check_metric(kinds, self.data.all_tasks(), hint)
        return self
