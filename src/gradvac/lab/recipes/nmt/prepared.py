"""Prepared data: what `prepare` left, opened for training and scoring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradvac.lab.recipes.nmt.cleaning import Report
from gradvac.lab.recipes.nmt.data_settings import TRAIN, DataConfig
from gradvac.lab.recipes.nmt.sealed import SealedFolder, read_facts
from gradvac.lab.recipes.nmt.tokens import SUFFIXES, TokenShards, shard_name
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary, extend
from gradvac.lab.runs import PREPARED_MANIFEST, RunFolder, other_data
from gradvac.tasks import parse, turned

MANIFEST, REPORT, VOCABULARY = PREPARED_MANIFEST, "report.json", "vocabulary.model"
# These choose among what was prepared, or say where things are; they do not change it.
_IRRELEVANT = {"prepared", "root", "directions", "tasks", "resource_levels", "processes", "engine"}
_FACTS = {"settings", "sizes", "signature", "files", "shards"}
_REMEDY = "run `gradvac nmt prepare` again, which mends it"


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared data.

    Attributes:
        folder: Where it is.
        vocabulary: The shared vocabulary.
        sizes: Split -> pair -> number of sentence pairs.
        signature: Hash of all text and of the vocabulary.
        doubts: Warnings: text of another language than its name says, test sentences in dev.
        shards: "train.en-fr" -> for every shard its pairs and the tokens of both sides.
        files: Its files, each compared with what was written before it is used.
    """

    folder: Path
    vocabulary: Vocabulary
    sizes: dict[str, dict[str, int]]
    signature: str
    doubts: list[str]
    shards: dict[str, list[list[int]]]
    files: SealedFolder

    @staticmethod
    def require_places(config: DataConfig) -> None:
        """Refuse, before hours of work, a vocabulary that is absent and a folder of a run."""
        given = config.vocabulary.model
        if given is not None and not given.is_file():
            raise ValueError(f"data.vocabulary.model: there is no file {given}.")
        if RunFolder(config.prepared).config.exists():  # its vocabulary would be written over
            raise ValueError(f"data.prepared: {config.prepared} is a run folder; choose another.")

    @classmethod
    def open(cls, config: DataConfig) -> Prepared | None:
        """Open what was prepared with these settings; None if there is no such thing.

        Raises:
            ValueError: The manifest or the vocabulary is damaged.
        """
        manifest = read_manifest(config.prepared)
        if not manifest or not _holds(manifest["settings"], config):
            return None
        files = SealedFolder(config.prepared, manifest["files"], remedy=_REMEDY)
        return cls(
            config.prepared,
            Vocabulary.load(files[VOCABULARY]),
            manifest["sizes"],
            manifest["signature"],
            manifest["doubts"],
            manifest["shards"],
            files,
        )

    def tokens(self, split: str, pair: str) -> tuple[TokenShards, TokenShards]:
        """The token files of a pair, in the order of its name; mapped when they are needed."""
        sizes = self.shards[f"{split}.{pair}"]
        names = [shard_name(f"{split}.{pair}", shard, len(sizes)) for shard in range(len(sizes))]
        sides = []
        for side, code in enumerate(parse(pair), start=1):
            stems = [f"tokens/{name}.{code}" for name in names]
            for suffix in SUFFIXES:
                for name in stems:
                    self.files[f"{name}{suffix}"]  # looks whether it is as it was written
            num_tokens = sum(size[side] for size in sizes)
            paths = [self.folder / name for name in stems]
            num_pairs = [size[0] for size in sizes]
            sides.append(TokenShards(paths, num_pairs, num_tokens, len(self.vocabulary)))
        return sides[0], sides[1]

    def text(self, split: str, pair: str) -> tuple[list[str], list[str]]:
        """Read the clean text of a pair, in the order of its name."""
        if split not in self.sizes:
            raise ValueError(f"set: there is no {split!r}; there are {', '.join(self.sizes)}.")
        paths = (self.files[f"text/{split}.{pair}.{code}"] for code in parse(pair))
        first, second = (path.read_text(encoding="utf-8").split("\n")[:-1] for path in paths)
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

    def require_vocabulary_of(self, run: Path) -> None:
        """Refuse tokens that mean something else to the model of a run.

        Raises:
            ValueError: The run was trained with another vocabulary.
        """
        if self.files[VOCABULARY].read_bytes() != RunFolder(run).read_saved(VOCABULARY):
            raise ValueError(
                f"data.prepared: {self.folder} has another vocabulary than {run} was trained with; "
                "give the folder it was trained from with data.prepared=..."
            )

    def reports(self) -> dict[str, Report]:
        """Read what was dropped: "train en-fr" -> report."""
        saved = json.loads(self.files[REPORT].read_text(encoding="utf-8"))
        return {name: Report.from_dict(report) for name, report in saved.items()}


def require_prepared(config: DataConfig, run: Path) -> Prepared:
    """Open the data that a run was trained on.

    Raises:
        ValueError: They are gone, were prepared with other settings, or are damaged.
    """
    prepared = Prepared.open(config)
    if prepared is None:
        raise other_data(run, config.prepared, "nmt")
    return prepared


def relevant(config: DataConfig) -> dict[str, Any]:
    """The settings that prepared data depend on, as JSON would give them back."""
    return config.model_dump(mode="json", exclude=_IRRELEVANT)


def _holds(settings: dict[str, Any], config: DataConfig) -> bool:
    """Whether these settings give what is asked for, if only because the pieces are the same."""
    asked = relevant(config)
    if settings == asked:
        return True
    given, rest = config.vocabulary.model, {"vocabulary": None}
    if given is None or not given.is_file() or {**settings, **rest} != {**asked, **rest}:
        return False
    wanted = extend(given.read_bytes(), config.all_languages())
    return wanted == (config.prepared / VOCABULARY).read_bytes()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what a folder was prepared from; empty if it is not prepared, or half-way.

    Raises:
        ValueError: It is damaged.
    """
    path = folder / MANIFEST
    manifest = read_facts(path)
    if path.exists() and not manifest.keys() >= _FACTS:
        raise ValueError(f"data.prepared: {path} is damaged, or of an older version; {_REMEDY}.")
    return manifest
