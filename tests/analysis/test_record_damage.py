"""Damaged records: every chunk that is whole comes back, and what is missing is said."""

from __future__ import annotations

import io
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvac.analysis import Recorder, read_record
from gradvac.analysis.record import append_chunk, cut_record

from .test_record import TASKS, make_alignments, write


def read_with_losses(path: Path) -> tuple[list[int], list[str]]:
    """Steps of what comes back, and what the warnings say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = read_record(path).steps.tolist()
    return steps, [str(one.message).removeprefix(f"{path}: ") for one in caught]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    """A file of five chunks with two records each, and where its chunks begin and end."""
    path = tmp_path_factory.mktemp("whole") / "record.bin"
    write(path, make_alignments(10), chunk=2)
    content = path.read_bytes()
    borders = [match.start() for match in re.finditer(b"gradvac1", content)] + [len(content)]
    assert len(borders) == 6
    return content, borders


def flip(content: bytes, at: int, draw: random.Random) -> bytes:
    return content[:at] + bytes([content[at] ^ draw.randint(1, 255)]) + content[at + 1 :]


@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("part", ["header", "content"])
def test_a_damaged_chunk_costs_no_other(
    tmp_path: Path, whole: tuple[bytes, list[int]], number: int, part: str
) -> None:
    content, borders = whole
    start, end = borders[number - 1 : number + 1]
    draw = random.Random(number)
    places = range(20) if part == "header" else draw.sample(range(20, end - start), 12)
    left = [step for step in range(1, 11) if step not in (2 * number - 1, 2 * number)]
    path = tmp_path / "record.bin"
    for place in places:
        path.write_bytes(flip(content, start + place, draw))
        steps, losses = read_with_losses(path)
        assert steps == left
        expected = f"chunk {number} is damaged and left out ({end - start} bytes)."
        if number == 5 and 8 <= place < 16:  # a length that goes beyond the file
            assert losses in ([expected], ["the last chunk is cut off and passed over."])
        else:
            assert losses == [expected]
        if number == 1 and place < 8:
            continue  # begins like something else, see below
        with Recorder(path, every=1, tasks=TASKS) as recorder:
            recorder(11, make_alignments(1)[0])
        assert read_with_losses(path)[0] == [*left, 11]
        cut_record(path, 7)
        assert read_with_losses(path)[0] == [step for step in left if step <= 7]


def test_several_damaged_chunks(tmp_path: Path, whole: tuple[bytes, list[int]]) -> None:
    content, borders = whole
    for start in (borders[1], borders[3]):
        content = flip(content, start + 50, random.Random(0))
    path = tmp_path / "record.bin"
    path.write_bytes(content[:-3])
    steps, losses = read_with_losses(path)
    assert steps == [1, 2, 5, 6]
    lost = borders[2] - borders[1] + borders[4] - borders[3]
    assert losses == [
        f"chunks 2, 4 are damaged and left out ({lost} bytes).",
        "the last chunk is cut off and passed over.",
    ]


def test_a_file_cut_off_anywhere(tmp_path: Path, whole: tuple[bytes, list[int]]) -> None:
    content, borders = whole
    path = tmp_path / "record.bin"
    near = {border + offset for border in borders for offset in range(-25, 26)}
    for size in sorted(near):
        if not borders[1] <= size <= len(content):
            continue
        path.write_bytes(content[:size])
        intact = sum(border <= size for border in borders[1:])
        steps, losses = read_with_losses(path)
        assert steps == list(range(1, 2 * intact + 1))
        cut_off = ["the last chunk is cut off and passed over."]
        assert losses == ([] if size in borders else cut_off)
        cut_record(path, None)
        assert path.stat().st_size == borders[intact]


def test_blocks_need_not_hold_a_whole_chunk(
    tmp_path: Path, whole: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, borders = whole
    path = tmp_path / "record.bin"
    path.write_bytes(flip(content, borders[2], random.Random(0)))
    for size in (1, 7, 64):
        monkeypatch.setattr("gradvac.analysis.record._BLOCK", size)
        steps, losses = read_with_losses(path)
        assert steps == [1, 2, 3, 4, 7, 8, 9, 10]
        assert losses == [f"chunk 3 is damaged and left out ({borders[3] - borders[2]} bytes)."]


def test_bytes_behind_the_last_chunk(tmp_path: Path, whole: tuple[bytes, list[int]]) -> None:
    path = tmp_path / "record.bin"
    path.write_bytes(whole[0] + b"x")
    steps, losses = read_with_losses(path)
    assert steps == list(range(1, 11))
    assert losses == ["chunk 6 is damaged and left out (1 bytes)."]


def test_a_recorder_killed_within_the_first_header(tmp_path: Path) -> None:
    for length in range(9):
        path = tmp_path / str(length)
        path.write_bytes(b"gradvac1"[:length])
        write(path, make_alignments(1))
        assert read_with_losses(path) == ([1], [])


def test_a_file_that_takes_little_at_a_time(tmp_path: Path) -> None:
    """As a disk does that gets full while it is written to."""

    class Slow(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(bytes(content[:100]))

    with Slow(tmp_path / "r", "wb") as file:
        append_chunk(file, {"numbers": np.arange(200)})
    content = (tmp_path / "r").read_bytes()[20:]
    np.testing.assert_array_equal(np.load(io.BytesIO(content))["numbers"], np.arange(200))


def odd_chunk(**changes: Any) -> dict[str, Any]:
    """A chunk of two records, two components and three tasks, with some arrays replaced."""
    names = {"tasks": ["a", "b", "c"], "components": ["x", "y"], "rule": "sum"}
    arrays: dict[str, Any] = {name: np.array(value) for name, value in names.items()}
    arrays["steps"] = np.array([1, 2])
    for name in ("similarity", "target"):
        arrays[name] = np.zeros((2, 2, 3, 3), dtype=np.float16)
    arrays["active"] = np.zeros((2, 2, 3, 3), dtype=bool)
    for name in ("weights", "norms"):
        arrays[name] = np.zeros((2, 2, 3), dtype=np.float32)
    for name in ("update_cosine", "update_ratio"):
        arrays[name] = np.zeros((2, 2), dtype=np.float32)
    return {name: value for name, value in (arrays | changes).items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"similarity": np.zeros((2, 2, 4, 4), dtype=np.float16)},
        {"similarity": np.zeros((2, 2, 3, 3), dtype=complex)},
        {"norms": None},
        {"steps": np.array(["one", "two"])},
        {"tasks": np.array([1, 2, 3])},
        {"tasks": np.array(["a", "b"])},
    ],
)
def test_chunks_that_no_recorder_wrote_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "record.bin"
    with path.open("wb") as file:
        append_chunk(file, odd_chunk())
    assert read_record(path).steps.tolist() == [1, 2]
    with path.open("wb") as file:
        append_chunk(file, odd_chunk(**changes))
    with pytest.raises(ValueError, match=r"record\.bin: .*chunk"):
        read_record(path)


def test_a_record_does_not_expand_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.bin"
    with path.open("wb") as file:
        append_chunk(file, odd_chunk(rubbish=np.zeros(4 << 20, dtype=np.uint8)))
    assert path.stat().st_size < 40_000  # it holds much more than it takes
    monkeypatch.setattr("gradvac.analysis.record._MOST_UNPACKED", 1 << 20)
    with pytest.raises(ValueError, match=r"0\.0 GB"):
        read_record(path)


def test_many_records_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.bin"
    write(path, make_alignments(10), chunk=2)
    size = 9 * len(read_record(path).components) * len(TASKS) ** 2
    monkeypatch.setattr("gradvac.analysis.record._MOST_BYTES", 5 * size)
    assert len(read_record(path, most=4).steps) == 4
    assert len(read_record(path, most=8).steps) == 5
    with pytest.raises(ValueError, match=r"10 records .*most=5"):
        read_record(path)
