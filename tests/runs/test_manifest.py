"""One manifest of checksums for a folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.runs.manifest import MANIFEST, read_manifest, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inside").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "inside" / "b.txt").write_text("second")
    (tmp_path / ".lock").write_text("")
    write_manifest(tmp_path)
    return tmp_path


def test_all_files_are_listed_but_hidden_ones(folder: Path) -> None:
    assert list(read_manifest(folder)) == ["a.txt", "inside/b.txt"]
    assert read_manifest(folder)["a.txt"]["bytes"] == 5
    verify_manifest(folder)
    write_manifest(folder)
    assert MANIFEST not in read_manifest(folder)


def test_chosen_files(folder: Path) -> None:
    write_manifest(folder, ["a.txt"])
    assert list(read_manifest(folder)) == ["a.txt"]
    (folder / "inside" / "b.txt").unlink()
    verify_manifest(folder)
    with pytest.raises(ValueError, match=r"b\.txt .*manifest"):
        verify_manifest(folder, ["inside/b.txt"])


def change(path: Path) -> None:
    path.write_text("tsrif")


def cut_off(path: Path) -> None:
    path.write_text("fir")


@pytest.mark.parametrize("damage", [change, cut_off, Path.unlink])
def test_damage_is_an_error_that_names_the_file_and_the_remedy(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt .*prepare"):
        verify_manifest(folder, remedy="prepare it again")
    verify_manifest(folder, ["inside/b.txt"])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", json.dumps({"a.txt": 3}), json.dumps({"a.txt": {}})]
)
def test_damaged_manifest(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        verify_manifest(folder)


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        verify_manifest(tmp_path)
