"""The shared vocabulary: SentencePiece pieces of all languages, and a token for each target."""

from __future__ import annotations

import importlib
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from pydantic import Field

from gradvac.lab.recipes.nmt.cleaning import SeenFingerprints, fingerprint
from gradvac.lab.recipes.nmt.readers import read_written
from gradvac.lab.recipes.nmt.workers import chunks
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Section
from gradvac.sampling import task_probabilities

PAD, BOS, EOS, UNKNOWN = range(4)


class VocabularyConfig(Section):
    """[data.vocabulary]: SentencePiece, unigram model with byte fallback.

    Attributes:
        size: Pieces, everything included; a corpus with fewer gives fewer, and says so.
        temperature: Languages are drawn with P ~ (lines)^(1 / temperature), so that those with
            little data get pieces too.
        max_lines: Lines to learn from.
        character_coverage: Share of characters with a piece of their own; the others are bytes.
        normalization: Rule of SentencePiece: "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "identity", ...
        threads: To learn with. Other numbers can give other pieces.
        model: Take this SentencePiece model, such as that of another run, and learn nothing;
            languages it does not know get a token `<2xx>` after its last piece. Unset and with
            `model.init`: that run's.
    """

    size: int = Field(default=64_000, ge=300)
    temperature: float = Field(default=5.0, gt=0)
    max_lines: int = Field(default=5_000_000, ge=1)
    character_coverage: float = Field(default=0.9999, gt=0.9, le=1)
    normalization: str = "nmt_nfkc"
    threads: int = Field(default=4, ge=1)
    model: Path | None = None

    def given(self) -> bytes | None:
        """Read the model that was given; None if one is to be learned."""
        if self.model is None:
            return None
        Vocabulary.load(self.model)  # raises if it is not a vocabulary
        return self.model.read_bytes()


class Vocabulary:
    """Text to tokens and back.

    Args:
        model: A trained SentencePiece model, serialised.

    ```python
    vocabulary = Vocabulary.load("runs/demo/data/vocabulary.model")
    vocabulary.encode(["a small house"])
    ```
    """

    def __init__(self, model: bytes) -> None:
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        special = [getattr(self._pieces, f"{name}_id")() for name in ("pad", "bos", "eos", "unk")]
        if special != [PAD, BOS, EOS, UNKNOWN]:
            raise ValueError(
                f"vocabulary: padding, begin, end and unknown must be tokens 0 to 3, got {special};"
                " this is a SentencePiece model of something else."
            )
        self._tags = {
            piece[2:-1]: number
            for number, piece in enumerate(self.pieces())
            if piece.startswith("<2") and piece.endswith(">")
        }
        self._spelled = {number: self._bytes(f"<2{code}>") for code, number in self._tags.items()}

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a model file."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(
                f"vocabulary: there is no file {path}; run `gradvac nmt prepare` first."
            )
        return cls.parse(path.read_bytes(), path)

    @classmethod
    def of_run(cls, run: str | Path) -> Vocabulary:
        """Read the model that a run was trained with, which is verified."""
        folder = RunFolder(Path(run))
        return cls.parse(folder.read_saved(folder.vocabulary.name), folder.vocabulary)

    @classmethod
    def parse(cls, model: bytes, path: Path) -> Vocabulary:
        """The vocabulary in the contents of a file; an error names the file."""
        try:
            return cls(model)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"vocabulary: {path} is no SentencePiece model, or is damaged ({error})."
            ) from error

    def __len__(self) -> int:
        return int(self._pieces.get_piece_size())

    def pieces(self) -> list[str]:
        """All pieces, by number."""
        return [self._pieces.id_to_piece(number) for number in range(len(self))]

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that have a token `<2xx>`."""
        return tuple(self._tags)

    @property
    def unspeakable(self) -> list[int]:
        """Tokens that are never part of a translation."""
        return [PAD, BOS, UNKNOWN, *self._tags.values()]

    def tag(self, language: str) -> int:
        """The token that asks for a translation into a language."""
        if language not in self._tags:
            raise ValueError(
                f"target language: {language!r} is unknown; this model knows "
                f"{', '.join(self._tags)}."
            )
        return self._tags[language]

    def encode(self, lines: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Tokenise lines, without any special token.

        Where a text itself says `<2fr>`, that is text, and no request: it is spelled in bytes.
        """
        pieces: list[list[int]] = self._pieces.encode(list(lines), num_threads=threads)
        tags = self._spelled.keys()
        return [row if tags.isdisjoint(row) else self._without_tags(row) for row in pieces]

    def _without_tags(self, row: Sequence[int]) -> list[int]:
        return [part for token in row for part in self._spelled.get(token, [token])]

    def _bytes(self, text: str) -> list[int]:
        return [int(self._pieces.piece_to_id(f"<0x{byte:02X}>")) for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Join pieces into a line of text."""
        # A byte-fallback piece may stand for a line break; a translation is one line.
        return " ".join(str(self._pieces.decode(list(tokens))).split())


def learn(lines: Iterable[str], languages: Iterable[str], config: VocabularyConfig) -> bytes:
    """Learn a vocabulary.

    Returns:
        The serialised SentencePiece model.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            model_type="unigram",
            vocab_size=config.size,
            hard_vocab_limit=False,
            byte_fallback=True,
            user_defined_symbols=[f"<2{code}>" for code in languages],
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNKNOWN,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            num_threads=config.threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"data.vocabulary: SentencePiece could not learn {config.size} pieces: {error}"
        ) from error
    return written.getvalue()


def extend(model: bytes, languages: Iterable[str]) -> bytes:
    """Give languages that have none a token `<2xx>`, after all pieces that are there.

    Returns:
        The serialised model; the same one if nothing is missing.
    """
    missing = [code for code in languages if code not in Vocabulary(model).languages]
    if not missing:
        return model
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto.FromString(model)
    for code in missing:
        piece = proto.pieces.add()
        piece.piece, piece.score, piece.type = f"<2{code}>", 0.0, piece.USER_DEFINED
    extended: bytes = proto.SerializeToString()
    return extended


def draw_lines(texts: Mapping[str, Sequence[Path]], config: VocabularyConfig) -> Iterator[str]:
    """Draw lines to learn from, in the proportions that the temperature gives.

    A line counts once however often a language has it: a pivot has the same text in many pairs,
    which says nothing new, and SentencePiece takes quadratic time for a text that comes again.
    """
    is_new = {code: _first_times(paths) for code, paths in texts.items()}
    sizes = {code: sum(int(new.sum()) for new in by_file) for code, by_file in is_new.items()}
    total = min(sum(sizes.values()), config.max_lines)
    for code, chance in task_probabilities(sizes, config.temperature).items():
        lines = (
            line
            for path, new in zip(texts[code], is_new[code], strict=True)
            for line in itertools.compress(read_written(path), new)
        )
        yield from _spread(lines, sizes[code], max(1, round(total * chance)))


def _first_times(paths: Sequence[Path]) -> list[NDArray[np.bool_]]:
    """Whether each line of each file is the first of its kind."""
    seen, is_new = SeenFingerprints(), []
    for path in paths:
        new = [
            seen.add(np.fromiter(map(fingerprint, block), np.uint64, len(block)))
            for block in chunks(read_written(path))
        ]
        is_new.append(np.concatenate([np.zeros(0, dtype=np.bool_), *new]))
    return is_new


def _spread(lines: Iterable[str], size: int, wanted: int) -> Iterator[str]:
    """Draw lines evenly from `size` of them, each about `wanted / size` times."""
    for number, line in enumerate(lines):
        for _ in range(wanted * (number + 1) // size - wanted * number // size):
            yield line
