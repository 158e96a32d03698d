"""Prepared data that are not what was written are told of, and mended by `prepare`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.recipes.nmt import (
    DataConfig,
    NmtConfig,
    Prepared,
    open_or_prepare,
    prepare,
    sealed,
)

Build = Callable[..., NmtConfig]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that training and scoring read."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if path.suffix != ".json" and path.name not in (".lock", ".verified.jsonl")
    }


def use(config: DataConfig) -> None:
    """Read all that training and scoring read."""
    prepared = Prepared.open(config)
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


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_and_mended(toy_config: Build, name: str) -> None:
    config = toy_config().data
    prepare(config, say=lambda _: None)
    expected = contents(config.prepared)
    use(config)
    for harm in (remove, cut, empty, zero, flip, swap):
        harm(config.prepared / name, config.prepared / NAMES[name])
        with pytest.raises(ValueError, match=r"run `gradvac nmt prepare` again, which mends it"):
            use(config)
        prepare(config, say=lambda _: None)
        use(config)
        assert contents(config.prepared) == expected, harm


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe"])
def test_a_damaged_manifest_is_told_and_mended(toy_config: Build, content: bytes) -> None:
    config = toy_config().data
    whole = prepare(config, say=lambda _: None)
    path = config.prepared / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["sizes"]["train"]["en-xx"] += 1
    for damaged in (content, json.dumps(manifest).encode()):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged.*prepare"):
            open_or_prepare(config)
        assert prepare(config, say=lambda _: None).sizes == whole.sizes


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"key": 1, "files": 3}'])
def test_a_damaged_note_of_a_step_makes_the_step_again(toy_config: Build, content: bytes) -> None:
    config = toy_config().data
    prepare(config, say=lambda _: None)
    expected = contents(config.prepared)
    for name in ("text/train.en-xx.json", "tokens/dev.en-yy.json", "vocabulary.json"):
        (config.prepared / name).write_bytes(content)
    said: list[str] = []
    prepare(config, say=said.append)
    assert [line.split()[0] for line in said] == ["Cleaning", "Learning", "Cutting"]
    assert contents(config.prepared) == expected


@pytest.mark.parametrize("place", ["preparation.learn", "cutting.TokenWriter"])
def test_other_settings_killed_half_way_leave_no_prepared_data(
    toy_config: Build, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config = toy_config().data
    prepare(config, say=lambda _: None)
    expected = contents(config.prepared)

    def die(*args: object, **options: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"gradvac.lab.recipes.nmt.{place}", die)
    with pytest.raises(KeyboardInterrupt):
        prepare(toy_config(data={"limit": {"yy": 200}}).data, say=lambda _: None)
    monkeypatch.undo()
    assert Prepared.open(config) is None
    open_or_prepare(config, say=lambda _: None)
    use(config)
    assert contents(config.prepared) == expected


def test_a_copied_folder_is_read_through_once(
    toy_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config().data
    prepare(config, say=lambda _: None)
    hashed: list[Path] = []
    real = sealed.files.hash_file

    def hash_file(path: Path) -> str:
        hashed.append(path)
        return real(path)

    monkeypatch.setattr(sealed.files, "hash_file", hash_file)
    use(config)
    assert hashed == []  # a start costs a look at each file
    shutil.copytree(config.prepared, tmp_path / "copy")
    copied = config.model_copy(update={"prepared": tmp_path / "copy"})
    use(copied)
    assert len(hashed) == len(set(hashed)) == len(contents(copied.prepared)) + 1
    hashed.clear()
    use(copied)
    assert hashed == []


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
    prepare(config, say=lambda _: None)
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
