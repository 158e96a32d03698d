"""Token files give back what was written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gradvac.lab.recipes.nmt import TokenFile, TokenWriter

SENTENCES = [[5, 6, 7], [], [65_000], [1, 2]]


def write(path: Path, vocabulary_size: int) -> TokenFile:
    with TokenWriter(path, vocabulary_size) as writer:
        writer.write(SENTENCES[:2])
        writer.write(SENTENCES[2:])
    return TokenFile(path, vocabulary_size)


@pytest.mark.parametrize(("vocabulary_size", "width"), [(65_536, 2), (65_537, 4)])
def test_round_trip(tmp_path: Path, vocabulary_size: int, width: int) -> None:
    file = write(tmp_path / "x", vocabulary_size)
    assert [file.gather(np.array([n])).tokens.tolist() for n in range(len(file))] == SENTENCES
    assert file.lengths(np.arange(4)).tolist() == [3, 0, 1, 2]
    assert (tmp_path / "x.bin").stat().st_size == 6 * width
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.offsets.npy"]


def test_gather_reads_many_in_any_order(tmp_path: Path) -> None:
    file = write(tmp_path / "x", 65_000)
    found = file.gather(np.array([3, 1, 0, 3]))
    assert found.tokens.tolist() == [1, 2, 5, 6, 7, 1, 2]
    assert found.lengths.tolist() == [2, 0, 3, 2]


def test_an_empty_file_has_no_sentence(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "x", 100):
        pass
    assert len(TokenFile(tmp_path / "x", 100)) == 0


def write_and_fail(path: Path) -> None:
    with TokenWriter(path, 100) as writer:
        writer.write(SENTENCES[:1])
        assert not path.with_suffix(".bin").exists()
        raise KeyboardInterrupt


def test_nothing_appears_under_its_name_before_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(tmp_path / "x")
    assert not (tmp_path / "x.bin").exists()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", 100)
    with (tmp_path / "x.bin").open("ab") as file:
        file.write(b"zz")
    with pytest.raises(ValueError, match=r"14 bytes .*12.*prepare"):
        TokenFile(tmp_path / "x", 100)


def test_a_file_that_changes_while_it_is_used_is_told(tmp_path: Path) -> None:
    """Cut short, the process would die of SIGBUS; other tokens would be trained on in silence."""
    for number, size in enumerate((0, 12)):
        file = write(tmp_path / f"{number}", 100)
        path = tmp_path / f"{number}.bin"
        before = path.stat().st_mtime_ns
        path.write_bytes(bytes(size))
        os.utime(path, ns=(before, before + 1))
        with pytest.raises(ValueError, match=rf"{number}.bin was changed .*prepare"):
            file.gather(np.arange(2))
