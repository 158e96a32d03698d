"""Preparing data: text -> clean text -> vocabulary -> token files.

    PREPARED/text/SPLIT.PAIR.LANG       clean text, line by line
    PREPARED/tokens/SPLIT.PAIR.LANG.*   token files
    PREPARED/vocabulary.model           SentencePiece
    PREPARED/report.json                what was dropped and why
    PREPARED/manifest.json              what it was made from; written last, removed first

Every step leaves a small JSON file after its results, with a hash of what they depend on and a seal
on each (see `sealed.py`). Called again, `prepare` compares everything with its seal, and does what
is not there, damaged, or no longer holds. Before the first change the manifest goes: whoever is
killed half-way leaves a folder that is not taken for a prepared one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from gradvac.lab.recipes.nmt import cutting, doubts
from gradvac.lab.recipes.nmt.cleaning import (
    Report,
    clean,
    fingerprint,
    keep_readable,
    letters,
    tell_dropped,
)
from gradvac.lab.recipes.nmt.data_settings import DEV, TRAIN, DataConfig
from gradvac.lab.recipes.nmt.prepared import (
    MANIFEST,
    REPORT,
    VOCABULARY,
    Prepared,
    read_manifest,
    relevant,
)
from gradvac.lab.recipes.nmt.readers import Line, files_of, mostly_readable, read_pairs
from gradvac.lab.recipes.nmt.sealed import (
    Seal,
    is_intact,
    read_columns,
    read_facts,
    read_lines,
    sealing,
    stamp,
    write_columns,
    write_facts,
)
from gradvac.lab.recipes.nmt.tokens import shard_name
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary, draw_lines, extend, learn
from gradvac.lab.runs import files, other_settings
from gradvac.tasks import parse

Say = Callable[[str], None]
Facts = dict[str, Any]


def prepare(config: DataConfig, *, say: Say = print, only_if_none: bool = False) -> Prepared:
    """Prepare the data of a config, or what is missing of it.

    Args:
        config: [data].
        say: Told what is being done.
        only_if_none: Leave alone what another process prepared while this one waited for it.

    Raises:
        ValueError: A file is missing or damaged, or nothing is left of a language.
    """
    Prepared.require_places(config)
    for name in ("text", "tokens"):
        (config.prepared / name).mkdir(parents=True, exist_ok=True)
    with files.FolderLock(config.prepared, busy=None):  # which refuses links
        if not (only_if_none and Prepared.open(config) is not None):
            for folder in (config.prepared, config.prepared / "text", config.prepared / "tokens"):
                files.remove_leftovers(folder)
            _Preparation(config, say).run()
    prepared = Prepared.open(config)
    assert prepared is not None
    return prepared


def open_or_prepare(config: DataConfig, *, say: Say = print) -> Prepared:
    """Open prepared data; prepare them first if the folder holds none.

    Raises:
        ValueError: It holds what was prepared with other settings. Another run may need that, so
            that only `prepare` itself replaces it.
    """
    prepared = Prepared.open(config)
    if prepared is not None:
        for warning in prepared.doubts:
            say(warning)
        return prepared
    settings = read_manifest(config.prepared).get("settings", {})
    changed = [f"data.{key}" for key, new in relevant(config).items() if settings.get(key) != new]
    if settings:
        raise other_settings(config.prepared, changed, "nmt")
    prepared = prepare(config, say=say, only_if_none=True)
    tell_dropped(prepared.reports(), say)
    return prepared


class _Preparation:
    def __init__(self, config: DataConfig, say: Say) -> None:
        self.config, self.say, self.folder = config, say, config.prepared
        self.pairs, self.sources = config.all_pairs(), config.sources()
        self.texts: dict[tuple[str, str], Facts] = {}  # (split, pair) -> facts
        self.seals: dict[str, Seal] = {}  # of all files

    def run(self) -> None:
        splits = sorted(self.sources, key=lambda split: split == TRAIN)
        for split in splits:  # training text last: it must not hold what is held out
            for pair in self.pairs:
                self.texts[split, pair] = self.clean_text(split, pair)
        vocabulary, digest = self.learn_vocabulary()
        tokens = {key: self.cut_into_tokens(*key, vocabulary, digest) for key in self.texts}
        reports = {key: self.report(*key, tokens[key]) for key in self.texts}
        names = [(split, pair) for split in self.sources for pair in self.pairs]
        self.write_manifest(
            {" ".join(key): reports[key].to_dict() for key in names},
            sizes={
                split: {pair: reports[split, pair].num_kept for pair in self.pairs}
                for split in self.sources
            },
            signature=files.hash_of([tokens[key]["key"] for key in sorted(tokens)]),
            doubts=[*filter(None, (self.texts[key]["doubt"] for key in names)), *self.doubt_sets()],
            shards={".".join(key): facts["shards"] for key, facts in tokens.items()},
        )

    def write_manifest(self, reports: Facts, **facts: Any) -> None:
        """Declare the folder complete; nothing is written where nothing changed."""
        path = self.folder / REPORT
        if files.hash_of(files.read_json(path)) != files.hash_of(reports):
            self.begin_change()
            files.write_json(path, reports)
        self.seals[REPORT] = {"size": path.stat().st_size, "hash": files.hash_file(path)}
        seals = {
            name: {**seal, "stamp": stamp(self.folder / name)}
            for name, seal in sorted(self.seals.items())
        }
        manifest = {"settings": relevant(self.config), **facts, "files": seals}
        if read_facts(self.folder / MANIFEST) != manifest:
            write_facts(self.folder / MANIFEST, manifest)

    def begin_change(self) -> None:
        """Mark the folder as unprepared until the manifest is written."""
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def holds(self, facts: Facts, key: str) -> bool:
        """Whether the files of a step are those it would write again; remembers their seals."""
        seals = facts.get("files", {})
        if facts.get("key") != key or not all(
            is_intact(self.folder / name, seal) for name, seal in seals.items()
        ):
            return False
        self.seals |= seals
        return True

    def clean_text(self, split: str, pair: str) -> Facts:
        """Clean the text of a pair."""
        done = self.folder / "text" / f"{split}.{pair}.json"
        before, sources = read_facts(done), self.config.sources_of(split, pair)
        hashes = self.hash_files(sources, pair, before.get("sources", {}))
        depends: list[Any] = [sources, [file["hash"] for file in hashes.values()]]
        if self.config.columns:
            depends.append(self.config.columns)
        if split == TRAIN:
            held_out = [text["digest"] for (s, _), text in self.texts.items() if s != TRAIN]
            depends += [self.config.cleaning.model_dump(), self.config.limit_of(pair), held_out]
        key = files.hash_of(depends)
        # What comes from no file of ours has no hash: it is read again, and compared afterwards.
        if hashes and self.holds(before, key):
            return self.doubting(before)
        self.begin_change()
        done.unlink(missing_ok=True)
        self.say(f"Cleaning {split} {pair}")
        report, sample = Report(), list[tuple[str, str]]()
        paths = self.paths("text", split, pair)
        digest, seals = write_columns(paths, doubts.sampled(self.kept(split, pair, report), sample))
        report.refuse_empty(f"{split} {pair}")
        doubt = doubts.of_languages(*parse(pair), sample)
        facts: Facts = {
            "key": key,
            "digest": digest,
            "sources": hashes,
            "report": report.to_dict(),
            "doubt": doubt and f"warning: {split} {pair}: {doubt}",
            "files": self.named(seals),
        }
        self.seals |= facts["files"]
        write_facts(done, facts)
        return self.doubting(facts)

    def doubting(self, facts: Facts) -> Facts:
        if facts["doubt"]:
            self.say(facts["doubt"])
        return facts

    def doubt_sets(self) -> Iterator[str]:
        for split, pair in self.texts:
            if split not in (TRAIN, DEV):
                places = [self.paths("text", name, pair) for name in (split, DEV)]
                if doubt := doubts.shared(f"{split} {pair}", *places):
                    self.say(doubt)
                    yield doubt

    def named(self, seals: dict[Path, Seal]) -> dict[str, Seal]:
        return {path.relative_to(self.folder).as_posix(): seal for path, seal in seals.items()}

    def kept(self, split: str, pair: str, report: Report) -> Iterator[tuple[str, str]]:
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
                yield from mostly_readable(pairs, f"{source!r} for {pair}")

        if split != TRAIN:
            return keep_readable(lines(), report)
        marks = self.held_out_marks
        return clean(
            lines(),
            self.config.cleaning,
            report,
            held_out=(marks[first], marks[second]),
            limit=self.config.limit_of(pair),
            processes=self.config.processes,
            engine=self.config.engine,
        )

    def paths(self, what: str, split: str, pair: str) -> list[Path]:
        return [self.folder / what / f"{split}.{pair}.{code}" for code in parse(pair)]

    def hash_files(self, sources: Iterable[str], pair: str, known: Facts) -> Facts:
        """Hash the files of a pair, unless size and time say that they are as before."""
        first, second = parse(pair)
        hashes: Facts = {}
        for source in sources:
            paths = files_of(source, first, second, root=self.config.root)
            if not paths:
                return {}
            for path in paths:
                mark = stamp(path)
                is_known = known.get(str(path), {}).get("stamp") == mark
                digest = known[str(path)]["hash"] if is_known else files.hash_file(path)
                hashes[str(path)] = {"stamp": mark, "hash": digest}
        return hashes

    @cached_property
    def held_out_marks(self) -> dict[str, set[int]]:
        """Fingerprints of the held-out sentences of every language, of all pairs together."""
        marks = {code: set[int]() for code in self.config.all_languages()}
        for split, pair in self.texts:
            for path in self.paths("text", split, pair) if split != TRAIN else ():
                language = marks[path.name.rpartition(".")[2]]
                language.update(fingerprint(letters(line)) for line in read_lines(path))
        return marks

    def learn_vocabulary(self) -> tuple[Vocabulary, str]:
        """Learn the vocabulary from the training text of all languages, or take the given one."""
        config, path = self.config.vocabulary, self.folder / VOCABULARY
        done = path.with_suffix(".json")
        languages = self.config.all_languages()
        digests = [self.texts[TRAIN, pair]["digest"] for pair in self.pairs]
        key = files.hash_of([config.model_dump(exclude={"model"}), languages, digests])
        given = config.given()
        if given:
            key = files.hash_of([hashlib.blake2b(given).hexdigest(), languages])
        facts = read_facts(done)
        if not self.holds(facts, key):
            self.begin_change()
            done.unlink(missing_ok=True)
            size = f"{config.size:,} pieces"
            self.say(f"Taking {config.model}" if given else f"Learning a vocabulary of {size}")
            with sealing(path) as file:
                file.write(
                    extend(given, languages)
                    if given
                    else learn(self.vocabulary_lines(), languages, config)
                )
            facts = {"key": key, "files": self.named({path: file.seal(path)})}
            self.seals |= facts["files"]
            write_facts(done, facts)
        vocabulary = Vocabulary.load(path)
        if len(vocabulary) < config.size and not given:
            self.say(
                f"data.vocabulary.size = {config.size:,} was asked for, but the text gives only "
                f"{len(vocabulary):,} pieces; continuing with those."
            )
        return vocabulary, self.seals[VOCABULARY]["hash"]

    def vocabulary_lines(self) -> Iterator[str]:
        """Training text of all languages, in the proportions of the temperature."""
        texts: dict[str, list[Path]] = {code: [] for code in self.config.all_languages()}
        for pair in self.pairs:
            for path in self.paths("text", TRAIN, pair):
                texts[path.name.rpartition(".")[2]].append(path)
        return draw_lines(texts, self.config.vocabulary)

    def cut_into_tokens(self, split: str, pair: str, vocabulary: Vocabulary, digest: str) -> Facts:
        """Cut the text of a pair into tokens, and drop training pairs with too many."""
        text = self.texts[split, pair]
        num = cutting.num_shards(text["report"]["kept"])
        most = self.config.max_tokens if split == TRAIN else None
        names = [shard_name(f"{split}.{pair}", shard, num) for shard in range(num)]
        places = [self.folder / "tokens" / f"{name}.json" for name in names]
        depends = [text["digest"], digest, most]
        keys = [files.hash_of([*depends, *([num, n] if num > 1 else [])]) for n in range(num)]
        facts_by_shard = [read_facts(place) for place in places]
        pairs = zip(facts_by_shard, keys, strict=True)
        intact = [self.holds(facts, key) and "sizes" in facts for facts, key in pairs]
        if not all(intact):
            self.begin_change()
        lines = read_columns(self.paths("text", split, pair))
        for shard, (name, place) in enumerate(zip(names, places, strict=True)):
            if all(intact[shard:]):
                break
            block = islice(lines, cutting.SHARD if num > 1 else None)
            if intact[shard]:
                deque(block, maxlen=0)
                continue
            place.unlink(missing_ok=True)
            self.say(f"Cutting {name.replace('.', ' ', 1)} into tokens")
            paths = [self.folder / "tokens" / f"{name}.{code}" for code in parse(pair)]
            cut = cutting.cut(
                block,
                paths,
                vocabulary,
                most=most,
                processes=self.config.processes,
                engine=self.config.engine,
            )
            facts: Facts = {"key": keys[shard], "report": cut.report.to_dict(), "sizes": cut.sizes}
            facts["files"] = self.named(cut.seals)
            self.seals |= facts["files"]
            write_facts(place, facts)
            facts_by_shard[shard] = facts
        return {
            "key": keys[0] if num == 1 else files.hash_of(keys),
            "reports": [of_shard["report"] for of_shard in facts_by_shard],
            "shards": [of_shard["sizes"] for of_shard in facts_by_shard],
        }

    def report(self, split: str, pair: str, tokens: Facts) -> Report:
        """What became of a pair, from reading to tokens."""
        report = Report.from_dict(self.texts[split, pair]["report"])
        for later in map(Report.from_dict, tokens["reports"]):
            report.drop_later(later)
        report.refuse_empty(f"{split} {pair}")
        return report
