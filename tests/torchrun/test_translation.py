"""`torchrun ... gradvac nmt train`, as it is typed: killed, restarted, and used afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradvac.lab.recipes.nmt import NmtConfig, Translator, train_translation
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Display, checkpoint, config

WORDS = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu")
CONFIG = """
[data]
prepared = "data"
languages = ["xx", "yy"]
train = "train.{pair}.tsv"
dev = "dev.{pair}.tsv"
test = "test.{pair}.tsv"
max_tokens = 40
vocabulary = { size = 300, threads = 1, character_coverage = 1.0 }
[model]
size = "tiny"
width = 16
inner = 16
heads = 2
encoder_layers = 1
decoder_layers = 1
dropout = 0.0
[batch]
tokens = 200
chunk = 2
[optimizer]
lr = 1e-3
warmup_steps = 2
eps = 1e-4  # gradients of the keys' biases are 0, and rounding shall not grow to the size of a step
[validation]
bleu_sentences = 4
[train]
max_steps = 20
validate_every = 10
checkpoint_every = 4
keep = 9
log_every = 4
threads = 1
device = "cpu"
writers = []
"""


def write_corpus(folder: Path) -> None:
    """Two languages: one says English backwards, one in capitals."""
    draw = random.Random(1)
    lines = sorted({" ".join(draw.choices(WORDS, k=draw.randint(3, 5))) for _ in range(320)})
    draw.shuffle(lines)
    for split, own in (("test", lines[:12]), ("dev", lines[12:24]), ("train", lines[24:])):
        for code, turn in (("xx", lambda t: " ".join(t.split()[::-1])), ("yy", str.upper)):
            rows = [f"{line}\t{turn(line)}\n" for line in own]
            (folder / f"{split}.en-{code}.tsv").write_text("".join(rows), encoding="utf-8")


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config, and a run of one process."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_corpus(folder)
    (folder / "tiny.toml").write_text(CONFIG)
    with contextlib.chdir(folder):
        settings = config.load(NmtConfig, "tiny.toml")
        train_translation(settings, "one", display=Display(quiet=True))
    return folder


def test_a_killed_process_is_named_and_torchrun_starts_again(folder: Path) -> None:
    dying = Path(__file__).with_name("dying.py")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(
        folder,
        *(*torchrun, "--max-restarts", "1"),
        *("--", str(dying), "two/checkpoints/step-00000008", "mark"),
        *("nmt", "train", "tiny.toml", "--run", "two"),
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "mark").exists()
    assert "error: processes: rank 0 of 2" in done.stderr
    assert "rank 1 has ended or does not answer" in done.stderr
    # The first process speaks, and nobody else does.
    assert done.stdout.count("Finished after 20 steps.") == 1
    (continued,) = re.findall(r"Continuing from step (\d+)\.", done.stdout)
    assert int(continued) >= 8
    assert str(RunFolder(folder / "two").read_signature()["device"]).startswith("2x")


def assert_close(one: Path, other: Path, which: str) -> None:
    expected, found = (checkpoint.weights(run, which) for run in (one, other))
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, atol=1e-6, rtol=1e-5)


def test_the_run_is_that_of_one_process(folder: Path) -> None:
    for which in ("last", "best"):
        assert_close(folder / "one", folder / "two", which)
    logs = [RunFolder(folder / name).read_metrics() for name in ("one", "two")]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    for one, two in zip(*logs, strict=True):
        for key in {"train/loss", "dev/loss"} & one.keys():
            assert one[key] == pytest.approx(two[key], rel=1e-5)


def test_the_slurm_script_continues_a_run_with_shards(folder: Path) -> None:
    """With torchrun as it is, and the two commands of Slurm that it calls in miniature."""
    shutil.copytree(folder / "one", folder / "three")
    shutil.rmtree(RunFolder(folder / "three").checkpoint(20))
    script = Path(__file__).parents[2] / "examples" / "slurm.sh"
    commands = {"scontrol": "echo localhost", "srun": 'exec "$@"'}
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"JOB_NODELIST": "localhost", "NNODES": "1", "GPUS_ON_NODE": "2", "JOB_ID": "7"}
    places = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", str(script), "three", "train.parallel=fsdp"],
        cwd=folder,
        env=os.environ
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": os.pathsep.join(places), "PORT": str(port), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Continuing from step 16." in done.stdout
    assert "2 processes (exact" in done.stdout
    assert "Finished after 20 steps." in done.stdout
    (last,) = (one for one in checkpoint.list_checkpoints(folder / "three") if one.step == 20)
    assert last.is_sharded
    for which in ("last", "best"):
        assert_close(folder / "one", folder / "three", which)
    # One process puts the shards together.
    translator = Translator.from_run(folder / "three", weights="last", device="cpu")
    assert len(translator.translate(["ba de fi", "go hu"], "xx")) == 2
