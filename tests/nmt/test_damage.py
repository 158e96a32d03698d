"""PreparedCorpus data that are not what was written are told of, and mended by `prepare`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.recipes.nmt import NmtConfig, PreparedCorpus, open_corpus, prepare_corpus
from gradvac.lab.recipes.nmt.settings import DataConfig
from gradvac.lab.runs import manifest
from gradvac.utils.hints import log_to

Build = Callable[..., NmtConfig]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that training and scoring read."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if path.suffix != ".json" and not path.name.endswith(".lock")
    }


def use(config: DataConfig) -> None:
    """Read all that training and scoring read."""
    prepared = PreparedCorpus.open(config)
    assert prepared is not None
    prepared.reports()
    for split, sizes in prepared.sizes.items():
        for pair in sizes:
            prepared.text(split, pair)
            prepared.tokens(split, pair)


def remove(path: Path, _: Path) -> None:
    path.unlink()


def cut(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, _: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path, _: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path, _: Path) -> None:
    """One bit, and the file's time as it was: only a look at the contents can tell."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap(path: Path, other: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


NAMES = {
    "text/train.en-xx.en": "text/train.en-xx.xx",
    "text/test.en-yy.yy": "text/dev.en-yy.yy",
    "tokens/train.en-xx.xx.bin": "tokens/train.en-xx.en.bin",
    "tokens/dev.en-yy.en.offsets.npy": "tokens/test.en-yy.en.offsets.npy",
    "vocabulary.model": "text/train.en-yy.yy",
    "report.json": "text/train.en-yy.en",
}


@pytest.mark.usefixtures("is_prepared")
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_and_mended(toy_config: Build, name: str) -> None:
    config = toy_config().data
    prepare_corpus(config)
    expected = contents(config.prepared)
    use(config)
    for harm in (remove, cut, empty, zero, flip, swap):
        harm(config.prepared / name, config.prepared / NAMES[name])
        with pytest.raises(ValueError, match="gradvac nmt prepare"):
            use(config)
        prepare_corpus(config)
        use(config)
        assert contents(config.prepared) == expected, harm


@pytest.mark.usefixtures("is_prepared")
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["prepared.json", "manifest.json"])
def test_a_damaged_manifest_is_refused_and_mended(
    toy_config: Build, name: str, content: bytes
) -> None:
    config = toy_config().data
    whole = prepare_corpus(config)
    path = config.prepared / "prepared.json"
    metadata = json.loads(path.read_bytes())
    metadata["sizes"]["train"]["en-xx"] += 1
    for damaged, where in ((content, name), (json.dumps(metadata).encode(), "prepared.json")):
        (config.prepared / where).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{where}.*prepare"):
            open_corpus(config)
        assert prepare_corpus(config).sizes == whole.sizes


@pytest.mark.usefixtures("is_prepared")
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"steps": {"vocabulary": {"key": 1}}}'])
def test_damaged_notes_make_the_steps_again(toy_config: Build, content: bytes) -> None:
    config = toy_config().data
    prepare_corpus(config)
    expected = contents(config.prepared)
    (config.prepared / "steps.json").write_bytes(content)
    said: list[str] = []
    with log_to(said.append):
        prepare_corpus(config)
    assert {line.split()[0] for line in said} == {"Cleaning", "Learning", "Tokenising"}
    assert contents(config.prepared) == expected


@pytest.mark.usefixtures("is_prepared")
@pytest.mark.parametrize("place", ["preparation.learn", "tokens.TokenWriter"])
def test_other_settings_killed_half_way_leave_no_prepared_data(
    toy_config: Build, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config = toy_config().data
    prepare_corpus(config)
    expected = contents(config.prepared)

    def die(*args: object, **options: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"gradvac.lab.recipes.nmt.{place}", die)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(toy_config(data={"limit": {"yy": 200}}).data)
    monkeypatch.undo()
    assert PreparedCorpus.open(config) is None
    open_corpus(config)
    use(config)
    assert contents(config.prepared) == expected


def test_a_copied_folder_is_read_through(
    toy_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config().data
    prepare_corpus(config)
    hashed: list[Path] = []

    def record(path: Path) -> manifest.Checksum:
        hashed.append(path)
        return checksum_file(path)

    checksum_file = manifest.checksum_file
    monkeypatch.setattr(manifest, "checksum_file", record)
    use(config)
    assert {path.name for path in hashed} == {"prepared.json"}  # a start looks at each file
    shutil.copytree(config.prepared, tmp_path / "copy")
    copied = config.model_copy(update={"prepared": tmp_path / "copy"})
    hashed.clear()
    use(copied)
    assert len(set(hashed)) == len(contents(copied.prepared)) + 2
    prepare_corpus(copied)
    hashed.clear()
    use(copied)
    assert {path.name for path in hashed} == {"prepared.json"}


def test_folders_may_be_links_and_linked_files_are_replaced(
    toy_config: Build, tmp_path: Path
) -> None:
    config = toy_config().data
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    config.prepared.mkdir()
    (config.prepared / "text").symlink_to(elsewhere)
    (tmp_path / "mine").write_text("mine")
    (config.prepared / "vocabulary.model").symlink_to(tmp_path / "mine")
    prepare_corpus(config)
    assert any(elsewhere.iterdir())
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("code", ["../x", "a/b", "..", ".", "", "a b", "a,b", "fr\n", "ü" * 3])
def test_odd_names_are_refused(toy_config: Build, code: str) -> None:
    for changes in (
        {"languages": [code], "limit": {}},
        {"languages": [], "pairs": [f"en-{code}"], "limit": {}},
        {"pivot": code},
        {"extra": {code: "dev.{pair}.tsv"}},
    ):
        with pytest.raises(ValueError, match=r"languages|pairs|extra"):
            toy_config(data=changes)
