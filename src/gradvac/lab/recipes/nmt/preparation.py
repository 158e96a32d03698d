"""Preparing data: text -> clean text -> vocabulary -> token files.

    PREPARED/text/SPLIT.PAIR.LANG       clean text, line by line
    PREPARED/tokens/SPLIT.PAIR.LANG.*   token files
    PREPARED/vocabulary.model           SentencePiece
    PREPARED/report.json                what was dropped and why

`gradvac.lab.recipes.common.prepared` has the rest: steps, checksums, and what is done again.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradvac.lab.recipes.common.prepared import (
    Preparation,
    PreparedFolder,
    Results,
    open_or_prepare,
    preparing,
)
from gradvac.lab.recipes.nmt import tokens
from gradvac.lab.recipes.nmt.cleaning import (
    Report,
    clean_pairs,
    fingerprint,
    keep_readable,
    letters,
)
from gradvac.lab.recipes.nmt.data_warnings import keep_first, warn_of_languages, warn_of_overlap
from gradvac.lab.recipes.nmt.readers import (
    Line,
    Pair,
    check_characters,
    pair_files,
    read_pairs,
    read_written,
    read_written_pairs,
    write_pairs,
)
from gradvac.lab.recipes.nmt.settings import DEV, TRAIN, DataConfig
from gradvac.lab.recipes.nmt.tokens import SUFFIXES, TokenShards, shard_name, tokenise_shard
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary, draw_lines, extend, learn
from gradvac.lab.runs import RunFolder
from gradvac.tasks import parse, turned
from gradvac.utils.files import hash_file, hash_of, replacing

VOCABULARY = "vocabulary.model"
# These choose among what was prepared, or say where things are; they do not change it.
_IRRELEVANT = {"prepared", "root", "directions", "tasks", "resource_levels", "processes", "backend"}
logger = logging.getLogger(__name__)
_FEWEST_ALIGNED = 10  # lines to compare gradients on


class PreparedCorpus(PreparedFolder):
    """The prepared data of a translation run.

    Attributes:
        vocabulary: The shared vocabulary.
        shards: "train.en-fr" -> for every shard its pairs and the tokens of both sides.
    """

    recipe = "nmt"

    def __init__(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        super().__init__(folder, metadata)
        self.vocabulary = Vocabulary.load(self.path(VOCABULARY))
        self.shards: dict[str, list[list[int]]] = metadata["shards"]

    @classmethod
    def folder_of(cls, config: DataConfig) -> Path:
        """The folder that a config names."""
        return config.prepared

    @classmethod
    def settings_of(cls, config: DataConfig) -> dict[str, Any]:
        """The settings that prepared data depend on, as JSON gives them back."""
        relevant = config.model_dump(mode="json", exclude=_IRRELEVANT)
        return {f"data.{key}": value for key, value in relevant.items()}

    @classmethod
    def is_made_from(cls, settings: Mapping[str, Any], config: DataConfig) -> bool:
        """Whether these settings give what is asked for, if only because the pieces are equal."""
        asked = cls.settings_of(config)
        if settings == asked:
            return True
        given, rest = config.vocabulary.model, {"data.vocabulary": None}
        if given is None or not given.is_file() or {**settings, **rest} != {**asked, **rest}:
            return False
        wanted = extend(given.read_bytes(), config.all_languages())
        return wanted == (config.prepared / VOCABULARY).read_bytes()

    def tokens(self, split: str, pair: str) -> tuple[TokenShards, TokenShards]:
        """The token files of a pair, in the order of its name; mapped when they are needed."""
        sizes = self.shards[f"{split}.{pair}"]
        names = [shard_name(f"{split}.{pair}", shard, len(sizes)) for shard in range(len(sizes))]
        sides = []
        for side, code in enumerate(parse(pair), start=1):
            stems = [f"tokens/{name}.{code}" for name in names]
            for suffix in SUFFIXES:
                for name in stems:
                    self.path(f"{name}{suffix}")  # raises if it is not as it was written
            num_tokens = sum(size[side] for size in sizes)
            paths = [self.folder / name for name in stems]
            num_pairs = [size[0] for size in sizes]
            sides.append(TokenShards(paths, num_pairs, num_tokens, len(self.vocabulary)))
        return sides[0], sides[1]

    def text(self, split: str, pair: str) -> tuple[list[str], list[str]]:
        """Read the clean text of a pair, in the order of its name."""
        self.check_set(split)
        paths = (self.path(f"text/{split}.{pair}.{code}") for code in parse(pair))
        first, second = (list(read_written(path)) for path in paths)
        return first, second

    def pair_of(self, task: str) -> str:
        """The pair a task belongs to: itself, or turned round."""
        return task if task in self.sizes[TRAIN] else turned(task)

    def train_size(self, task: str) -> int:
        """The number of training pairs of a task."""
        return self.sizes[TRAIN][self.pair_of(task)]

    def task_text(self, split: str, task: str) -> tuple[list[str], list[str]]:
        """Read the clean text of a task: sources and targets."""
        pair = self.pair_of(task)
        first, second = self.text(split, pair)
        return (first, second) if pair == task else (second, first)

    def task_tokens(self, split: str, task: str) -> tuple[TokenShards, TokenShards]:
        """Map the token files of a task: sources and targets."""
        pair = self.pair_of(task)
        first, second = self.tokens(split, pair)
        return (first, second) if pair == task else (second, first)

    def check_vocabulary_of(self, run: Path) -> None:
        """Refuse tokens that mean something else to the model of a run.

        Raises:
            ValueError: The run was trained with another vocabulary.
        """
        if self.path(VOCABULARY).read_bytes() != RunFolder(run).read_saved(VOCABULARY):
            raise ValueError(
                f"data.prepared: {self.folder} has another vocabulary than {run} was trained with; "
                "give the folder it was trained from with data.prepared=..."
            )

    def reports(self) -> dict[str, Report]:
        """Read what was dropped: "train en-fr" -> report."""
        return {name: Report.from_dict(report) for name, report in self.read_report().items()}


def prepare_corpus(config: DataConfig) -> PreparedCorpus:
    """Prepare the data of a config, or what is missing of it.

    Raises:
        ValueError: A file is missing or damaged, or nothing is left of a language.
    """
    given = config.vocabulary.model
    if given is not None and not given.is_file():
        raise ValueError(f"data.vocabulary.model: there is no file {given}.")
    with preparing(config.prepared, subfolders=("text", "tokens")) as preparation:
        _Corpus(config, preparation).prepare()
    prepared = PreparedCorpus.open(config)
    assert prepared is not None
    return prepared


def open_corpus(config: DataConfig) -> PreparedCorpus:
    """Open prepared data, or prepare them if the folder holds none; log warnings and drops.

    Raises:
        ValueError: The folder holds what was prepared with other settings.
    """
    was_prepared = PreparedCorpus.open(config) is not None
    prepared = open_or_prepare(PreparedCorpus, config, prepare_corpus)
    if was_prepared:
        for warning in prepared.warnings:
            logger.warning(warning)
        return prepared
    for name, report in prepared.reports().items():
        if report.dropped:
            logger.info("%s: %s", name, report)
    return prepared


class _Corpus:
    """The steps of the preparation."""

    def __init__(self, config: DataConfig, preparation: Preparation) -> None:
        self.config, self.folder, self.steps = config, config.prepared, preparation
        self.pairs, self.sources = config.all_pairs(), config.sources()
        self.texts: dict[tuple[str, str], Results] = {}  # (split, pair) -> its cleaning

    def prepare(self) -> None:
        splits = sorted(self.sources, key=lambda split: split == TRAIN)
        for split in splits:  # training text last: it must not hold what is held out
            for pair in self.pairs:
                self.texts[split, pair] = self.clean_text(split, pair)
        vocabulary, digest = self.learn_vocabulary()
        tokenised = {key: self.tokenise(*key, vocabulary, digest) for key in self.texts}
        reports = {key: self.report(*key, tokenised[key]["reports"]) for key in self.texts}
        names = [(split, pair) for split in self.sources for pair in self.pairs]
        warnings = [*(self.texts[key]["warning"] for key in names), *self.overlaps()]
        self.steps.complete(
            {" ".join(key): reports[key].to_dict() for key in names},
            settings=PreparedCorpus.settings_of(self.config),
            sizes={
                split: {pair: reports[split, pair].num_kept for pair in self.pairs}
                for split in self.sources
            },
            signature=hash_of([tokenised[key]["key"] for key in sorted(tokenised)]),
            warnings=[warning for warning in warnings if warning],
            shards={".".join(key): one["shards"] for key, one in tokenised.items()},
        )

    def clean_text(self, split: str, pair: str) -> Results:
        """Clean the text of a pair."""
        step = f"text {split} {pair}"
        sources = self.config.sources_of(split, pair)
        hashes = self.hash_sources(sources, pair)
        depends: list[Any] = [sources, hashes]
        if self.config.columns:
            depends.append(self.config.columns)
        if split == TRAIN:
            held_out = [text["digest"] for (s, _), text in self.texts.items() if s != TRAIN]
            depends += [self.config.cleaning.model_dump(), self.config.limit_of(pair), held_out]
        key = hash_of(depends)
        # What comes from no file of ours has no hash: it is read again, and compared afterwards.
        results = self.steps.reuse(step, key) if hashes else None
        if results is None:
            self.steps.start(step)
            logger.info("Cleaning %s %s", split, pair)
            report, first = Report(), list[Pair]()
            paths = self.paths("text", split, pair)
            digest = write_pairs(paths, keep_first(self.kept(split, pair, report), first))
            report.check_not_empty(f"{split} {pair}")
            odd = warn_of_languages(*parse(pair), first)
            warning = odd and f"warning: {split} {pair}: {odd}"
            results = self.steps.finish(
                step, key, paths, digest=digest, report=report.to_dict(), warning=warning
            )
        if results["warning"]:
            logger.warning(results["warning"])
        return results

    def overlaps(self) -> Iterator[str]:
        """Warnings of sentences to score on that are in the development set."""
        for split, pair in self.texts:
            if split not in (TRAIN, DEV):
                scored, dev = (
                    read_written_pairs(self.paths("text", name, pair)) for name in (split, DEV)
                )
                if warning := warn_of_overlap(f"{split} {pair}", scored, dev):
                    logger.warning(warning)
                    yield warning

    def kept(self, split: str, pair: str, report: Report) -> Iterator[Pair]:
        """Read a pair, and pass on what is kept."""
        first, second = parse(pair)

        def lines() -> Iterator[Line]:
            for source in self.config.sources_of(split, pair):
                pairs = read_pairs(
                    source,
                    first,
                    second,
                    root=self.config.root,
                    columns=self.config.columns,
                    is_shared=len(self.pairs) > 1 and not isinstance(self.sources[split], dict),
                )
                yield from check_characters(pairs, f"{source!r} for {pair}")

        if split != TRAIN:
            return keep_readable(lines(), report)
        return clean_pairs(
            lines(),
            self.config.cleaning,
            report,
            held_out=(self.held_out[first], self.held_out[second]),
            limit=self.config.limit_of(pair),
            processes=self.config.processes,
            backend=self.config.backend,
        )

    def paths(self, what: str, split: str, pair: str) -> list[Path]:
        return [self.folder / what / f"{split}.{pair}.{code}" for code in parse(pair)]

    def hash_sources(self, sources: Iterable[str], pair: str) -> list[str]:
        """Hash the files of a pair; empty if some source is not a file."""
        hashes: list[str] = []
        for source in sources:
            paths = pair_files(source, *parse(pair), root=self.config.root)
            if not paths:
                return []
            hashes += map(hash_file, paths)
        return hashes

    @cached_property
    def held_out(self) -> dict[str, set[int]]:
        """Fingerprints of the held-out sentences of every language, of all pairs together."""
        held_out = {code: set[int]() for code in self.config.all_languages()}
        for split, pair in self.texts:
            for path in self.paths("text", split, pair) if split != TRAIN else ():
                language = held_out[path.name.rpartition(".")[2]]
                language.update(fingerprint(letters(line)) for line in read_written(path))
        return held_out

    def learn_vocabulary(self) -> tuple[Vocabulary, str]:
        """Learn the vocabulary from the training text of all languages, or take the given one."""
        config, path = self.config.vocabulary, self.folder / VOCABULARY
        languages = self.config.all_languages()
        digests = [self.texts[TRAIN, pair]["digest"] for pair in self.pairs]
        key = hash_of([config.model_dump(exclude={"model"}), languages, digests])
        given = config.given()
        if given:
            key = hash_of([hashlib.blake2b(given).hexdigest(), languages])
        if self.steps.reuse("vocabulary", key) is None:
            self.steps.start("vocabulary")
            size = f"{config.size:,} pieces"
            logger.info(f"Taking {config.model}" if given else f"Learning a vocabulary of {size}")
            with replacing(path) as file:
                file.write(
                    extend(given, languages)
                    if given
                    else learn(self.vocabulary_lines(), languages, config)
                )
            self.steps.finish("vocabulary", key, [path])
        vocabulary = Vocabulary.load(path)
        if len(vocabulary) < config.size and not given:
            logger.info(
                f"data.vocabulary.size = {config.size:,} was asked for, but the text gives only "
                f"{len(vocabulary):,} pieces; continuing with those."
            )
        return vocabulary, hash_file(path)

    def vocabulary_lines(self) -> Iterator[str]:
        """Training text of all languages, in the proportions of the temperature."""
        texts: dict[str, list[Path]] = {code: [] for code in self.config.all_languages()}
        for pair in self.pairs:
            for path in self.paths("text", TRAIN, pair):
                texts[path.name.rpartition(".")[2]].append(path)
        return draw_lines(texts, self.config.vocabulary)

    def tokenise(self, split: str, pair: str, vocabulary: Vocabulary, digest: str) -> Results:
        """Tokenise the text of a pair, and drop training pairs with too many tokens."""
        text = self.texts[split, pair]
        num = tokens.num_shards(text["report"]["kept"])
        most = self.config.max_tokens if split == TRAIN else None
        names = [shard_name(f"{split}.{pair}", shard, num) for shard in range(num)]
        depends = [text["digest"], digest, most]
        keys = [hash_of([*depends, *([num, n] if num > 1 else [])]) for n in range(num)]
        shards = [
            self.steps.reuse(f"tokens {name}", key) for name, key in zip(names, keys, strict=True)
        ]
        lines = read_written_pairs(self.paths("text", split, pair))
        for number, name in enumerate(names):
            block = islice(lines, tokens.PAIRS_PER_SHARD if num > 1 else None)
            if all(shards[number:]):
                break
            if shards[number]:
                deque(block, maxlen=0)
                continue
            step = f"tokens {name}"
            self.steps.start(step)
            logger.info("Tokenising %s", name.replace(".", " ", 1))
            shard = tokenise_shard(
                block,
                [self.folder / "tokens" / f"{name}.{code}" for code in parse(pair)],
                vocabulary,
                most=most,
                processes=self.config.processes,
                backend=self.config.backend,
            )
            shards[number] = self.steps.finish(
                step, keys[number], shard.files, report=shard.report.to_dict(), sizes=shard.sizes
            )
        return {
            "key": keys[0] if num == 1 else hash_of(keys),
            "reports": [shard["report"] for shard in shards if shard],
            "shards": [shard["sizes"] for shard in shards if shard],
        }

    def report(self, split: str, pair: str, later: Iterable[dict[str, Any]]) -> Report:
        """What became of a pair, from reading to tokens."""
        report = Report.from_dict(self.texts[split, pair]["report"])
        for dropped in map(Report.from_dict, later):
            report.drop_later(dropped)
        report.check_not_empty(f"{split} {pair}")
        return report


def aligned_lines(
    prepared: PreparedCorpus, split: str, tasks: Sequence[str], num_lines: int | None = None
) -> dict[str, npt.NDArray[np.int64]]:
    """Lines of a set that say the same thing in all tasks.

    Returns:
        Task -> numbers of its lines; the n-th of all tasks belong together.
    """
    pairs = list(dict.fromkeys(prepared.pair_of(task) for task in tasks))
    common = [code for code in parse(pairs[0]) if all(code in parse(p) for p in pairs)]
    if common:
        texts = {p: prepared.text(split, p)[parse(p).index(common[0])] for p in pairs}
        places = {p: {text: n for n, text in reversed(list(enumerate(texts[p])))} for p in pairs}
        shared = [t for t in places[pairs[0]] if all(t in of_pair for of_pair in places.values())]
        shared.sort(key=places[pairs[0]].__getitem__)
        numbers = {p: [places[p][text] for text in shared[:num_lines]] for p in pairs}
    else:
        sizes = {p: len(prepared.text(split, p)[0]) for p in pairs}
        size = min(sizes.values()) if len(set(sizes.values())) == 1 else 0
        numbers = {p: list(range(size))[:num_lines] for p in pairs}
    fewest = min(_FEWEST_ALIGNED, num_lines or _FEWEST_ALIGNED)
    if len(numbers[pairs[0]]) < max(2, fewest):
        raise ValueError(
            f"set: {split!r} is not aligned over all tasks; only {len(numbers[pairs[0]])} lines "
            "are in all pairs. Choose another one with --set, such as an extra set "
            "(data.extra) with the same sentences in every language."
        )
    return {task: np.array(numbers[prepared.pair_of(task)], dtype=np.int64) for task in tasks}
