"""Export of a corpus as plain files, for any trainer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from gradvac.lab.languages._corpus import Corpus
from gradvac.lab.languages._pivot import PIVOT
from gradvac.lab.languages._tree import SPLITS

MANIFEST = "languages.json"
_GENERATOR = "gradvac.lab.languages"


def write(corpus: Corpus, directory: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write a corpus as text files.

    `train.en-xx.tsv` holds English and the language, tab between them; `dev.xx`, `test.xx`,
    `eval.xx` and `novel.xx` hold one sentence a line, and line i of a split is the same meaning in
    every language, English included. `languages.json` holds the facts and the distances. The files
    appear all at once in a new directory; in an existing one each appears whole or not at all, the
    manifest last.

    Args:
        corpus: What to write.
        directory: Where to; made if missing.
        overwrite: Write into a directory with files that this function did not write. Only files
            of the names above are replaced.

    Returns:
        The written files.

    Raises:
        ValueError: The directory holds something else and `overwrite` is not set.
    """
    directory = Path(directory)
    stale = _previous(directory, overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        names = _write_all(corpus, staging)
        if not directory.exists() or not any(directory.iterdir()):
            staging.chmod(0o755)
            os.replace(staging, directory)
        else:
            # Without its manifest, a directory that is half replaced does not pass for a whole one.
            (directory / MANIFEST).unlink(missing_ok=True)
            for name in names:
                os.replace(staging / name, directory / name)
            for name in stale - set(names):
                (directory / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [directory / name for name in names]


def _previous(directory: Path, overwrite: bool) -> set[str]:
    """The files of an earlier export; a directory that is not one is refused."""
    if not directory.exists():
        return set()
    if not directory.is_dir():
        raise ValueError(f"directory {directory}: is a file; give a new or empty directory")
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["generator"] == _GENERATOR:
            # Names only: a manifest that was tampered with must not delete files elsewhere.
            return {name for name in manifest["files"] if Path(name).name == name}
    except (OSError, ValueError, TypeError, KeyError):
        pass
    if any(directory.iterdir()) and not overwrite:
        raise ValueError(
            f"directory {directory}: is not empty and not an earlier export; give a new directory "
            "(in a program, overwrite=True writes beside what is there)"
        )
    return set()


def _write_all(corpus: Corpus, directory: Path) -> list[str]:
    names = []
    for code in corpus.codes:
        names.append(f"train.{PIVOT}-{code}.tsv")
        pairs = ("\t".join(pair) for pair in corpus.pairs(code, "train"))
        _write_lines(directory / names[-1], pairs)
    for split in SPLITS:
        for code, lines in corpus.aligned(split).items():
            names.append(f"{split}.{code}")
            _write_lines(directory / names[-1], lines)
    names.append(MANIFEST)
    facts = json.dumps(describe(corpus) | {"files": names}, ensure_ascii=False, indent=1)
    _write_lines(directory / MANIFEST, [facts])
    return names


def describe(corpus: Corpus) -> dict[str, object]:
    """The facts about a corpus, ready for JSON: languages, sizes and distances."""
    languages = {code: asdict(language) for code, language in corpus.languages.items()}
    distances = corpus.distances()
    return {
        "generator": _GENERATOR,
        "seed": corpus.tree.seed,
        "pivot": PIVOT,
        "splits": dict(corpus.tree.splits),
        "resource_levels": dict(corpus.tree.thresholds),
        "languages": languages,
        "distances": {
            "codes": list(distances.codes),
            "cognates": distances.cognates.round(6).tolist(),
            "typology": distances.typology.round(6).tolist(),
            "distance": distances.distance.round(6).tolist(),
        },
    }


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
