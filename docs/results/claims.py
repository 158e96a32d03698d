"""The paper's claims and our own questions, each a difference of two methods."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gradvac.analysis.statistics import holm
from gradvac.lab.experiments import Comparison, compare_runs
from gradvac.lab.experiments.statistics import CLEAR, LEVEL, SUGGESTIVE, Against

_FEWEST = 2  # seeds
_BEST = "dev/loss, best weights"

Losses = Callable[[str], Mapping[int, Mapping[int, float]]]
Shared = Callable[[Sequence[str]], Mapping[int, Sequence[Path]]]


class Claim(NamedTuple):
    """A method is better or worse than another.

    Attributes:
        said: In words.
        method: Of our sweeps.
        baseline: What it is compared with.
        paper: The paper's difference of average BLEU; None: it says nothing.
        is_primary: Whether it is one of the few that the paper stands on; only these can be clear.
    """

    said: str
    method: str
    baseline: str
    paper: float | None = None
    is_primary: bool = False


PAPER = (
    Claim(
        *("GradVac by layer, low-resource tasks, against joint training", "gradvac", "joint", 1.41),
        is_primary=True,
    ),
    Claim("... with twice the steps", "long_gradvac", "long_joint", 1.41),
    Claim("... at full length", "full_gradvac", "full_joint", 1.41),
    Claim("... with one target for the whole model", "gradvac_model", "joint", 0.82),
    Claim("... with the fixed target 0.5", "gradvac_fixed", "joint", 0.51),
    Claim("... on all tasks", "gradvac_all", "joint", 1.16),
    Claim("PCGrad by layer against joint training", "pcgrad_layers", "joint", 0.39),
    Claim("PCGrad, whole model", "pcgrad", "joint", 0.17),
    Claim("GradNorm", "gradnorm", "joint", -1.78),
    Claim("MGDA", "mgda", "joint", -2.11),
    Claim("Bilingual models", "bilingual", "joint", -1.95),
    Claim("GradVac by layer against PCGrad by layer", "gradvac", "pcgrad_layers", 1.02),
    Claim("Into English: GradVac by layer", "into_english_gradvac", "into_english", 0.73, True),
    Claim("... for the whole model", "into_english_gradvac_model", "into_english", 0.38),
    Claim("... with the fixed target 0.5", "into_english_gradvac_fixed", "into_english", 0.24),
    Claim("... PCGrad by layer", "into_english_pcgrad_layers", "into_english", 0.32),
    Claim("... PCGrad, whole model", "into_english_pcgrad", "into_english", 0.18),
    Claim("... GradNorm", "into_english_gradnorm", "into_english", 0.10),
    Claim("... MGDA", "into_english_mgda", "into_english", 0.04),
    Claim("... Bilingual models", "into_english_bilingual", "into_english", -3.58),
    Claim("19 languages: temperature 5 against 1", "many_temperature5", "many_temperature1", 0.07),
    Claim(
        *("19 languages: GradVac against temperature 5", "many_gradvac", "many_temperature5", 0.83),
        is_primary=True,
    ),
    Claim("Table 6: high-resource tasks against low", "gradvac_high", "gradvac", -0.11),
    Claim("Table 6: all tasks against low-resource ones", "gradvac_all", "gradvac", -0.25),
    Claim("Table 7: whole model against layers", "gradvac_model", "gradvac", -0.59),
    Claim("Table 7: encoder and decoder against layers", "gradvac_sides", "gradvac", -0.23),
    Claim("Table 7: matrices against layers", "gradvac_matrices", "gradvac", -0.37),
    Claim("Table 8: beta 0.1 against 0.01", "gradvac_beta1", "gradvac", -0.58),
    Claim("Table 8: beta 0.001 against 0.01", "gradvac_beta3", "gradvac", -0.30),
)

_MADE = (
    *("gradvac", "gradvac_model", "gradvac_fixed", "pcgrad_layers", "pcgrad", "gradnorm", "mgda"),
)

OURS = (
    Claim("Temperature 2 instead of 5", "temperature2", "joint"),
    Claim("... with twice the steps", "long_temperature2", "long_joint"),
    Claim("... at full length", "full_temperature2", "full_joint"),
    Claim("... into English", "into_english_temperature2", "into_english"),
    Claim("... 19 languages", "many_temperature2", "many_temperature5"),
    Claim("Temperature 3 instead of 5", "temperature3", "joint"),
    Claim("Temperature 1 instead of 5", "temperature1", "joint"),
    Claim("No language more than 15 times (UniMax)", "unimax", "joint"),
    Claim("Low-resource tasks with half the weight", "half_weight", "joint"),
    Claim("Temperature 5, then 1 (cooldown)", "cooldown", "joint"),
    Claim("High-resource tasks first, then all", "high_then_joint", "joint"),
    Claim("Target 0.5, gradients as long as before", "gradvac_fixed_length", "joint"),
    Claim("GradVac on four times the batch (a)", "large_batches_gradvac", "large_batches"),
    Claim("GradVac without the noise of batches (b)", "without_noise", "joint"),
    Claim("GradVac after Adam's preconditioning (f)", "preconditioned", "joint"),
    Claim("GradVac in the encoder alone (d)", "encoder_only", "joint"),
    Claim("... in the decoder alone", "decoder_only", "joint"),
    Claim("... in the embedding table alone", "table_only", "joint"),
    Claim("GradVac in the first half of training (e)", "early", "joint"),
    Claim("... in the second half", "late", "joint"),
    Claim("GradVac in a smaller model (g)", "small_gradvac", "small"),
    Claim("Control: the sum, as long as GradVac's update", "norm", "joint"),
    Claim("Control: targets of other pairs", "shuffled", "joint"),
    Claim("Control: random targets", "random", "joint"),
    Claim("Control: GradVac's mean weights", "frozen", "joint"),
    Claim("19 languages: control, the sum, as long", "many_norm", "many_temperature5"),
    Claim("... control, GradVac's mean weights", "many_frozen", "many_temperature5"),
    Claim("... GradVac against its mean weights", "many_gradvac", "many_frozen"),
    Claim("... GradVac against the sum, as long", "many_gradvac", "many_norm"),
    Claim("... GradVac without the noise of batches", "many_without_noise", "many_temperature5"),
    Claim("... GradVac, gradients as long as before", "many_length", "many_temperature5"),
    Claim("... GradVac, updates as long as the sum", "many_direction", "many_temperature5"),
    Claim("... the same against GradVac", "many_direction", "many_gradvac"),
)

_INTO = "into_english_temperature2"
TUNED = (
    Claim("GradVac by layer, low-resource tasks", "temperature2_gradvac", "temperature2"),
    Claim("... with twice the steps", "long_temperature2_gradvac", "long_temperature2"),
    Claim("... with one target for the whole model", "temperature2_gradvac_model", "temperature2"),
    Claim("... with the fixed target 0.5", "temperature2_gradvac_fixed", "temperature2"),
    Claim("... on all tasks", "temperature2_gradvac_all", "temperature2"),
    Claim("... without the noise of batches", "temperature2_without_noise", "temperature2"),
    Claim("PCGrad by layer", "temperature2_pcgrad_layers", "temperature2"),
    Claim("PCGrad, whole model", "temperature2_pcgrad", "temperature2"),
    Claim("GradNorm", "temperature2_gradnorm", "temperature2"),
    Claim("MGDA", "temperature2_mgda", "temperature2"),
    Claim("Bilingual models", "bilingual", "temperature2"),
    Claim("Into English: GradVac by layer", f"{_INTO}_gradvac", _INTO),
    Claim("... with one target for the whole model", f"{_INTO}_gradvac_model", _INTO),
    Claim("... with the fixed target 0.5", f"{_INTO}_gradvac_fixed", _INTO),
    Claim("... PCGrad by layer", f"{_INTO}_pcgrad_layers", _INTO),
    Claim("... PCGrad, whole model", f"{_INTO}_pcgrad", _INTO),
    Claim("... GradNorm", f"{_INTO}_gradnorm", _INTO),
    Claim("... MGDA", f"{_INTO}_mgda", _INTO),
    Claim("... Bilingual models", "into_english_bilingual", _INTO),
)

CONSTRUCTED = (
    *(claim for claim in PAPER if claim.baseline == "joint" and claim.method in _MADE),
    Claim("Temperature 2 instead of 5", "temperature2", "joint"),
    Claim("GradVac at temperature 2", "temperature2_gradvac", "temperature2"),
)


class Answer(NamedTuple):
    """What the runs say of a claim; `until` is what runs say that were stopped."""

    claim: Claim
    num_seeds: int
    found: Against | None
    loss: Against | None
    until: str = ""


def claim_tables(shared: Shared, losses: Losses) -> dict[str, str]:
    """The tables "paper", "ours" and "tuned" in Markdown.

    Args:
        shared: From methods to the runs of the seeds that all of them have.
        losses: From a method to the development losses of its runs by seed and step.
    """
    answers = {
        name: [_answer(claim, shared, losses) for claim in claims]
        for name, claims in (("paper", PAPER), ("ours", OURS), ("tuned", TUNED))
    }
    tables = {name: _table(own, with_paper=name == "paper") for name, own in answers.items()}
    return tables | {"count": _count(answers["paper"])}


def constructed_table(shared: Shared, losses: Losses) -> str:
    """The table about constructed languages, as `claim_tables` has them; without the paper's."""
    claims = [claim._replace(paper=None) for claim in CONSTRUCTED]
    return _table([_answer(claim, shared, losses) for claim in claims], with_paper=False)


def _answer(claim: Claim, shared: Shared, losses: Losses) -> Answer:
    runs = shared((claim.baseline, claim.method))
    if len(runs) < _FEWEST:
        until = _until(losses(claim.baseline), losses(claim.method))
        return Answer(claim, len(runs), None, None, until)
    paths = [path for own in runs.values() for path in own]
    found = compare_runs(paths, baseline=claim.baseline)
    return Answer(
        claim,
        len(runs),
        found.rows[0].cells[claim.method].against,
        _best_loss(found, claim.method),
    )


def _until(first: Mapping[int, Mapping[int, float]], own: Mapping[int, Mapping[int, float]]) -> str:
    """The differences by seed at the last step that two seeds of both methods have validated."""
    changes: dict[int, list[float]] = {}
    for seed in sorted(set(first) & set(own)):
        for step in sorted(set(first[seed]) & set(own[seed])):
            changes.setdefault(step, []).append(own[seed][step] - first[seed][step])
    last = max((step for step, found in changes.items() if len(found) >= _FEWEST), default=None)
    if last is None:
        return ""
    return f"{', '.join(f'{change:+.4f}' for change in changes[last])} at step {last:,}"


def _best_loss(found: Comparison, method: str) -> Against | None:
    rows = [row for row in found.losses if row.name == _BEST and method in row.cells]
    return rows[0].cells[method].against if rows else None


def _count(answers: Sequence[Answer]) -> str:
    """How many claims had which end."""
    known = [answer for answer in answers if answer.found is not None]
    said = Counter(
        verdict(answer.found, p_value)
        for answer, p_value in zip(known, _adjusted(answers), strict=True)
        if answer.found is not None
    )
    ends = [f"{number} {name}" for name, number in said.most_common()]
    if len(known) < len(answers):
        ends.append(f"{len(answers) - len(known)} not run")
    return f"Of the {len(answers)} rows about the paper's claims: {', '.join(ends)}.\n"


def _adjusted(answers: Sequence[Answer]) -> list[float]:
    """P-values of the primary claims that were run, corrected among each other; of others NaN."""
    known = [
        answer.found.p_value if answer.claim.is_primary else math.nan
        for answer in answers
        if answer.found is not None
    ]
    return holm(known)


def _table(answers: Sequence[Answer], *, with_paper: bool) -> str:
    """One row a claim."""
    adjusted = iter(_adjusted(answers))
    first = ["claim", "verdict", "paper"] if with_paper else ["question", "verdict"]
    head = [*first, "here (95 % interval)", "seeds", "development loss"]
    lines = [head, ["---"] * len(head)]
    for claim, num_seeds, found, loss, until in answers:
        paper = [] if claim.paper is None else [f"{claim.paper:+.2f}"]
        if found is None:
            said = "stopped" if until else "not run"
            lines.append([claim.said, said, *paper, "", f"{num_seeds}", until])
            continue
        said = verdict(found, next(adjusted))
        here = f"{found.difference:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
        if paper and not found.low <= float(paper[0]) <= found.high:
            paper = [f"{paper[0]}, outside"]
        about = "" if loss is None else f"{loss.difference:+.4f}, {verdict(loss, math.nan, 4)}"
        lines.append([claim.said, f"**{said}**", *paper, here, f"{num_seeds}", about])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def verdict(found: Against, adjusted: float, digits: int = 2) -> str:
    """What a difference shows, in the words of `gradvac compare`.

    Args:
        found: The difference of two methods that were compared by themselves.
        adjusted: Its p-value among the primary claims; NaN if it is none.
        digits: Decimals to show.
    """
    word = SUGGESTIVE if found.verdict == CLEAR and not adjusted < LEVEL else found.verdict
    return replace(found, verdict=word).in_words(digits)
