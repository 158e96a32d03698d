"""Preparing data: tagged files -> checked sentences -> windows of sub-words.

    PREPARED/SPLIT.LANG.tsv     words and tags as they are scored, in two columns
    PREPARED/SPLIT.LANG.npz     windows
    PREPARED/report.json        what was read, repaired, cut and skipped, by split and language

`gradvac.lab.recipes.common.prepared` has the rest: steps, checksums, and what is done again.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from gradvac.lab.recipes.common.prepared import (
    Preparation,
    PreparedFolder,
    Results,
    open_or_prepare,
    preparing,
)
from gradvac.lab.recipes.tagging.encoder import NO_LABEL, Windows, WordEncoder, load_tokenizer
from gradvac.lab.recipes.tagging.metrics import OTHER_PREFIXES, count_broken, repair
from gradvac.lab.recipes.tagging.readers import (
    TaggedSentence,
    read_columns,
    read_sentences,
    sentence_file,
)
from gradvac.lab.recipes.tagging.settings import (
    DEV,
    TRAIN,
    TaggingConfig,
    check_known,
    rename_tag,
)
from gradvac.utils.files import hash_file, hash_of, replacing, write_text

# These choose among what was prepared, or say where things are; they do not change it.
_IRRELEVANT = {"prepared", "root", "resource_levels"}
logger = logging.getLogger(__name__)


class PreparedSentences(PreparedFolder):
    """The prepared data of a tagging run; `sizes` counts windows."""

    recipe = "tagging"

    @classmethod
    def settings_of(cls, config: TaggingConfig) -> dict[str, Any]:
        """The settings that prepared data depend on, as JSON gives them back."""
        data = config.data.model_dump(mode="json", exclude=_IRRELEVANT)
        model = config.model.model_dump(include={"encoder", "max_tokens"})
        return {
            **{f"data.{key}": value for key, value in data.items()},
            **{f"model.{key}": value for key, value in model.items()},
        }

    def windows(self, split: str, lang: str) -> Windows:
        """The windows of a language."""
        self.check_set(split)
        return Windows.load(self.path(f"{split}.{lang}.npz"))

    def sentences(self, split: str, lang: str) -> list[TaggedSentence]:
        """The sentences of a language, with the tags to score against."""
        self.check_set(split)
        return read_columns(self.path(f"{split}.{lang}.tsv")).sentences


def prepare_sentences(config: TaggingConfig) -> PreparedSentences:
    """Read, check and encode the data of a config; existing results are kept if still valid.

    Raises:
        ValueError: A file is missing or damaged, or a training tag is not in the label set.
    """
    with preparing(config.data.prepared) as preparation:
        _Sentences(config, preparation).prepare()
    prepared = PreparedSentences.open(config)
    assert prepared is not None
    return prepared


def open_sentences(config: TaggingConfig) -> PreparedSentences:
    """Open prepared data, or prepare them if the folder holds none.

    Raises:
        ValueError: The folder holds what was prepared with other settings.
    """
    return open_or_prepare(PreparedSentences, config, prepare_sentences)


class _Sentences:
    """The steps of the preparation: one for every split and language."""

    def __init__(self, config: TaggingConfig, preparation: Preparation) -> None:
        self.config, self.data, self.steps = config, config.data, preparation
        self.folder = config.data.prepared
        self.labels = config.data.all_labels()
        self.tokenizer = load_tokenizer(config.model.encoder)

    def prepare(self) -> None:
        names = [(split, lang) for split in self.data.sources() for lang in self.data.languages]
        # All before anything is removed: a missing file must not destroy what exists.
        keys = {name: self.key(*name) for name in names}
        done = {name: self.prepare_one(*name, key) for name, key in keys.items()}
        sizes: dict[str, dict[str, int]] = {}
        for (split, lang), results in done.items():
            sizes.setdefault(split, {})[lang] = results["report"]["windows"]
        hashes = [hash_file(self.folder / f"{split}.{lang}.npz") for split, lang in names]
        self.steps.complete(
            {" ".join(name): results["report"] for name, results in done.items()},
            settings=PreparedSentences.settings_of(self.config),
            sizes=sizes,
            signature=hash_of([self.labels, hashes]),
        )

    def key(self, split: str, lang: str) -> str:
        """A hash of what a step depends on; data that are not a file of ours are not hashed."""
        data, source = self.data, self.data.sources()[split]
        path = sentence_file(source, lang, split, root=data.root)
        content = hash_file(path) if path else "not a file"
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        settings = [data.kind, self.labels, data.format, data.rename, self.limit(split, lang)]
        return hash_of([source, content, settings, tokenizer, self.config.model.max_tokens])

    def limit(self, split: str, lang: str) -> int | None:
        return {TRAIN: self.data.limit.get(lang), DEV: self.data.dev_limit}.get(split)

    def prepare_one(self, split: str, lang: str, key: str) -> Results:
        """Write the files of a language."""
        step = f"{split} {lang}"
        before = self.steps.reuse(step, key)
        if before is not None:
            return before
        self.steps.start(step)
        logger.info("Preparing %s", step)
        sentences, counts = self.read(split, lang)
        tags = Counter(tag for sentence in sentences for tag in sentence.tags)
        if split == TRAIN:
            check_known(f"{lang} {split}", tags, self.labels)
        else:
            counts["words with a label unknown in training"] = sum(
                count for tag, count in tags.items() if tag not in self.labels
            )
        encoder = WordEncoder(self.tokenizer, self.config.model.max_tokens)
        numbers = {label: number for number, label in enumerate(self.labels)}
        labels = [[numbers.get(tag, NO_LABEL) for tag in one.tags] for one in sentences]
        windows = encoder.encode([one.words for one in sentences], labels)
        counts += encoder.counts
        paths = [self.folder / f"{split}.{lang}.{suffix}" for suffix in ("npz", "tsv")]
        with replacing(paths[0]) as file:
            windows.save(file)
        write_text(paths[1], _columns(sentences))
        report = {
            "sentences": len(sentences),
            "words": tags.total(),
            "windows": len(windows),
            "labels never seen": [one for one in self.labels if split == TRAIN and not tags[one]],
        }
        report |= {name: count for name, count in counts.items() if count}
        return self.steps.finish(step, key, paths, report=report)

    def read(self, split: str, lang: str) -> tuple[list[TaggedSentence], Counter[str]]:
        """The sentences of a language, repaired, and what was counted on the way."""
        source = self.data.sources()[split]
        reading = read_sentences(source, lang, split, root=self.data.root, form=self.data.format)
        counts, sentences = Counter(reading.skipped), reading.sentences
        limit = self.limit(split, lang)
        if limit and len(sentences) > limit:
            counts["sentences over the limit"] = len(sentences) - limit
            sentences = sentences[:limit]
        if not sentences:
            raise ValueError(f"data: {split} {lang} has no sentence; leave the language out.")
        return [self.clean(sentence, counts) for sentence in sentences], counts

    def clean(self, sentence: TaggedSentence, counts: Counter[str]) -> TaggedSentence:
        """Rename tags, and repair entities that do not begin with `B-`."""
        tags = [rename_tag(tag, self.data.rename) for tag in sentence.tags]
        counts["words renamed"] += sum(
            old != new for old, new in zip(sentence.tags, tags, strict=True)
        )
        if self.data.kind == "ner":
            others = sum(tag[:2] in OTHER_PREFIXES for tag in tags)
            counts["tags of IOBES made IOB2"] += others
            counts["broken tags repaired"] += count_broken(tags) - others
            tags = repair(tags)
        return TaggedSentence(sentence.words, tuple(tags))


def _columns(sentences: list[TaggedSentence]) -> str:
    blocks = (
        "".join(f"{word}\t{tag}\n" for word, tag in zip(one.words, one.tags, strict=True))
        for one in sentences
    )
    return "\n".join(blocks)
