"""How often the report claims what is not so, and how often it finds what was planted.

    python benchmarks/nulls.py --seeds 200 --out nulls.json              # every case
    python benchmarks/nulls.py --cases families tails --seeds 100:200 --out nulls.json

Small real networks are trained, recorded and measured through the public API, and the report is
asked what it sees. In a *null* all tasks are one task: they draw their rows from one distribution,
whatever their batch sizes, the memory and the tails of their noise, their number and the length of
the record. So relatives are not closer, no groups exist, no pair stands out and no task harms
another. The layers are branches side by side that begin with random weights, the same ones in
encoder and decoder: layers differ, but not by depth, and the two sides not at all. Where weights
stand still, nothing changes over steps. Kinds of sentences that a null does not make false are not
counted in it. In a *planted* case one of these is made true, and the kinds that should find it are
counted.

Networks are trained once: `--runs` keeps what they recorded, so that other statistics can be asked
about the same data in a tenth of the time. `--out` keeps the counts of finished seeds: the same
command goes on where it was stopped, and other seeds add to it. Figures are in `docs/log.md`.
"""

# T tasks, B rows of a task, D inputs of a side

import argparse
import json
import math
import pickle
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum
from gradvac.analysis import (
    KnownDistances,
    Record,
    Recorder,
    Run,
    Similarities,
    concatenate,
    measure,
    read_record,
)
from gradvac.analysis.advice import advise_runs
from gradvac.analysis.report import describe_difference, run_headline, summarise
from gradvac.analysis.run_files import TaskScores

INPUTS, HIDDEN, BRANCHES = 8, 4, 4
FAMILY, SIDES, DEPTH, TIME = "Relatives", "Encoder and decoder", "Depth", "Time"
_STILL = frozenset({TIME})
_TASKS_AT_ONCE = 100


@dataclass(frozen=True)
class Case:
    """How tasks, their noise and the record are made.

    Attributes:
        tasks: Number of tasks, in families of three; 2: no families.
        records: Steps, all of them recorded; of a measurement: checkpoints.
        rows: Rows of a task's batch, by family in turn.
        noise: Of the labels; the curve that all tasks fit has about 1.
        memory: Correlation of a task's rows and noise from step to step.
        common: Size of a fluctuation that all rows of a step share.
        drift: Factor by which the noise has grown at the last step.
        tails: Degrees of freedom of the noise (Student's t); infinite: normal.
        rate: Learning rate; 0: weights stand still.
        vaccine: Train with GradVac instead of the plain sum.
        measured: Measure on a set instead of recording batches.
        lengths: Standard deviation of the logarithm of a line's length, by which its loss counts.
        shared: Part of a task's lines that all other tasks have too, as far as their sets go; only
            the noise of labels is their own.
        turns: Radians by which weights turn about the curve, from one checkpoint to the next: they
            change, and the noise of a set with them, but nothing that holds for all lines.
        twice: Compare with a second run of the same weights, on other rows.
        family: Size of a curve that only relatives share (planted).
        opposed: Every second family has the curves of the first, upside down (planted).
        side: Size of every task's own curve, over the decoder's inputs alone (planted).
        depth: Noise on the inputs of the last branch, growing from none at the first (planted).
        trend: Size of every task's own curve at the last step, growing from none (planted).
        finds: Kinds of sentences that should find what was planted; empty: a null.
        open: Kinds of sentences that this null does not make false.
    """

    tasks: int = 8
    records: int = 40
    rows: tuple[int, ...] = (8,)
    noise: float = 1.0
    memory: float = 0.0
    common: float = 0.0
    drift: float = 1.0
    tails: float = math.inf
    rate: float = 0.0
    vaccine: bool = False
    measured: bool = False
    lengths: float = 0.0
    shared: float = 0.0
    turns: float = 0.0
    twice: bool = False
    family: float = 0.0
    side: float = 0.0
    opposed: bool = False
    depth: float = 0.0
    trend: float = 0.0
    finds: tuple[str, ...] = ()
    open: frozenset[str] = field(default_factory=frozenset)


_SHARED = Case(measured=True, tasks=9, records=1, rows=(12, 48, 192), shared=1.0, twice=True)
CASES = {
    "plain": Case(twice=True),
    "training": Case(rate=0.05, open=_STILL),
    "vaccine": Case(rate=0.05, vaccine=True, open=_STILL),
    "noise alone": Case(noise=4.0, rate=0.05, open=_STILL),
    "batches by family": Case(tasks=9, rows=(2, 8, 32)),
    "batches by family, training": Case(tasks=9, rows=(2, 8, 32), rate=0.05, open=_STILL),
    "batches by family, long": Case(tasks=9, rows=(2, 8, 32), records=150),
    "memory": Case(memory=0.9, records=100),
    "memory, short": Case(memory=0.9, records=20),
    "common fluctuation": Case(common=1.5, memory=0.9, records=80),
    "drifting noise": Case(drift=4.0, rate=0.05, open=_STILL),
    "heavy tails": Case(tails=2.0, rate=0.01, open=_STILL),
    "two tasks": Case(tasks=2, records=40),
    "two tasks, long, memory": Case(tasks=2, records=200, memory=0.9),
    "four tasks": Case(tasks=4),
    "twenty-five tasks": Case(tasks=25, rows=(2, 4, 16)),
    "sixty tasks": Case(tasks=60, records=20, rows=(2, 4)),
    "short": Case(records=6),
    "measured": Case(measured=True, records=1, rows=(16,), twice=True),
    "measured, lines by family": Case(
        measured=True, tasks=9, records=1, rows=(8, 24, 96), twice=True
    ),
    "measured, shared": Case(measured=True, records=1, rows=(16,), shared=1.0, twice=True),
    "measured, shared lines by family": _SHARED,
    "measured, lengths": Case(
        measured=True, tasks=9, records=1, rows=(16, 64, 256), lengths=1.15, shared=0.7, twice=True
    ),
    "measured, lengths, own lines": Case(
        measured=True, tasks=9, records=1, rows=(16, 64, 256), lengths=1.15
    ),
    "measured, lengths, two families": Case(
        measured=True, tasks=6, records=1, rows=(8, 256), lengths=1.15, shared=0.7
    ),
    "measured, twenty-five tasks": Case(
        measured=True, tasks=25, records=1, rows=(12, 48, 192), shared=0.7
    ),
    "measured, sixty tasks": Case(measured=True, tasks=60, records=1, rows=(8, 32), shared=0.7),
    "measured, checkpoints": Case(measured=True, records=6, rows=(16,), rate=0.05, open=_STILL),
    "measured, shared, checkpoints": Case(
        measured=True, records=6, rows=(16,), shared=1.0, turns=1.0
    ),
    "measured, shared lines by family, checkpoints": replace(
        _SHARED, records=6, turns=1.0, twice=False
    ),
    "planted families": Case(tasks=9, family=1.0, finds=(FAMILY, "groups", "headline")),
    "planted families, batches": Case(
        tasks=9, rows=(4, 8, 32), family=1.0, finds=(FAMILY, "groups", "headline")
    ),
    "planted families, measured": Case(
        tasks=9, measured=True, records=1, rows=(64,), family=0.7, finds=(FAMILY, "groups")
    ),
    "planted families, lines by family": Case(
        tasks=9, measured=True, records=1, rows=(16, 64, 256), family=0.5, finds=(FAMILY, "groups")
    ),
    "planted families, lengths": Case(
        tasks=9,
        measured=True,
        records=1,
        rows=(16, 64, 256),
        lengths=1.15,
        shared=0.7,
        family=0.5,
        finds=(FAMILY, "groups"),
    ),
    "planted side": Case(side=1.0, finds=(SIDES,)),
    "planted side, measured": Case(
        measured=True, records=1, rows=(64,), shared=1.0, side=1.0, finds=(SIDES,)
    ),
    "planted side, two tasks": Case(tasks=2, records=200, side=1.5, finds=(SIDES,)),
    "planted depth": Case(depth=2.0, finds=(DEPTH,)),
    "planted trend": Case(trend=1.0, finds=(TIME,)),
    "planted trend, memory": Case(trend=2.0, memory=0.5, records=100, finds=(TIME,)),
    "planted trend, two tasks": Case(tasks=2, records=200, trend=3.0, finds=(TIME,)),
    "planted change, measured": Case(
        measured=True, records=6, rows=(64,), shared=1.0, rate=0.05, finds=(TIME,)
    ),
    "planted harm": Case(tasks=6, family=2.0, opposed=True, finds=("harm",)),
}


class Branches(nn.Module):
    """A sum of small layers; those of the encoder see one half of the inputs, the others the rest.

    The n-th branches of both sides begin with the same weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        for side in (self.encoder, self.decoder):
            side.layers = nn.ModuleList(
                nn.Linear(INPUTS, HIDDEN, bias=False) for _ in range(BRANCHES)
            )
        self.decoder.load_state_dict(self.encoder.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs of every branch `[2, K, rows, D]` -> `[rows]`."""
        outputs = [
            torch.tanh(layer(x)).sum(-1)
            for side, by_branch in zip((self.encoder, self.decoder), inputs, strict=True)
            for layer, x in zip(side.layers, by_branch, strict=True)
        ]
        return torch.stack(outputs).sum(0) / math.sqrt(2 * BRANCHES * HIDDEN)


class Rows:
    """The rows of all tasks, step by step."""

    def __init__(self, case: Case, draw: np.random.Generator) -> None:
        self.case, self.draw = case, draw
        self.names = [f"t{i}" for i in range(case.tasks)]
        self.families = [i // 3 for i in range(case.tasks)]
        sizes = [case.rows[family % len(case.rows)] for family in self.families]
        self.sizes = sizes
        self.owner = np.repeat(np.arange(case.tasks), sizes)
        shape = (2, INPUTS)
        curve = draw.normal(size=INPUTS)  # the same over the inputs of both sides
        relatives = draw.normal(size=(case.tasks, *shape))[self.families]
        if case.opposed:
            signs = np.where(np.array(self.families) % 2, -1.0, 1.0)
            relatives = relatives[:1] * signs[:, None, None]
        self.own = draw.normal(size=(case.tasks, *shape))
        # [T, 2, D]; opposed tasks have nothing in common
        self.curves = curve * (not case.opposed) + case.family * relatives
        self.curves[:, 1] += case.side * self.own[:, 1]
        self.inputs = self._normal(len(self.owner), 2, INPUTS)
        self.noise = self._tailed(len(self.owner))
        self.common = float(draw.normal())
        self.lengths = np.ones(len(self.owner))

    def _normal(self, *shape: int) -> np.ndarray:
        return self.draw.normal(size=shape)

    def _tailed(self, num: int) -> np.ndarray:
        tails = self.case.tails
        return self._normal(num) if math.isinf(tails) else self.draw.standard_t(tails, num)

    def __call__(self, progress: float) -> tuple[Tensor, Tensor]:
        """Inputs `[2, K, rows, D]` and labels `[rows]` of the next step."""
        case, num = self.case, len(self.owner)
        keep, new = case.memory, math.sqrt(1 - case.memory**2)
        self.inputs = keep * self.inputs + new * self._normal(num, 2, INPUTS)
        self.noise = keep * self.noise + new * self._tailed(num)
        self.common = keep * self.common + new * float(self.draw.normal())
        if case.lengths:
            self.lengths = np.exp(case.lengths * self._normal(num))
        if case.shared:
            line = np.concatenate([np.arange(size) for size in self.sizes])  # of its task
            first = np.flatnonzero(self.owner == np.argmax(self.sizes))  # the largest set
            line = np.where(self.draw.random(num) < case.shared, first[line], np.arange(num))
            self.inputs, self.lengths = self.inputs[line], self.lengths[line]
        curves = (self.curves + case.trend * progress * self.own)[self.owner]
        labels = (self.inputs * curves).sum((1, 2)) / math.sqrt(INPUTS)
        labels += case.noise * (1 + (case.drift - 1) * progress) * self.noise
        labels += case.common * self.common
        deeper = np.arange(BRANCHES) / (BRANCHES - 1) * case.depth
        inputs = self.inputs.swapaxes(0, 1)[:, None].repeat(BRANCHES, 1)  # [2, K, rows, D]
        if case.depth:
            inputs = inputs + deeper[:, None, None] * self._normal(*inputs.shape)
        return torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


def record(case: Case, model: Branches, rows: Rows, folder: Path) -> Run:
    """Train on the rows, and record every step."""
    rule = GradVac() if case.vaccine else Sum()
    aligner = Aligner(model, rows.names, rule, engine="one_backward")
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    owner = torch.tensor(rows.owner)
    share = 1 / torch.tensor(rows.sizes, dtype=torch.float32)[owner]  # a task's mean
    path = folder / "record.bin"
    path.unlink(missing_ok=True)
    with Recorder(path, every=1) as recorder:
        for step in range(1, case.records + 1):
            inputs, labels = rows((step - 1) / max(1, case.records - 1))
            losses = (model(inputs) - labels).square() * share
            optimizer.zero_grad()
            recorder(step, aligner.backward(losses, owner))
            if case.rate:
                optimizer.step()
    return _run(rows, read_record(path), ())


def record_still(case: Case, model: Branches, rows: Rows) -> Run:
    """What `record` finds where weights stand still: many steps at once, as tasks of one batch."""
    num, together = case.tasks, max(1, min(case.records, _TASKS_AT_ONCE // case.tasks))
    names = [f"{step} {name}" for step in range(together) for name in rows.names]
    aligner = Aligner(model, names, Sum(), engine="one_backward")
    cosines, norms = list[Tensor](), list[Tensor]()
    for start in range(0, case.records, together):
        every = range(min(together, case.records - start))
        steps = [rows((start + step) / max(1, case.records - 1)) for step in every]
        inputs, labels = torch.cat([x for x, _ in steps], dim=2), torch.cat([y for _, y in steps])
        owner = torch.cat([torch.tensor(rows.owner) + step * num for step in every])
        share = 1 / torch.tensor(rows.sizes, dtype=torch.float32)[owner % num]
        found = aligner.backward((model(inputs) - labels).square() * share, owner)
        shape = (len(every), num)
        pairs = found.known_similarity.unflatten(2, shape).unflatten(1, shape)
        cosines.append(pairs[:, every, :, every])  # [S, K, T, T]
        norms.append(found.norms.unflatten(1, shape).swapaxes(0, 1))
    similarity = torch.cat(cosines).numpy()
    update = np.ones(similarity.shape[:2], np.float32)
    recorded = Record(
        tuple(rows.names),
        found.components,
        np.arange(1, case.records + 1),
        similarity,
        target=np.full_like(similarity, np.nan),
        active=np.zeros(similarity.shape, bool),
        weights=np.ones(similarity.shape[:3], np.float32),
        norms=torch.cat(norms).numpy(),
        update_cosine=update,
        update_ratio=update,
        rule="",
    )
    return _run(rows, recorded, ())


def turn(model: Branches, rows: Rows, angle: float) -> None:
    """Turn the weights of each side in a random direction; the curve stays where it is."""
    for side, curve in zip((model.encoder, model.decoder), rows.curves[0], strict=True):
        rest = np.eye(INPUTS) - np.outer(curve, curve) / (curve @ curve)
        plane = np.linalg.qr(rest @ rows.draw.normal(size=(INPUTS, 2)))[0]
        change = angle * (np.outer(*plane.T) - np.outer(*plane.T[::-1]))
        turned = torch.linalg.matrix_exp(torch.tensor(change, dtype=torch.float32))
        for layer in side.layers:
            layer.weight.data @= turned


def measure_on_set(case: Case, model: Branches, rows: Rows) -> Run:
    """Measure on one set of lines, at every checkpoint of a training on other rows."""
    lines = [(*rows(0.0), torch.tensor(rows.lengths, dtype=torch.float32)) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    same, different = list[Similarities](), list[Similarities]()

    def loss(batch: int, task: int) -> Tensor:
        inputs, labels, lengths = lines[batch]
        mine = torch.tensor(rows.owner == task)
        return ((model(inputs[:, :, mine]) - labels[mine]).square() * lengths[mine]).sum()

    batches = {
        name: [lambda b=b, t=t: loss(b, t) for b in range(len(lines))]  # type: ignore[misc]
        for t, name in enumerate(rows.names)
    }
    for checkpoint in range(1, case.records + 1):
        found = measure(model, batches, step=checkpoint)
        same.append(found.same["all_layer"])
        different.append(found.different["all_layer"])
        for _ in range(5 if case.rate else 0):
            inputs, labels = rows(0.0)
            optimizer.zero_grad()
            (model(inputs) - labels).square().mean().backward()
            optimizer.step()
        if case.turns:
            turn(model, rows, case.turns)
    return _run(rows, None, (concatenate(same), concatenate(different)))


def _run(rows: Rows, recorded: object, measured: tuple[Similarities, ...]) -> Run:
    names, draw = tuple(rows.names), rows.draw
    places = draw.normal(size=(len(names), 3))
    if rows.case.family:  # distances of relatives are small, where relatives are planted
        places = draw.normal(size=(len(names), 3))[rows.families] + 0.3 * places
    far = np.linalg.norm(places[:, None] - places[None], axis=-1)
    scores = dict(zip(names, draw.normal(size=len(names)).tolist(), strict=True))
    return Run(
        name="one",
        path=Path("one"),
        record=recorded,  # type: ignore[arg-type]
        measured=measured,
        metrics=[],
        scores=TaskScores("F1", scores),
        settings="",
        signature={},
        families={n: f"f{f}" for n, f in zip(names, rows.families, strict=True)},
        distances=KnownDistances(names, far, "distance"),
    )


def make(case: Case, seed: int, folder: Path) -> tuple[Run, Run | None]:
    """A run, and a second one of the same start on other rows if asked for."""
    runs = []
    for copy in range(2 if case.twice else 1):
        torch.manual_seed(seed)
        model = Branches()
        rows = Rows(case, np.random.default_rng([seed, 0]))  # the same curves
        rows.draw = np.random.default_rng([seed, 1 + copy])
        if case.measured:
            made = measure_on_set(case, model, rows)
        elif case.rate:
            made = record(case, model, rows, folder)
        else:
            made = record_still(case, model, rows)
        runs.append(replace(made, name=f"run{copy}"))
    return runs[0], runs[1] if len(runs) > 1 else None


def kept(case: Case, seed: int, folder: Path) -> tuple[Run, Run | None]:
    """What `make` made of this case and seed before, if it did."""
    path = folder / f"{zlib.crc32(repr(case).encode()):08x}-{seed}.pickle"
    if not path.exists():
        path.write_bytes(pickle.dumps(make(case, seed, folder)))
    runs: tuple[Run, Run | None] = pickle.loads(path.read_bytes())
    return runs


def claims(case: Case, first: Run, second: Run | None) -> set[str]:
    """Kinds of sentences that claim something, without those that may be true in a null."""
    everything = summarise(first)
    said = [sentence for sentence in everything if sentence.claims]
    kinds = {sentence.about for sentence in said}
    kinds |= {"harm" for sentence in said if "push" in sentence.text or "raise" in sentence.text}
    if len(first.tasks) > 2:
        advice = advise_runs([first])
        kinds |= {"companions"} if advice.promised.any() else set()
        kinds |= {"groups"} if advice.groups else set()
    headline = run_headline(first, everything)
    kinds |= {"headline"} if headline.claims and headline.about not in case.open else set()
    if second is not None:
        texts = [s.text for s in describe_difference(first, second) if s.claims]
        kinds |= {"pattern" if "same pairs" in text else "difference" for text in texts}
    return kinds - case.open


def show(name: str, case: Case, found: Counter[str]) -> str:
    """The rates of a case in one line; those of a null that are above 8 % stand out."""
    num = found["seeds"]
    kinds = {kind: times / num for kind, times in found.items() if kind not in ("seeds", "seconds")}
    if case.finds:
        kinds = {kind: kinds.get(kind, 0.0) for kind in case.finds}
    rates = ", ".join(
        f"{kind} {rate:.1%}{' (!)' if rate > 0.08 and not case.finds else ''}"
        for kind, rate in sorted(kinds.items(), key=lambda item: -item[1])
    )
    return f"{name} [{num}]: {rates or 'nothing claimed'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", default="200", help="how many, or from:to")
    parser.add_argument("--runs", type=Path, help="folder for what networks recorded")
    parser.add_argument("--only-runs", action="store_true", help="train, and ask nothing yet")
    parser.add_argument("--out", type=Path, help="counts of finished seeds, to be gone on with")
    args = parser.parse_args()
    start, _, stop = args.seeds.rpartition(":")
    torch.set_num_threads(1)
    counts: dict[str, dict[str, list[str]]] = {}
    if args.out and args.out.exists():
        counts = json.loads(args.out.read_text())
    for name in args.cases:
        done = counts.setdefault(name, {})
        missing = [seed for seed in range(int(start or 0), int(stop)) if str(seed) not in done]
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            for seed in missing:
                made = kept(CASES[name], seed, args.runs or Path(folder))
                if args.only_runs:
                    continue
                done[str(seed)] = sorted(claims(CASES[name], *made))
                if args.out:
                    args.out.write_text(json.dumps(counts))
        if not done:
            continue
        found = Counter(kind for kinds in done.values() for kind in kinds)
        found["seeds"] = len(done)
        each = (time.process_time() - began) / max(1, len(missing))
        print(f"{show(name, CASES[name], found)}  ({each:.2f} s each)", flush=True)


if __name__ == "__main__":
    main()
