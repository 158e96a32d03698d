"""Kill a sweep at random moments and go on with it: are its results those of one left alone?

    python benchmarks/kills.py                      # 30 kills, about ten minutes on two cores
    python benchmarks/kills.py --kills 100 --seed 1

A small sweep (two methods, two seeds, two runs at a time) is run once undisturbed. Then the same
command is started again and again, and every start is hit after a random while by a random signal:
the sweep alone, its process group (as by a terminal), all processes (as by a cluster), or one
run. The next start follows at once; a process that is still there 60 seconds after a kill is an
orphan. `--retry` is given only after a run itself was killed with SIGKILL, for which it counts as
failed. A sweep that is done is compared with the undisturbed one, bit for bit (weights, optimizer,
the rule's state, record, log without clocks, scores), and another begins.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gradvac.lab.training import config  # noqa: E402
from tests.faults import tiny  # noqa: E402

SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGKILL")
TARGETS = ("sweep", "group", "all", "run")
METHODS = ("joint", "gradvac")
SEEDS = (0, 1)
SWEEP = """
recipe = "nmt"
base = "base.toml"
[grid]
"train.seed" = [0, 1]
[[methods]]
name = "joint"
set = { "align.rule" = "sum" }
[[methods]]
name = "gradvac"
"""
LEAVES_WITHIN = 60.0  # seconds, on a machine where imports may take half of them


def write_sweep(folder: Path, steps: int) -> None:
    """Corpus, config and sweep; paths are relative, so that all folders give the same bytes."""
    folder.mkdir()
    tiny.write_corpus(folder)
    settings = tiny.settings(
        max_steps=steps, validate_every=steps // 4, checkpoint_every=steps // 8
    )
    (folder / "base.toml").write_text(config.dump(settings), encoding="utf-8")
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")


class Started:
    """The command `gradvac sweep`, just started, and all processes that come of it."""

    def __init__(self, folder: Path, *, retry: bool = False) -> None:
        self._mark = f"KILLS={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        command = [sys.executable, "-m", "gradvac", "sweep", "sweep.toml"]
        command += ["-o", "out", "--jobs", "2", *(["--retry"] if retry else [])]
        self._output = (folder / f"{value}.txt").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {name: value, "OMP_NUM_THREADS": "1"},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def alive(self) -> list[int]:
        """Processes of it that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def runs(self) -> list[int]:
        """Its processes that train: they write into logs."""
        found = []
        for number in self.alive():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{number}/fd/1").readlink().name.endswith(".log"):
                    found.append(number)
        return found

    def kill(self, number: signal.Signals, target: str, draw: random.Random) -> str:
        """Send a signal; what it was sent to, as a run may not be there yet."""
        runs = self.runs()
        with contextlib.suppress(ProcessLookupError):
            if target == "run" and runs:
                os.kill(draw.choice(runs), number)
                return target
            if target == "group":
                os.killpg(self.process.pid, number)
                return target
            if target == "all":
                for one in draw.sample(alive := self.alive(), len(alive)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, number)
                return target
            self.process.send_signal(number)
        return "sweep"

    def said(self) -> str:
        """What it printed."""
        return Path(self._output.name).read_text(encoding="utf-8")


def outcomes(folder: Path) -> dict[str, str]:
    """A hash for every run of what it left."""
    found = {}
    with contextlib.chdir(folder):
        for method in METHODS:
            for seed in SEEDS:
                run = Path("out") / method / f"seed-{seed}"
                parts = [tiny.outcome(stage, run) for stage in ("train", "score")]
                found[str(run)] = " ".join(parts)
    return found


class Trial:
    """Kills, counted, and what went wrong."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self._folder, self._steps, self._draw = folder, steps, random.Random(seed)
        self.wrong: list[str] = []
        self.kills = self.sweeps = 0

    def undisturbed(self) -> None:
        """Run it once: what to expect, and how long it takes."""
        write_sweep(self._folder / "whole", self._steps)
        began = time.monotonic()
        started = Started(self._folder / "whole")
        if started.process.wait():
            raise SystemExit(started.said())
        self._seconds = time.monotonic() - began
        self._expected = outcomes(self._folder / "whole")
        print(f"undisturbed: {self._seconds:.1f} s", flush=True)

    def disturbed(self, most: int) -> None:
        """One sweep, killed until it is done, or often enough."""
        folder = self._folder / f"killed-{self.sweeps}"
        write_sweep(folder, self._steps)
        self.sweeps += 1
        retry, started = False, Started(folder)
        while self.kills < most:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(self._draw.uniform(0.05, 0.9) * self._seconds)
            if started.process.poll() is not None:
                break  # it was done before
            number = signal.Signals[self._draw.choice(SIGNALS)]
            target = started.kill(number, self._draw.choice(TARGETS), self._draw)
            self.kills += 1
            retry = target == "run" and number == signal.SIGKILL
            former, status = started, started.process.wait()
            started = Started(folder, retry=retry)
            self._watch(former, f"{self.kills}: {number.name} to {target}: status {status}", retry)
        if started.process.wait():
            self.wrong.append(f"{folder.name}: it did not go on: {started.said()[-500:]}")
        elif (found := outcomes(folder)) != self._expected:
            differ = [run for run, text in found.items() if text != self._expected[run]]
            self.wrong.append(f"{folder.name}: {differ} differ from the undisturbed runs")

    def _watch(self, former: Started, what: str, may_fail: bool) -> None:
        """Whether all processes of a start that has ended leave, and what it said."""
        began = time.monotonic()
        while (left := former.alive()) and time.monotonic() - began < LEAVES_WITHIN:
            time.sleep(0.1)
        print(f"{what}, the last process gone {time.monotonic() - began:.1f} s later", flush=True)
        said = former.said()
        if left:
            self.wrong.append(f"{what}: orphans {left}")
        if "Traceback" in said or (": failed" in said and not may_fail):
            self.wrong.append(f"{what}: {said[-500:]}")


def main() -> None:
    """Print every kill, and what went wrong; exit status 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="of every run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in SIGNALS[:3]:  # nohup and shells let some be ignored, which sweeps would inherit
        signal.signal(signal.Signals[name], signal.default_int_handler)
    with TemporaryDirectory() as folder:
        trial = Trial(Path(folder), given.steps, given.seed)
        trial.undisturbed()
        while trial.kills < given.kills:
            trial.disturbed(given.kills)
    print(f"{trial.kills} kills, {trial.sweeps} sweeps finished, {len(trial.wrong)} wrong")
    print("\n".join(trial.wrong))
    sys.exit(bool(trial.wrong))


if __name__ == "__main__":
    main()
