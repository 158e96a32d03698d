"""The questions of the results page: which methods stand in a table together."""

from typing import NamedTuple


class Question(NamedTuple):
    """A table: its file, what is asked, and the methods; the first is the baseline."""

    name: str
    asked: str
    methods: tuple[str, ...]


_RULES = (
    *("gradnorm", "mgda", "pcgrad", "pcgrad_layers", "gradvac_fixed", "gradvac_model", "gradvac"),
)

QUESTIONS = (
    Question(
        "table1",
        "Table 1: do rules beat joint training at the paper's temperature, 5?",
        (
            *("joint", "gradnorm", "mgda", "pcgrad", "pcgrad_layers"),
            *("gradvac_fixed", "gradvac_model", "gradvac", "gradvac_all"),
        ),
    ),
    Question(
        "bilingual",
        "Table 1, row 1: one model for all, or one for each language?",
        ("joint", "bilingual"),
    ),
    Question(
        "main",
        "The same with more seeds: GradVac and the temperature",
        ("joint", "gradvac", "temperature2"),
    ),
    Question(
        "long",
        "The same with twice the steps",
        ("long_joint", "long_gradvac", "long_temperature2", "long_temperature2_gradvac"),
    ),
    Question(
        "full",
        "The same at full length: twice the layers, and more than four times the tokens",
        ("full_joint", "full_gradvac", "full_temperature2"),
    ),
    Question(
        "long_tuned",
        "Does GradVac help on top of the tuned mixture, with twice the steps?",
        ("long_temperature2", "long_temperature2_gradvac"),
    ),
    Question(
        "variants",
        "Variants of GradVac against joint training",
        ("joint", "gradvac", "gradvac_all", "gradvac_model", "gradvac_fixed"),
    ),
    Question(
        "lengths",
        "Is it the length of the update? Targets of 0.5 with gradients as long as they were",
        ("joint", "gradvac_fixed", "gradvac_fixed_length"),
    ),
    Question(
        "front",
        "Which trade-off between high- and low-resource languages does each method take?",
        (
            *("joint", "temperature1", "temperature2", "temperature3", "unimax", "gradvac"),
            *("gradvac_model",),
            *("gradvac_fixed", "gradvac_fixed_length", "temperature2_gradvac"),
        ),
    ),
    Question(
        "attempts",
        "Make it work: without the noise of batches, after Adam, in some components, early or late",
        (
            *("joint", "gradvac", "without_noise", "preconditioned", "encoder_only"),
            *("decoder_only", "table_only", "early", "late"),
        ),
    ),
    Question(
        "tuned",
        "Table 1 at the tuned temperature, 2: do rules help on top of the tuned mixture?",
        (
            *("temperature2", *(f"temperature2_{rule}" for rule in _RULES)),
            *("temperature2_gradvac_all", "temperature2_without_noise"),
        ),
    ),
    Question(
        "mixture",
        "What does the mixture alone do?",
        (
            *("joint", "temperature1", "temperature2", "temperature3", "half_weight", "unimax"),
            *("cooldown", "high_then_joint"),
        ),
    ),
    Question(
        "controls",
        "What is left of GradVac without its directions, its targets, its adapting?",
        ("joint", "gradvac", "norm", "shuffled", "random", "frozen"),
    ),
    Question(
        "into_english",
        "Table 1 into English, at the paper's temperature",
        (
            *("into_english", *(f"into_english_{rule}" for rule in _RULES)),
            "into_english_temperature2",
        ),
    ),
    Question(
        "into_english_bilingual",
        "Table 1 into English, row 1: one model for all, or one for each language?",
        ("into_english", "into_english_bilingual"),
    ),
    Question(
        "into_english_tuned",
        "Table 1 into English, at the tuned temperature",
        (
            *("into_english_temperature2",),
            *(f"into_english_temperature2_{rule}" for rule in _RULES),
        ),
    ),
    Question(
        "many",
        "Table 2 and figure 6 in miniature: 19 languages",
        ("many_temperature5", "many_temperature1", "many_temperature2", "many_gradvac"),
    ),
    Question(
        "many_controls",
        "Why is GradVac worse with 19 languages?",
        (
            *("many_temperature5", "many_gradvac", "many_norm", "many_frozen"),
            *("many_without_noise", "many_length", "many_direction"),
        ),
    ),
    Question(
        "large_batches",
        "Four times the batch before the rule, and a quarter of the steps",
        ("large_batches", "large_batches_gradvac"),
    ),
    Question("small", "A smaller model", ("small", "small_gradvac")),
    Question(
        "tables6to8",
        "Tables 6 to 8: which tasks, which granularity, which beta?",
        (
            *("gradvac", "gradvac_high", "gradvac_all", "gradvac_model", "gradvac_sides"),
            *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3"),
        ),
    ),
)

CONSTRUCTED = Question(
    "constructed",
    "Table 1 on constructed languages",
    ("joint", *_RULES, "temperature2", "temperature2_gradvac"),
)
