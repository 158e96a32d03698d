"""The paper's claims and our own questions: each a difference of two methods."""

from __future__ import annotations

from typing import NamedTuple


class Claim(NamedTuple):
    """A method is better or worse than another.

    Attributes:
        said: In words.
        method: Of our sweeps.
        baseline: What it is compared with.
        paper: The paper's difference of average BLEU; None: it says nothing.
        is_primary: Whether the sweep asked it beforehand; only these can be clear.
    """

    said: str
    method: str
    baseline: str
    paper: float | None = None
    is_primary: bool = False


_FULL = "full-temperature=5.0"
PAPER = (
    Claim(
        *("GradVac by layer, low-resource tasks, against joint training", "gradvac", "joint", 1.41),
        is_primary=True,
    ),
    Claim("... with twice the steps", "long_gradvac", "long_joint", 1.41),
    Claim("... at full length", "full_gradvac", _FULL, 1.41),
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

OURS = (
    Claim("Temperature 2 instead of 5", "temperature2", "joint", is_primary=True),
    Claim("... with twice the steps", "long_temperature2", "long_joint"),
    Claim("... at full length", "full-temperature=2.0", _FULL),
    Claim("... into English", "into_english_temperature2", "into_english"),
    Claim("... 19 languages", "many_temperature2", "many_temperature5"),
    Claim("Temperature 3 instead of 5", "temperature3", "joint"),
    Claim("Temperature 1 instead of 5", "temperature1", "joint"),
    Claim("... at full length", "full-temperature=1.0", _FULL),
    Claim("No language more than 15 times (UniMax)", "unimax", "joint"),
    Claim("Low-resource tasks with half the weight", "half_weight", "joint"),
    Claim("Temperature 5, then 1 (cooldown)", "cooldown", "joint"),
    Claim("High-resource tasks first, then all", "high_then_joint", "joint"),
    Claim("GradVac on four times the batch (a)", "large_batches_gradvac", "large_batches"),
    Claim("GradVac without the noise of batches (b)", "without_noise", "joint"),
    Claim(
        *("GradVac on top of temperature 2 (c)", "temperature2_gradvac", "temperature2"),
        is_primary=True,
    ),
    Claim("... with twice the steps", "long_temperature2_gradvac", "long_temperature2"),
    Claim("GradVac in the encoder alone (d)", "encoder_only", "joint"),
    Claim("... in the decoder alone", "decoder_only", "joint"),
    Claim("... in the embedding table alone", "table_only", "joint"),
    Claim("GradVac in the first half of training (e)", "early", "joint"),
    Claim("... in the second half", "late", "joint"),
    Claim("GradVac after Adam's preconditioning (f)", "preconditioned", "joint"),
    Claim("GradVac in a smaller model (g)", "small_gradvac", "small"),
    Claim("Target 0.5, gradients as long as before", "gradvac_fixed_length", "joint"),
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

CONSTRUCTED = (
    *(
        claim._replace(paper=None, is_primary=claim.method == "gradvac")
        for claim in (PAPER[0], *PAPER[3:5], *PAPER[6:10])
    ),
    Claim("Temperature 2 instead of 5", "temperature2", "joint"),
    Claim("GradVac at temperature 2", "temperature2_gradvac", "temperature2"),
)

_GRADVAC = (
    *("gradvac", "gradvac_all", "gradvac_high", "gradvac_model", "gradvac_sides"),
    *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3", "without_noise", "preconditioned"),
    *("encoder_only", "decoder_only", "table_only", "early", "late"),
)
_OTHERS = ("norm", "shuffled", "random", "frozen", "pcgrad", "pcgrad_layers")
_INTO = ("gradvac", "gradvac_model", "pcgrad", "pcgrad_layers")
TOGETHER = (  # methods that may all be the same, and what they are compared with
    ("GradVac with moving targets, all variants", "joint", _GRADVAC),
    ("its controls, and PCGrad", "joint", _OTHERS),
    ("both", "joint", _GRADVAC + _OTHERS),
    (
        "GradVac and PCGrad into English",
        "into_english",
        tuple(f"into_english_{rule}" for rule in _INTO),
    ),
)
