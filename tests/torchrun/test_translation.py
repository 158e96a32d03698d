"""`torchrun ... gradvac nmt train`, as it is typed: killed, restarted, and used afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from gradvac.lab.recipes.nmt import NmtConfig, Translator, train_translation
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Display, checkpoint, config

from ..drivers import ROOT, run_driver
from ..faults import tiny

OVERRIDES = (
    "model.dropout=0.0",
    "batch.tokens=200",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-4",  # keys' biases have gradients of 0; rounding shall not become a step
    "validation.bleu_sentences=4",
)


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
    tiny.write_corpus(folder)
    with contextlib.chdir(folder):
        steps = {"max_steps": 20, "validate_every": 10, "checkpoint_every": 4, "keep": 9}
        Path("base.toml").write_text(config.dump(tiny.settings(log_every=4, **steps)))
        settings = config.load(NmtConfig, "base.toml", OVERRIDES)
        Path("tiny.toml").write_text(config.dump(settings))
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
    """With the commands that it calls in miniature; its two processes are forks."""
    shutil.copytree(folder / "one", folder / "three")
    shutil.rmtree(RunFolder(folder / "three").checkpoint(20))
    script = ROOT / "examples" / "slurm.sh"
    commands = {"scontrol": "echo localhost", "srun": 'exec "$@"', "torchrun": 'echo "$@"'}
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "localhost", "NNODES": "1", "GPUS_ON_NODE": "2", "JOB_ID": "7"}
    told = subprocess.run(
        ["bash", str(script), "three", "train.parallel=fsdp"],
        env=os.environ
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=True,
    )
    asked = get_args_parser().parse_args(told.stdout.split())
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_id) == ("1", "2", "7")
    assert asked.rdzv_endpoint == "localhost:29500"
    assert (asked.module, asked.training_script) == (True, "gradvac")
    command = (ROOT / "src" / "gradvac" / "__main__.py", *asked.training_script_args)
    done = run_driver("tests.architecture.as_torchrun", *command, folder=folder)
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
