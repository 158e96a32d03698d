"""Trains the toy recipe in several processes, in many ways; writes what came of it as JSON.

python -m tests.training.ranks_driver FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradvac.engine import collectives
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Display, StepLosses, checkpoint, train

from ..ranks import GONE, Failed, run_ranks
from .toy import ToyBatch, ToyConfig, ToyRecipe, outcome

Found = dict[str, Any]
Settings = dict[str, dict[str, Any]]
WHOLE = "whole"  # a run of one process, with the usual settings


def settings(**sections: dict[str, Any]) -> ToyConfig:
    base: Settings = {
        "train": {"max_steps": 8, "log_every": 2, "validate_every": 4, "checkpoint_every": 4}
        | {"record_every": 2, "writers": [], "threads": 1},
        "align": {"rule": "gradvac"},  # with a state that steps change
        "optimizer": {"warmup_steps": 4, "lr": 1e-2},
        "model": {"dropout": 0.0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return ToyConfig.model_validate(base)


class Exact(ToyRecipe):
    """The toy in float64 and without noise, so that only the division into parts is left.

    Args:
        config: Its config.
        fail: (rank, step) -> what happens there, or nothing.
    """

    def __init__(self, config: ToyConfig, fail: Callable[[int, int], object], **options: Any):
        super().__init__(config, **options)
        self.model.double()
        self.data = {task: (x.double(), y.double()) for task, (x, y) in self.data.items()}
        self._fail, self._step = fail, 0

    def losses(self, batch: ToyBatch) -> StepLosses:
        spoiled = self._fail(rank_of(), self._step)
        self._step += 1
        losses = (self.model(batch.inputs) - batch.goals).square().sum(1) * batch.weight
        losses = losses * torch.nan if spoiled == "nan" else losses
        return StepLosses(losses, batch.tasks, {"error": losses.detach().sqrt().sum()})


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def nothing(rank: int, step: int) -> None:
    return None


def run(
    size: int,
    folder: Path,
    config: ToyConfig | Callable[[int], ToyConfig],
    *,
    fail: Callable[[int, int], object] = nothing,
    recipe: Callable[..., Any] = Exact,
    **options: Any,
) -> list[Found]:
    """Train in so many processes; what each of them says in the end."""

    def work(rank: int) -> Found:
        own = config(rank) if callable(config) else config
        done = train(recipe(own, fail, **options), own, folder / "run", display=Display(quiet=True))
        return {"reason": done.reason, "step": done.step, "best": done.best_score}

    def said(result: Any) -> Found:
        if result == GONE:
            return {"gone": True}
        if isinstance(result, Failed):
            return {"error": result.kind, "message": result.message}
        return dict(result)

    return [said(result) for result in run_ranks(work, size, folder)]


def gap(folder: Path, other: Path) -> float:
    """The largest difference of two runs: their last and best weights, and what they logged."""
    largest = 0.0
    for which in ("last", "best"):
        one, two = (checkpoint.weights(f / "run", which) for f in (folder, other))
        largest = max([largest, *(float((one[k] - two[k]).abs().max()) for k in one)])
    logs = [RunFolder(f / "run").read_metrics() for f in (folder, other)]
    assert [sorted(entry) for entry in logs[0]] == [sorted(entry) for entry in logs[1]]
    for one, two in zip(*logs, strict=True):
        for key in one:
            is_clock = "second" in key or "memory" in key
            if one[key] is None or two[key] is None:
                assert one[key] is two[key]
            elif not is_clock:
                largest = max(largest, abs(one[key] - two[key]))
    return largest


# -- what is tried -----------------------------------------------------------------------------


def same_as_one(folder: Path) -> Found:
    """Two and three processes, with and without accumulation, and more processes than rows."""
    found: Found = {}
    for name, accumulation, rows, several in (
        ("gradvac", 2, 2, (("ddp", 3), ("fsdp", 2))),
        ("gradvac", 1, 6, (("fsdp", 3),)),
        ("gradnorm", 1, 6, (("ddp", 2),)),
        ("none", 2, 6, (("ddp", 2), ("fsdp", 3))),
        ("none", 1, 2, (("ddp", 3),)),
    ):
        own = folder / f"{name}-{accumulation}-{rows}"
        for parallel, size in (("ddp", 1), *several):
            config = settings(
                align={"rule": name},
                optimizer={"accumulation": accumulation},
                train={"parallel": parallel},
            )
            said = run(size, own / f"{parallel}-{size}", config, rows=rows)
            assert all(one.get("reason") == "finished" for one in said), said
        for parallel, size in several:
            found[f"{own.name}-{parallel}-{size}"] = gap(own / "ddp-1", own / f"{parallel}-{size}")
    return found


def other_sizes(folder: Path) -> Found:
    """2 -> 3 -> 1 -> 2 processes, against one that was not interrupted; shards now and then."""
    found: Found = {}
    whole, shared = ("ddp",) * 4, ("fsdp",) * 4
    for case, name, modes in (
        ("replicas", "gradvac", whole),
        ("shards", "gradvac", shared),
        ("both", "none", ("fsdp", "ddp", "ddp", "fsdp")),
    ):
        align, own, one = {"rule": name}, folder / case, folder.parent / WHOLE
        if name != "gradvac":
            one = folder / name
            run(1, one, settings(align=align))
        for (size, until), mode in zip(((2, 2), (3, 4), (1, 6), (2, 0)), modes, strict=True):
            config = settings(align=align, train={"pause_at": until, "parallel": mode})
            said = run(size, own / "parts", config)
            expected = "paused" if until else "finished"
            assert all(one.get("reason") == expected for one in said), said
        found[case] = gap(one, own / "parts")
    return found


def with_dropout(folder: Path) -> Found:
    """Two processes, stopped and continued by two: bit for bit."""
    differ: list[str] = []
    for parallel in ("ddp", "fsdp"):
        own, model = folder / parallel, {"dropout": 0.3}
        run(2, own / "whole", settings(model=model, train={"parallel": parallel}))
        for until in (5, 0):
            train = {"pause_at": until, "parallel": parallel}
            run(2, own / "parts", settings(model=model, train=train))
        whole, parts = (outcome(own / which / "run") for which in ("whole", "parts"))
        differ += [f"{parallel} {key}" for key in whole if whole[key] != parts.get(key)]
    return {"differ": differ}


def signals(folder: Path) -> Found:
    """A signal in any process stops all of them, after the same step."""

    def fail(rank: int, step: int) -> None:
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGHUP)

    said = run(2, folder, settings(), fail=fail)
    return {"said": said, "saved": checkpoint.list_checkpoints(folder / "run")[-1].step}


def bad_numbers(folder: Path) -> Found:
    """A loss of one process is not finite: all skip the step; too often: all give up."""
    once, skipped = [], []
    for parallel in ("ddp", "fsdp"):
        config, own = settings(train={"parallel": parallel}), folder / f"once-{parallel}"
        once += run(2, own, config, fail=lambda r, s: "nan" if (r, s) == (1, 5) else "")
        log = [entry for entry in RunFolder(own / "run").read_metrics() if "train/loss" in entry]
        skipped.append([entry["train/skipped_steps"] for entry in log])
    alike = gap(folder / "once-ddp", folder / "once-fsdp")
    config = settings(train={"max_bad_steps": 3})
    often = run(2, folder / "often", config, fail=lambda r, s: "nan" if r and s >= 4 else "")
    steps = [one.step for one in checkpoint.list_checkpoints(folder / "often" / "run")]
    return {"once": once, "skipped": skipped, "alike": alike, "often": often, "kept": steps}


def damages(folder: Path) -> Found:
    """A shard that is damaged: the checkpoint before is continued from."""
    config = settings(train={"parallel": "fsdp"})
    run(2, folder / "parts", settings(train={"parallel": "fsdp", "pause_at": 6}))
    last = checkpoint.list_checkpoints(folder / "parts" / "run")[-1]
    shard = sorted((last.path / "shards").glob("*.distcp"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    told = [last.step, last.damage()]
    said = run(3, folder / "parts", config)
    told.append([one.get("reason") for one in said])
    return {"told": told, "gap": gap(folder.parent / WHOLE, folder / "parts")}


def deaths(folder: Path) -> Found:
    """A process ends without a word: the others say who, and the run can be continued."""
    found: Found = {}
    for name, both in (("gradvac", (0, 1)), ("none", (1,))):
        for dead in both:

            def fail(rank: int, step: int, dead: int = dead) -> None:
                if (rank, step) == (dead, 5):
                    os._exit(9)

            own = folder / f"{name}-{dead}"
            config = settings(align={"rule": name})
            said = run(2, own, config, fail=fail)
            intact = [
                c.step for c in checkpoint.list_checkpoints(own / "run") if c.damage() is None
            ]
            found[own.name] = {"said": said, "intact": intact}
    found["again"] = run(2, folder / "gradvac-1", settings())
    found["gap"] = gap(folder.parent / WHOLE, folder / "gradvac-1")
    return found


def refusals(folder: Path) -> Found:
    """What one process cannot do, none does."""

    def broken(config: ToyConfig, fail: Any) -> Exact:
        made = Exact(config, fail)
        made.model = nn.Sequential(made.model, nn.BatchNorm1d(2)).double()
        return made

    run(1, folder / "other", settings())
    return {
        "seeds": run(2, folder / "seeds", lambda rank: settings(train={"seed": rank})),
        "settings": run(2, folder / "other", settings(optimizer={"lr": 2e-2})),
        "statistics": run(2, folder / "statistics", settings(), recipe=broken),
        "graph": run(2, folder / "graph", settings(train={"cuda_graph": True})),
    }


TRIED = (same_as_one, other_sizes, with_dropout, signals, bad_numbers, damages, deaths, refusals)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    collectives.PATIENCE = 1.0  # seconds to learn who is missing
    found: Found = {}
    run(1, folder / WHOLE, settings())
    for tried in TRIED:
        begin = time.monotonic()
        try:
            found[tried.__name__] = tried(folder / tried.__name__)
        except Exception as error:
            found[tried.__name__] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{tried.__name__}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
