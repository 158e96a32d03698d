"""Build the real data sets from checkouts of their public sources, and check them.

    python docs/data/build.py build SOURCES DATA        # what can be built; then it is checked
    python docs/data/build.py check DATA                # files that are there already

SOURCES/OWNER/NAME is a checkout of that GitHub repository at the commit that docs/data.md names
(`git clone https://github.com/OWNER/NAME && git checkout COMMIT`). sha256.txt has the checksum of
every file's text, unpacked. A file that comes out otherwise is reported and the exit status is 1,
as it is if nothing could be built.
"""

from __future__ import annotations

import argparse
import errno
import gzip
import hashlib
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
Files = Iterator[tuple[str, str]]  # name below DATA, without .gz -> text
Sentence = tuple[str, ...]  # its lines


def _named(pairs: str) -> dict[str, str]:
    """ "a=b c=d" as a dictionary."""
    return dict(pair.split("=") for pair in pairs.split())


NTREX = _named(
    "be=bel bg=bul cs=ces de=deu es=spa et=est fi=fin fr=fra gu=guj hi=hin id=ind kk=kaz ky=kir "
    "lt=lit lv=lav mk=mkd mr=mar ms=msa ne=nep pl=pol ru=rus sw=swa tr=tur uk=ukr xh=xho zu=zul"
)
LAST_DOCUMENT = "rt.com.91335"
BIBLES = _named(
    "en=eng-engbsb de=deu-deu1912 da=dan-dan1931 es=spa-spaRV1909 it=ita-ita1927 cs=ces-ces1613 "
    "hr=hrv-hrv he=heb-heb sw=swh-swhonen sn=sna-sna nd=nde-nde tdx=tdx-tdx ha=hau-hausa"
)
TESTAMENTS = BIBLES | _named(
    "uk=ukr-ukronpu pl=pol-polsz hu=hun-hun id=ind-ind ro=ron-ronlsb bgc=bgc-bgc bfz=bfz-bfz"
)
TREEBANKS = _named(
    "ar=Arabic-PUD bg=Bulgarian-BTB de=German-GSD en=English-EWT es=Spanish-GSD fr=French-GSD "
    "hi=Hindi-PUD hu=Hungarian-Szeged mr=Marathi-UFAL ta=Tamil-TTB te=Telugu-MTG vi=Vietnamese-VTB"
)
DEV_ONLY = ("bg", "de", "es", "fr")  # the treebank's development part is cut into train and dev
WIKIANN = "Babelscape/wikineural/data/wikiann/{}/{{}}.conllu"
ENTITIES = {  # language -> its files, and what stands in their names for train, dev and test
    "de": (WIKIANN.format("de"), ("train", "val", "test")),
    "en": (WIKIANN.format("en"), ("train", "val", "test")),
    "es": (WIKIANN.format("es"), ("train", "val", "test")),
    "hi": ("SankalpBahad/IL-NER/Datasets/Hindi/Hindi-{}.txt", ("train", "dev", "test")),
    "te": ("SankalpBahad/IL-NER/Datasets/Telugu/Telugu-{}.txt", ("train", "dev", "test")),
    "kk": ("IS2AI/KazNERD/KazNERD/IOB2_{}.txt", ("valid", "valid", "test")),
    "mr": ("l3cube-pune/MarathiNLP/L3Cube-MahaNER/IOB/{}_iob.txt", ("valid", "valid", "test")),
    "id": (
        "indobenchmark/indonlu/dataset/nergrit_ner-grit/{}_preprocess.txt",
        ("train", "train", "valid"),
    ),
    "sw": (
        "masakhane-io/masakhane-ner/transfer_corpus/panx/{}.txt",
        ("sw/train", "sw/dev", "swa/test"),
    ),
    "yo": (
        "masakhane-io/masakhane-ner/transfer_corpus/panx/{}.txt",
        ("yo/train", "yor/dev", "yo/test"),
    ),
}
LAST_FOR_DEV = {"kk": 1000, "mr": 200, "id": 150}  # of a file that is cut into train and dev
CLASSES = _named(
    "PER=PER PERSON=PER NEP=PER LOC=LOC GPE=LOC LOCATION=LOC FACILITY=LOC NEL=LOC PLACE=LOC "
    "ORG=ORG ORGANISATION=ORG NEO=ORG"
)


def clean(line: str) -> str:
    """NFC, and single spaces."""
    return " ".join(unicodedata.normalize("NFC", line).split())


def lines_of(path: Path) -> list[str]:
    """Lines by line feeds alone: verses may hold other separators."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def ntrex(sources: Path) -> Files:
    """The first documents, without English lines that were there before."""
    folder = sources / "MicrosoftTranslator" / "NTREX"
    documents = [line.split("\t")[0] for line in lines_of(folder / "DOCUMENT_IDS.tsv")]
    texts = {"en": "newstest2019-src.eng.txt"}
    texts |= {code: f"newstest2019-ref.{name}.txt" for code, name in NTREX.items()}
    lines = {code: lines_of(folder / "NTREX-128" / name) for code, name in texts.items()}
    end = len(documents) - documents[::-1].index(LAST_DOCUMENT)
    english = [clean(line) for line in lines["en"][:end]]
    kept = [n for n, line in enumerate(english) if line not in english[:n]]
    for code, own in lines.items():
        yield f"mt/ntrex/eval.{code}", joined(clean(own[n]) for n in kept)
    yield "mt/ntrex/eval.docid", joined(documents[n] for n in kept)


def bible(sources: Path, name: str, texts: Mapping[str, str]) -> Files:
    """The verses of verses.json, which lists chapters with their verses."""
    folder = sources / "BibleNLP" / "ebible"
    places = {verse: n for n, verse in enumerate(lines_of(folder / "metadata" / "vref.txt"))}
    splits = json.loads((HERE / "verses.json").read_text(encoding="utf-8"))[name]
    verses = {split: list(listed(chapters)) for split, chapters in splits.items()}
    for code, text in texts.items():
        lines = lines_of(folder / "corpus" / f"{text}.txt")
        for split, own in verses.items():
            chosen = (clean(lines[places[verse]]) for verse in own)
            yield f"mt/{name}/{split}.{code}", joined(chosen)
    for split, own in verses.items():
        yield f"mt/{name}/{split}.vref", joined(own)


DIGEST = 6  # bytes


def digest(line: str) -> bytes:
    """What tatoeba.lines has of a line."""
    return hashlib.blake2b(line.encode("utf-8"), digest_size=DIGEST).digest()


def digests() -> dict[str, list[bytes]]:
    """The digest of every line by file: tatoeba.lines has them all after a first line of counts."""
    counts, _, joint = (HERE / "tatoeba.lines").read_bytes().partition(b"\n")
    every = [joint[start : start + DIGEST] for start in range(0, len(joint), DIGEST)]
    found, start = {}, 0
    for name, count in json.loads(counts).items():
        found[name] = every[start : start + count]
        start += count
    return found


def tatoeba(sources: Path) -> Files:
    """Pairs of all development and test files, chosen and put in order by their digests."""
    folder = sources / "Helsinki-NLP" / "Tatoeba-Challenge" / "data"
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    wanted = digests()
    texts = dict.fromkeys(one for of_file in wanted.values() for one in of_file)
    for part in ("dev", "test", "devtest", "release/dev", "release/test"):
        for path in sorted((folder / part).rglob("*.txt*")):
            for line in pairs(path):
                key = digest(line)
                if key in texts:
                    texts[key] = line
    for name, of_file in wanted.items():
        lines = [line for key in of_file if (line := texts[key])]
        if missing := len(of_file) - len(lines):
            sys.stdout.write(f"{folder}: lacks {missing} lines of {name}; is it at our commit?\n")
        yield f"mt/tatoeba/{name}", joined(lines)


def pairs(path: Path) -> Iterator[str]:
    """The lines of a file with English, which comes first; each begins with both languages."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    for line in content.decode("utf-8").split("\n"):
        cells = line.split("\t")
        if len(cells) == 4 and "eng" in cells[:2]:
            texts = [clean(text) for text in cells[2:]]
            yield "\t".join(texts if cells[0] == "eng" else texts[::-1])


def listed(chapters: Mapping[str, str]) -> Iterator[str]:
    """{"GEN 1": "1-3,5"} -> "GEN 1:1", ..."""
    for chapter, ranges in chapters.items():
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            yield from (f"{chapter}:{n}" for n in range(int(first), int(last or first) + 1))


def sentences(path: Path) -> list[Sentence]:
    """Blocks of lines."""
    text = path.read_text(encoding="utf-8")
    return [tuple(block.split("\n")) for block in text.strip("\n").split("\n\n") if block.strip()]


def words(sentence: Sentence) -> tuple[str, ...]:
    """The forms of a tree."""
    rows = (line.split("\t") for line in sentence if not line.startswith("#"))
    return tuple(row[1] for row in rows)


def without_leaks(
    parts: Sequence[Sequence[Sentence]], keys: Sequence[Sequence[tuple[str, ...]]]
) -> list[list[Sentence]]:
    """Train without repeats and what is in dev or test, dev without what is in test, and test."""
    (train, dev, test), (train_keys, dev_keys, test_keys) = parts, keys
    taken = set(test_keys)
    kept_dev = [one for one, key in zip(dev, dev_keys, strict=True) if key not in taken]
    taken |= set(dev_keys)
    kept = []
    for one, key in zip(train, train_keys, strict=True):
        if key not in taken:
            kept.append(one)
            taken.add(key)
    return [kept, kept_dev, list(test)]


def pos(sources: Path, code: str) -> Files:
    """A treebank: official parts, or the development part cut, or one file by position."""
    treebank = TREEBANKS[code]
    folder = sources / "UniversalDependencies" / f"UD_{treebank}"
    stem = f"{code}_{treebank.partition('-')[2].lower()}-ud"
    if treebank.endswith("-PUD"):
        every = sentences(folder / f"{stem}-test.conllu")
        test, dev = [every[n] for n in range(len(every)) if n % 10 < 2], every[2::10]
        train = [every[n] for n in range(len(every)) if n % 10 > 2]
    else:
        dev, test = (sentences(folder / f"{stem}-{part}.conllu") for part in ("dev", "test"))
        if code in DEV_ONLY:
            cut = len(dev) - len(dev) // 10
            train, dev = dev[:cut], dev[cut:]
        else:
            train = sentences(folder / f"{stem}-train.conllu")
    parts = [train, dev, test]
    kept = without_leaks(parts, [[words(one) for one in part] for part in parts])
    for split, part in zip(("train", "dev", "test"), kept, strict=True):
        yield f"pos/{code}/{split}.conllu", "".join(joined((*one, "")) for one in part)


def tagged(sentence: Sequence[str]) -> Sentence:
    """Lines TOKEN<TAB>TAG with PER, LOC and ORG, every entity beginning with B-."""
    made, before = [], "O"
    for line in sentence:
        cells = line.split()
        place, _, name = cells[-1].partition("-")
        kind = CLASSES.get(name, "")
        starts = place == "B" or before != kind
        made.append(f"{cells[0]}\t{('B-' if starts else 'I-') + kind if kind else 'O'}")
        before = kind
    return tuple(made)


def tagalog(sources: Path) -> list[list[Sentence]]:
    """Both files, one after the other, cut by position; columns number, token, tag, others."""
    folder, every = sources / "UniversalNER", list[Sentence]()
    for name in ("TRG", "Ugnayan"):
        for one in sentences(folder / f"UNER_Tagalog-{name}" / f"tl_{name.lower()}-ud-test.iob2"):
            rows = [line.split("\t") for line in one if not line.startswith("#")]
            every.append(tagged([f"{row[1]} {row[2]}" for row in rows]))
    splits = ((2, 3, 4, 7, 8, 9), (1,), (0, 5, 6))
    return [[one for n, one in enumerate(every) if n % 10 in split] for split in splits]


def ner(sources: Path, code: str) -> Files:
    """The entities of a language."""
    if code == "tl":
        parts = tagalog(sources)
    else:
        place, names = ENTITIES[code]
        files = [sources / place.format(name) for name in names]
        parts = [[tagged(one) for one in sentences(path)] for path in files]
    if code in LAST_FOR_DEV:
        cut = len(parts[0]) - LAST_FOR_DEV[code]
        parts[:2] = parts[0][:cut], parts[1][cut:]
    keys = [[tuple(x.split("\t")[0] for x in one) for one in part] for part in parts]
    for split, part in zip(("train", "dev", "test"), without_leaks(parts, keys), strict=True):
        yield f"ner/{code}/{split}.tsv", "".join(joined((*one, "")) for one in part)


def checksums() -> dict[str, str]:
    """File -> the checksum of its text."""
    rows = (line.split("  ") for line in lines_of(HERE / "sha256.txt"))
    return {name: checksum for checksum, name in rows}


def check(data: Path, names: Iterable[str]) -> list[str]:
    """What is wrong with some files; an empty list if nothing is."""
    known, wrong = checksums(), []
    for name in names:
        path = data / f"{name}.gz"
        if not path.is_file():
            wrong.append(f"{path}: is missing")
        elif hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest() != known[name]:
            wrong.append(f"{path}: differs from the file that the results were made with")
    return wrong


def build(sources: Path, data: Path) -> list[str]:
    """Write what the sources allow; the names of the files."""
    jobs = [tatoeba(sources), ntrex(sources), bible(sources, "bible_full", BIBLES)]
    jobs += [bible(sources, "bible_nt", TESTAMENTS), *(pos(sources, code) for code in TREEBANKS)]
    jobs += [ner(sources, code) for code in (*ENTITIES, "tl")]
    names = []
    for job in jobs:
        try:
            made = dict(job)
        except FileNotFoundError as error:
            sys.stdout.write(f"{error.filename}: is not there, so its files are not built\n")
            continue
        for name, text in made.items():
            path = data / f"{name}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
        names += made
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write what the sources allow, and check it")
    checking = commands.add_parser("check", help="compare all files with their checksums")
    building.add_argument("sources", type=Path, help="folder of checkouts, OWNER/NAME")
    for command in (building, checking):
        command.add_argument("data", type=Path, help="folder of the data sets")
    given = parser.parse_args(arguments)
    building_it = given.command == "build"
    names = build(given.sources, given.data) if building_it else list(checksums())
    wrong = check(given.data, names)
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.stdout.write(f"{len(names) - len(wrong)} of {len(names)} files are as they should be.\n")
    raise SystemExit(bool(wrong) or not names)


if __name__ == "__main__":
    main()
