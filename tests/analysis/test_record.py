"""The record of a training run: what goes in comes out, also after kill -9."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradvac import Aligner, Alignment, GradVac, Sum
from gradvac.analysis import Record, Recorder, read_record
from gradvac.analysis import record as record_module
from gradvac.analysis.record import cut_record

TASKS = ("fr", "hi", "tr")


def make_alignments(
    num: int, *, rule: GradVac | Sum | None = None, tasks: tuple[str, ...] = TASKS
) -> list[Alignment]:
    """Alignments of a small model; every fourth batch lacks the last task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    aligner = Aligner(model, tasks, rule or GradVac(beta=0.3))
    found = []
    for step in range(1, num + 1):
        present = list(tasks[:-1] if step % 4 == 0 else tasks)
        losses = model(torch.randn(3 * len(present), 4)).square().sum(1)
        found.append(aligner.backward(losses, present * 3))
    aligner.detach()
    return found


def write(path: Path, alignments: list[Alignment], **options: object) -> None:
    with Recorder(path, **{"every": 1, "tasks": TASKS, **options}) as recorder:  # type: ignore[arg-type]
        for step, alignment in enumerate(alignments, start=1):
            recorder(step, alignment)


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    alignments = make_alignments(7)
    write(tmp_path / "new" / "record.bin", alignments, chunk=3, rule="gradvac")
    record = read_record(tmp_path / "new")
    assert (record.tasks, record.rule) == (TASKS, "gradvac")
    assert record.components == alignments[0].components
    assert record.steps.tolist() == list(range(1, 8))
    for s, alignment in enumerate(alignments):
        t = len(alignment.tasks)
        for name in ("similarity", "target"):
            found = getattr(record, name)[s, :, :t, :t]
            np.testing.assert_allclose(found, getattr(alignment, name).numpy(), atol=5e-4)
        np.testing.assert_array_equal(record.active[s, :, :t, :t], alignment.active.numpy())
        for name in ("weights", "norms"):
            expected = getattr(alignment, name).numpy()
            np.testing.assert_allclose(getattr(record, name)[s, :, :t], expected, rtol=1e-6)
        for name in ("update_cosine", "update_ratio"):
            expected = getattr(alignment, name).numpy()
            np.testing.assert_allclose(getattr(record, name)[s], expected, rtol=1e-6)
    absent = record.similarity[3]
    assert np.isnan(absent[:, 2]).all()
    assert np.isnan(absent[:, :, 2]).all()
    assert np.isnan(record.weights[3, :, 2]).all()
    assert not record.active[3, :, 2].any()
    assert record.active.any()


def test_zero_gradients_are_unknown_but_present(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    aligner = Aligner(model, ["fr", "hi"], Sum())
    losses = model(torch.ones(2, 2))[:, 0] * torch.tensor([1.0, 0.0])
    write(tmp_path / "r", [aligner.backward(losses, ["fr", "hi"])], tasks=("fr", "hi"))
    record = read_record(tmp_path / "r")
    assert record.norms[0, 0, 1] == 0.0
    assert record.weights[0, 0].tolist() == [1.0, 1.0]
    assert np.isnan(record.similarity[0, 0, 0, 1])
    assert record.similarity[0, 0, 0, 0] == 1.0
    assert np.isnan(record.target).all()


def test_every_and_chunks(tmp_path: Path) -> None:
    """A chunk is in the file as soon as the record after it comes."""
    path = tmp_path / "record.bin"
    recorder = Recorder(path, every=2, chunk=2)
    sizes = []
    for step, alignment in enumerate(make_alignments(10), start=1):
        recorder(step, alignment)
        sizes.append(path.stat().st_size)
    assert sizes[:5] == [0] * 5
    assert sizes[5] > 0  # steps 2 and 4, written with step 6
    assert read_record(path).steps.tolist() == [2, 4, 6, 8]
    recorder.close()
    recorder.close()
    assert read_record(path).steps.tolist() == [2, 4, 6, 8, 10]
    with pytest.raises(ValueError, match=r"every, chunk: .*at least 1"):
        Recorder(path, every=0)


def test_in_place_changes_after_the_step_do_not_matter(tmp_path: Path) -> None:
    alignment = make_alignments(1)[0]
    before = alignment.similarity.numpy().copy()
    with Recorder(tmp_path / "r", every=1) as recorder:
        recorder(1, alignment)
        alignment.gram.zero_()
    np.testing.assert_allclose(read_record(tmp_path / "r").similarity[0], before, atol=5e-4)


def test_tasks_that_appear_later(tmp_path: Path) -> None:
    few = make_alignments(3, tasks=("hi", "fr"))
    more = make_alignments(3)
    with Recorder(tmp_path / "r", every=1, chunk=2) as recorder:
        for step, alignment in enumerate([*few, *more], start=1):
            recorder(step, alignment)
    record = read_record(tmp_path / "r")
    assert record.tasks == ("hi", "fr", "tr")
    assert np.isnan(record.similarity[0, :, 2]).all()
    i, j = record.tasks.index("fr"), record.tasks.index("tr")
    expected = more[0].similarity[:, 0, 2].numpy()
    np.testing.assert_allclose(record.similarity[3, :, i, j], expected, atol=5e-4)


def test_reading_fewer_records(tmp_path: Path) -> None:
    write(tmp_path / "r", make_alignments(25), chunk=4)
    whole, some = read_record(tmp_path / "r"), read_record(tmp_path / "r", most=7)
    assert some.steps.tolist() == [1, 5, 9, 13, 17, 21, 25]
    np.testing.assert_array_equal(some.similarity, whole.similarity[::4])
    assert len(read_record(tmp_path / "r", most=100).steps) == 25


@pytest.mark.parametrize("after", [0, 4, 5, 9, 30])
def test_continuing_after_a_step(tmp_path: Path, after: int) -> None:
    """Later records go, also out of the middle of a chunk, and none comes twice."""
    alignments = make_alignments(12)
    write(tmp_path / "whole", alignments, chunk=4)
    write(tmp_path / "parts", alignments[:10], chunk=4)
    with Recorder(tmp_path / "parts", every=1, tasks=TASKS, after=after, chunk=3) as recorder:
        for step in range(min(after, 10) + 1, 13):
            recorder(step, alignments[step - 1])
    whole, parts = read_record(tmp_path / "whole"), read_record(tmp_path / "parts")
    for name in Record.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name), err_msg=name)


def test_a_record_that_is_there_is_continued(tmp_path: Path) -> None:
    alignments = make_alignments(8)
    path = tmp_path / "r"
    write(path, alignments[:5], chunk=2)
    with Recorder(path, every=1, tasks=TASKS) as recorder:
        message = rf"step: .*5.*{re.escape(str(path))}.*go on from there"
        with pytest.raises(ValueError, match=message):
            recorder(5, alignments[4])
        for step in (6, 7, 8):
            recorder(step, alignments[step - 1])
    write(tmp_path / "whole", alignments)
    whole, parts = read_record(tmp_path / "whole"), read_record(path)
    assert parts.steps.tolist() == list(range(1, 9))
    np.testing.assert_array_equal(whole.similarity, parts.similarity)


def test_steps_may_begin_at_zero(tmp_path: Path) -> None:
    for after in (None, 0):
        with Recorder(tmp_path / str(after), every=1, after=after) as recorder:
            recorder(0, make_alignments(1)[0])
        assert read_record(tmp_path / str(after)).steps.tolist() == [0]


@pytest.mark.parametrize("content", [b"PK\x03\x04 weights", b"x", b"\0" * 100])
def test_a_recorder_leaves_foreign_files_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious.pt"
    path.write_bytes(content)
    for after in (None, 0, 7):
        message = r"precious\.pt: .*not a record .*another path"
        with pytest.raises(ValueError, match=message):
            Recorder(path, after=after)
        assert path.read_bytes() == content


def test_continuing_removes_a_chunk_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, make_alignments(8), chunk=4)
    path.write_bytes(path.read_bytes()[:-5])
    cut_record(path, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_record(path).steps.tolist() == [1, 2, 3, 4]
    cut_record(tmp_path / "missing", 3)
    assert not (tmp_path / "missing").exists()


def test_lines_of_the_docs_read_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.search(r"    import io.*?\n\n", record_module.__doc__ or "", flags=re.DOTALL)
    assert lines is not None
    write(tmp_path / "record.bin", make_alignments(10), chunk=2)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(textwrap.dedent(lines[0]), found)
    record = read_record(tmp_path)
    for name in ("steps", "similarity", "active", "weights", "update_ratio"):
        joined = np.concatenate([chunk[name] for chunk in found["chunks"]])
        np.testing.assert_array_equal(joined, getattr(record, name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no record yet"),
        (b"gradvac", "not a record"),
        (b"%PDF-1.7 something else altogether", "not a record .*remove it"),
    ],
)
def test_empty_and_foreign_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "record.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_record(tmp_path)


def test_records_of_different_components(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, make_alignments(1))
    model = nn.Linear(2, 1)
    alignment = Aligner(model, TASKS, Sum()).backward(model(torch.randn(3, 2))[:, 0], list(TASKS))
    with Recorder(path, every=1, after=1) as recorder:
        recorder(2, alignment)
    with pytest.raises(ValueError, match="other components or another rule"):
        read_record(path)


PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("test_record", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
recorder = module.Recorder(sys.argv[2], every=1, chunk=5, tasks=module.TASKS)
alignments = module.make_alignments(8)
step = 0
while True:
    step += 1
    recorder(step, alignments[step % 8])
    print(step, flush=True)
"""


def test_a_killed_process_leaves_a_record_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "record.bin"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, __file__, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    with process.stdout:
        reached = 0
        for line in process.stdout:
            reached = int(line)
            if reached >= 137:
                break
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may have died within a chunk
        steps = read_record(path).steps.tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= reached - 2 * 5


def test_approximate_similarities_are_called_so(tmp_path: Path) -> None:
    alignments = [replace(own, exact=False) for own in make_alignments(2)]
    write(tmp_path / "record.bin", alignments, rule="gradvac")
    assert read_record(tmp_path).rule == "gradvac(approximate similarities)"
