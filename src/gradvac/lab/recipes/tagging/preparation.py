"""Preparing data: tagged files -> checked sentences -> windows of sub-words.

PREPARED/SPLIT.LANG.tsv     words and tags as they are scored, in two columns
PREPARED/SPLIT.LANG.npz     windows
PREPARED/report.json        what was read, repaired, cut and skipped, by split and language
PREPARED/manifest.json      what it was made from; written last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradvac.lab.recipes.tagging.encoder import load_tokenizer
from gradvac.lab.recipes.tagging.encoding import NO_LABEL, Windows, WordEncoder
from gradvac.lab.recipes.tagging.labels import missing, refuse_unknown, rename
from gradvac.lab.recipes.tagging.readers import files_of, read_columns, read_sentences
from gradvac.lab.recipes.tagging.sentences import Sentence
from gradvac.lab.recipes.tagging.settings import DEV, TRAIN, TaggingConfig
from gradvac.lab.recipes.tagging.spans import OTHER_PREFIXES, count_broken, repair
from gradvac.lab.runs import PREPARED_MANIFEST, other_data, other_settings
from gradvac.lab.runs.files import (
    FolderLock,
    hash_file,
    hash_of,
    read_json,
    replacing,
    write_json,
    write_text,
)

Say = Callable[[str], None]
REPORT = "report.json"
# These choose among what was prepared, or say where things are; they do not change it.
_IRRELEVANT = {"prepared", "root", "resource_levels"}


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data.

    Attributes:
        folder: Where it is.
        sizes: Split -> language -> windows.
        signature: Hash of all sentences, labels and the tokenizer.
        report: "SPLIT LANG" -> what was counted.
    """

    folder: Path
    sizes: Mapping[str, Mapping[str, int]]
    signature: str
    report: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, config: TaggingConfig) -> Prepared | None:
        """Open what was prepared with these settings; None if there is nothing."""
        folder = config.data.prepared
        manifest = read_json(folder / PREPARED_MANIFEST)
        if manifest.get("settings") != relevant(config):
            return None
        report = read_json(folder / REPORT)
        return cls(folder, manifest["sizes"], manifest["signature"], report)

    def windows(self, split: str, lang: str) -> Windows:
        """The windows of a language."""
        self._check(split)
        return Windows.load(self.folder / f"{split}.{lang}.npz")

    def sentences(self, split: str, lang: str) -> list[Sentence]:
        """The sentences of a language, with the tags to score against."""
        self._check(split)
        return read_columns(self.folder / f"{split}.{lang}.tsv").sentences

    def _check(self, split: str) -> None:
        if split not in self.sizes:
            raise ValueError(f"set: there is no {split!r}; there are {', '.join(self.sizes)}.")


def relevant(config: TaggingConfig) -> dict[str, Any]:
    """The settings that prepared data depend on."""
    data = config.data.model_dump(mode="json", exclude=_IRRELEVANT)
    return data | {"encoder": config.model.encoder, "max_tokens": config.model.max_tokens}


def prepare(config: TaggingConfig, *, say: Say = print) -> Prepared:
    """Read, check and encode the data of a config; existing results are kept if still valid.

    Args:
        config: The run's settings.
        say: Called with progress messages.

    Raises:
        ValueError: A file is missing or damaged, or a training tag is not in the label set.
    """
    with FolderLock(config.data.prepared, busy=None):
        preparation = _Preparation(config, say)
        manifest = read_json(config.data.prepared / PREPARED_MANIFEST)
        if manifest.get("key") != preparation.key or not preparation.is_complete(manifest):
            preparation.run()
    prepared = Prepared.open(config)
    assert prepared is not None
    return prepared


def open_or_prepare(config: TaggingConfig, *, say: Say = print) -> Prepared:
    """Open prepared data; prepare them first if the folder holds none.

    Raises:
        ValueError: It holds data prepared with other settings. Another run may need them, so only
            `prepare` itself replaces them.
    """
    prepared = Prepared.open(config)
    if prepared is not None:
        return prepared
    folder = config.data.prepared
    former = read_json(folder / PREPARED_MANIFEST).get("settings", {})
    changed = [key for key, new in relevant(config).items() if former.get(key) != new]
    if former:
        raise other_settings(folder, changed, "tagging")
    return prepare(config, say=say)


def require_prepared(config: TaggingConfig, run: Path) -> Prepared:
    """Open the prepared data of a run, or say how to get them back."""
    prepared = Prepared.open(config)
    if prepared is None:
        raise other_data(run, config.data.prepared, "tagging")
    return prepared


class _Preparation:
    def __init__(self, config: TaggingConfig, say: Say) -> None:
        self.config, self.data, self.say = config, config.data, say
        self.folder = config.data.prepared
        self.labels = config.data.all_labels()
        self.tokenizer = load_tokenizer(config.model.encoder)

    @cached_property
    def key(self) -> str:
        """A hash of settings, files and tokenizer; data from elsewhere are not hashed."""
        hashes = []
        for split, source in self.data.sources().items():
            for lang in self.data.languages:
                paths = files_of(source, lang, split, root=self.data.root)
                hashes.append([hash_file(path) for path in paths] if paths else "not a file")
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        return hash_of([relevant(self.config), hashes, tokenizer])

    def is_complete(self, manifest: Mapping[str, Any]) -> bool:
        names = [(split, lang) for split in self.data.sources() for lang in self.data.languages]
        return bool(manifest) and all(
            (self.folder / f"{split}.{lang}.{suffix}").is_file()
            for split, lang in names
            for suffix in ("tsv", "npz")
        )

    def run(self) -> None:
        key = self.key  # before anything is removed: a missing file must not destroy what exists
        (self.folder / PREPARED_MANIFEST).unlink(missing_ok=True)
        report: dict[str, dict[str, Any]] = {}
        sizes: dict[str, dict[str, int]] = {}
        for split in self.data.sources():
            for lang in self.data.languages:
                self.say(f"Preparing {split} {lang}")
                counts, num_windows = self.prepare_one(split, lang)
                report[f"{split} {lang}"] = counts
                sizes.setdefault(split, {})[lang] = num_windows
        write_json(self.folder / REPORT, report)
        names = [f"{split}.{lang}.npz" for split, by_lang in sizes.items() for lang in by_lang]
        signature = hash_of([self.labels, [hash_file(self.folder / name) for name in names]])
        settings = relevant(self.config)
        write_json(
            self.folder / PREPARED_MANIFEST,
            {"settings": settings, "key": key, "sizes": sizes, "signature": signature},
        )

    def prepare_one(self, split: str, lang: str) -> tuple[dict[str, Any], int]:
        """Write the files of a language; return what was counted, and its windows."""
        source = self.data.sources()[split]
        reading = read_sentences(source, lang, split, root=self.data.root, form=self.data.format)
        counts: Counter[str] = Counter(reading.skipped)
        sentences = reading.sentences
        limits = {TRAIN: self.data.limit.get(lang), DEV: self.data.dev_limit}
        limit = limits.get(split)
        if limit and len(sentences) > limit:
            counts["sentences over the limit"] = len(sentences) - limit
            sentences = sentences[:limit]
        if not sentences:
            raise ValueError(f"data: {split} {lang} has no sentence; leave the language out.")
        sentences = [self.clean(sentence, counts) for sentence in sentences]
        tags = Counter(tag for sentence in sentences for tag in sentence.tags)
        if split == TRAIN:
            refuse_unknown(f"{lang} {split}", tags, self.labels)
        else:
            counts["words with a label unknown in training"] = sum(
                count for tag, count in tags.items() if tag not in self.labels
            )
        encoder = WordEncoder(self.tokenizer, self.config.model.max_tokens)
        numbers = {label: number for number, label in enumerate(self.labels)}
        labels = [[numbers.get(tag, NO_LABEL) for tag in one.tags] for one in sentences]
        windows = encoder.encode([one.words for one in sentences], labels)
        counts += encoder.counts
        with replacing(self.folder / f"{split}.{lang}.npz") as file:
            windows.save(file)
        write_text(self.folder / f"{split}.{lang}.tsv", _columns(sentences))
        report = {
            "sentences": len(sentences),
            "words": tags.total(),
            "windows": len(windows),
            "labels never seen": missing(tags, self.labels) if split == TRAIN else [],
        }
        return report | {name: count for name, count in counts.items() if count}, len(windows)

    def clean(self, sentence: Sentence, counts: Counter[str]) -> Sentence:
        """Rename tags, and repair entities that do not begin with `B-`."""
        tags = [rename(tag, self.data.rename) for tag in sentence.tags]
        counts["words renamed"] += sum(
            old != new for old, new in zip(sentence.tags, tags, strict=True)
        )
        if self.data.kind == "ner":
            others = sum(tag[:2] in OTHER_PREFIXES for tag in tags)
            counts["tags of IOBES made IOB2"] += others
            counts["broken tags repaired"] += count_broken(tags) - others
            tags = repair(tags)
        return Sentence(sentence.words, tuple(tags))


def _columns(sentences: list[Sentence]) -> str:
    blocks = (
        "".join(f"{word}\t{tag}\n" for word, tag in zip(one.words, one.tags, strict=True))
        for one in sentences
    )
    return "\n".join(blocks)
