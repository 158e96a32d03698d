"""Write the tables and pictures of these pages from the published numbers.

    python docs/results/write_results.py        (a test compares the pages with what this writes)

`published.json` is what `compute.py` finds in the runs that are kept: for every method its mean
score with the reach of its 95 % interval, on average, by resource level and by task, and its best
development loss; every difference with its interval; cosines, and what rules did to the update.
The other files have the scores of single runs. The text between two marks of a page is written
here, all other text by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import equal_compute
import finish_alone
import transfer
from auto import law_table, runs_table
from numpy.typing import NDArray
from pictures import MANY, Row, named, pictures

from gradvac.analysis.figures.style import STYLE, unknown_glyphs_as_boxes
from gradvac.utils.files import write_text

HERE = Path(__file__).parent
_BEGIN, _END = "<!-- written by write_results.py: {} -->\n", "<!-- until here -->\n"
_LEVEL = 0.05
_KINDS = {"pos": "Parts of speech", "ner": "Entities"}
_TAGGING = {  # rule -> the paper's difference of F1
    "pos": {"GradVac": 0.3, "PCGrad": 0.1, "GradNorm": -0.2, "MGDA": -0.2},
    "ner": {"GradVac": 0.9, "PCGrad": 0.2, "GradNorm": -0.3, "MGDA": -0.5},
}
_MOST_TASKS = 4  # with more, tables have resource levels instead
_PREDICTORS = {
    "same.decoder.mid": "decoder gradients (primary)",
    "subwords": "overlap of subwords",
    "family": "family",
    "uriel.featural": "URIEL, featural",
}
_UPDATES = {
    "cosine": ("cosine to the plain sum", ".4f"),
    "length": ("length, of the plain sum", ".3f"),
    "altered": ("pairs altered", ".0%"),
    "similarity": ("cosine between tasks", ".3f"),
    "target": ("target", ".3f"),
    "weight": ("weight of tasks it may alter", ".3f"),
    "weight_of_others": ("of the others", ".3f"),
    "weights_vary": ("weights vary", ".0%"),
}
_NOISE = {
    "cosine": ("mean cosine", ".3f"),
    "from_step_to_step": ("from step to step", ".3f"),
    "between_pairs": ("between pairs", ".3f"),
    "of_the_variance": ("of the variance", ".0%"),
    "alike": ("alike in another seed", ".2f"),
}
_LENGTHS = {
    "ratio": ("length, of the plain sum", ".2f"),
    "varies": ("that varies by", ".0%"),
    "follows": ("correlation with the cosine of the batch", "+.2f"),
    "sums_vary": ("lengths of plain sums vary by", ".0%"),
    "updates_vary": ("of updates", ".0%"),
}
_MEASURED = ("gradvac", "long_gradvac", "large_batches_gradvac", "preconditioned", "many_gradvac")
_LONGER = (
    *("gradvac", "norm", "frozen", "many_gradvac", "many_norm", "many_frozen"),
    *("many_direction", "many_length", "many_without_noise"),
)
_RULES = (
    *("gradnorm", "mgda", "pcgrad", "pcgrad_layers", "gradvac_fixed", "gradvac_model", "gradvac"),
)
_SCORES = {  # page -> mark -> the methods of a table of absolute scores
    "table1.md": {
        "scores": ("joint", *_RULES, "gradvac_all", "bilingual"),
        "long": ("long_joint", "long_gradvac", "long_temperature2", "long_temperature2_gradvac"),
        "full": ("full-temperature=5.0", "full_gradvac", "full-temperature=2.0"),
        "into_scores": (
            *("into_english", *(f"into_english_{rule}" for rule in _RULES)),
            *("into_english_bilingual", "into_english_temperature2"),
        ),
    },
    "table2.md": {
        "scores": (
            *("many_temperature5", "many_temperature1", "many_temperature2", "many_gradvac"),
            *("many_norm", "many_direction", "many_frozen", "many_length", "many_without_noise"),
        ),
    },
    "tables6to8.md": {
        "scores": (
            *("gradvac", "gradvac_high", "gradvac_all", "gradvac_model", "gradvac_sides"),
            *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3"),
        ),
    },
    "beyond.md": {
        "mixture": (
            *("joint", "temperature1", "temperature2", "temperature3", "half_weight", "unimax"),
            *("cooldown", "high_then_joint"),
        ),
        "attempts": (
            *("joint", "gradvac", "temperature2_gradvac", "gradvac_fixed_length", "without_noise"),
            *("preconditioned", "encoder_only", "decoder_only", "table_only", "early", "late"),
            *("large_batches", "large_batches_gradvac", "small", "small_gradvac"),
        ),
        "controls": ("joint", "gradvac", "norm", "shuffled", "random", "frozen"),
    },
}
_FOUR_LANGUAGES = (
    "Tatoeba, English with French (21k pairs), Czech (31k), Hindi and Turkish (3,000 each)",
    "Transformer, 2 + 2 layers, 256 wide, 8,000 pieces (full length: 4 + 4 layers)",
    "1,500 of 4,096 tokens (full length: 3,500 of 8,192), temperature 5; best development loss; "
    "greedy search",
)
_COSINES = (
    "*verses*, the Bible in twelve languages with equal data; *news*, NTREX in 18 languages, "
    "models trained on at most 7,000 pairs of Tatoeba each; *constructed*, sixteen languages of "
    "known kinship. Cosines of gradients on the same development lines for all tasks, mean of "
    "layers and checkpoints ([all cosines](geometry.md))",
    "Transformer, 4 + 4 layers, 256 wide",
    "1,000 of 8,192 tokens; three seeds, constructed four",
)
# Page -> data, model, steps, and the commands that train again.
_SETTINGS = {
    "table1.md": (
        *_FOUR_LANGUAGES,
        "# at full length: one_gpu_full, auto_four",
        "gradvac sweep one_gpu data.root=DATA --jobs 15",
    ),
    "table2.md": (
        "Tatoeba, English into 19 languages of 1,300 to 60,000 pairs",
        "Transformer, 2 + 2 layers, 256 wide, 16,000 pieces",
        "1,200 of 8,192 tokens",
        "# at full length: massive",
        "gradvac sweep one_gpu_many data.root=DATA --jobs 15",
    ),
    "table3.md": (
        "Universal Dependencies, English cut to 2,000 sentences; entities from WikiAnn and five "
        "other sources, the large ones cut to 2,000",
        "an encoder of ours, 4 layers, 512 wide, 16k pieces (the paper: multilingual BERT)",
        "3.7 epochs of 64 sentences, learning rate 3e-4 for all, temperature 2, three seeds",
        "# the encoder: examples/pretrain_encoder.py, as in the first lines of both sweeps",
        "gradvac sweep one_gpu_pos data.root=DATA model.encoder=runs/encoder --jobs 15",
        "gradvac sweep one_gpu_ner data.root=DATA model.encoder=runs/encoder --jobs 15",
    ),
    "tables6to8.md": (
        *_FOUR_LANGUAGES,
        "# at full length: tables6to8",
        "gradvac sweep one_gpu data.root=DATA --jobs 15",
    ),
    "figure1.md": (*_COSINES, "gradvac sweep one_gpu_figures data.root=DATA --jobs 6"),
    "figure2.md": (
        *_COSINES,
        "# at full length: directions, trilingual",
        "gradvac sweep one_gpu_figures data.root=DATA --jobs 6",
    ),
    "figure3.md": (*_FOUR_LANGUAGES, "gradvac sweep one_gpu data.root=DATA --jobs 15"),
    "figure4.md": (
        *_COSINES,
        "# at full length: directions",
        "gradvac sweep one_gpu_figures data.root=DATA --jobs 6",
    ),
    "figure9.md": (
        *_COSINES,
        "# at full length: sizes",
        "gradvac sweep one_gpu_figures data.root=DATA --jobs 6",
    ),
    "figure11.md": (
        *_COSINES,
        "# at full length: batches",
        "gradvac sweep one_gpu_figures data.root=DATA --jobs 6",
    ),
    "beyond.md": (
        *_FOUR_LANGUAGES,
        "# at full length: controls, mixture",
        "gradvac sweep one_gpu data.root=DATA --jobs 15",
    ),
    "constructed.md": (
        "ten [constructed languages](../languages.md), 400 to 5,000 pairs each",
        "the demo's, `configs/nmt/demo.toml`",
        "1,100 of 512 tokens, four seeds",
        "# on a GPU: train.device=cuda train.precision=bf16 train.cuda_graph=auto",
        "gradvac sweep constructed --jobs 5",
    ),
}
_ORIGIN = """**Where the numbers come from.** [runs.tar.xz](runs.tar.xz) has the scores of every run
by sentence; `python docs/results/compute.py` computes [published.json](published.json) from it, and
`write_results.py` this page's tables and pictures from that.
"""
_TAGGING_ORIGIN = """**Where the numbers come from.** [tagging.json](tagging.json) has the scores of
every run; `python docs/results/write_results.py` computes this page from it.
"""


def verdict(row: Row, digits: int = 2) -> str:
    """What a difference shows, in the words of `gradvac compare`.

    Corrected p-values are among more questions than the primary ones, which is stricter.
    """
    change, *ends = row["difference"]
    if not ends:
        return "cannot tell"
    if ends[0] <= 0 <= ends[1]:
        return f"not shown: at most {max(-ends[0], ends[1]):.{digits}f}"
    word = "clear" if row.get("primary") and row.get("outlived_correction") else "suggestive"
    return f"{word}: {'better' if change > 0 else 'worse'}"


def similarity_verdict(row: Row) -> str:
    """The same about similarity, where nothing is better or worse, and all rows were corrected.

    Where languages were tested, that counts: what seeds share may be chance.
    """
    _, low, high = row["difference"]
    if row["p"] < _LEVEL:
        return "clear" if row.get("outlived_correction") else "suggestive"
    if low > 0 or high < 0:
        return "not shown over languages"
    return f"not shown: at most {max(-low, high):.3f}"


def interval(numbers: Sequence[float], digits: int = 2) -> str:
    """A difference with its 95 % interval."""
    change, *ends = (f"{number:+.{digits}f}" for number in numbers)
    return f"{change} ({ends[0]} to {ends[1]})" if ends else change


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def claims(rows: Sequence[Row]) -> str:
    """Differences: the paper's number where it has one, ours, and what that shows."""
    with_paper = any("paper" in row for row in rows)
    head = ["", *["the paper"] * with_paper, "here (95 % interval)", "seeds", "verdict"]
    lines = []
    for row in rows:
        name = f"{row['said']} (primary)" if row.get("primary") else row["said"]
        cells = [name, *[f"{row['paper']:+.2f}" if "paper" in row else ""] * with_paper]
        cells += [interval(row["difference"]), str(row["seeds"]), f"**{verdict(row)}**"]
        lines.append(cells)
    return table(head, lines)


def similarity(rows: Sequence[Row]) -> str:
    """Differences of cosines."""
    head = ["", "here (95 % interval over seeds)", "seeds", "verdict", "over languages"]
    return table(
        head,
        [
            (
                row["said"],
                interval(row["difference"], 3),
                str(row["seeds"]),
                f"**{similarity_verdict(row)}**",
                row["over_languages"],
            )
            for row in rows
        ],
    )


def scores(by_method: Row, names: Sequence[str]) -> str:
    """Absolute scores: methods by tasks, or by resource levels if there are many tasks."""
    first = by_method[names[0]]
    kind = "tasks" if len(first["tasks"]) <= _MOST_TASKS else "levels"
    head = ["BLEU", "seeds", "average", *first[kind], "development loss"]
    lines = []
    for name in names:
        own = by_method[name]
        cells = [
            _mean(one, 2) for one in (own["average"], *(own[kind][key] for key in first[kind]))
        ]
        lines.append([name, str(own["seeds"]), *cells, _mean(own.get("loss", []), 3)])
    return table(head, lines)


def tagging(by_method: Row) -> str:
    """F1 of the rules by language, from those of every seed."""
    rows = [
        [language, *(_mean(over_seeds(own[language]), 1) for own in by_method.values())]
        for language in by_method["joint"]
    ]
    averages = (_mean(over_seeds(_average(own)), 1) for own in by_method.values())
    return table(["F1", *by_method], [*rows, ["average", *averages]])


def tagging_claims(raw: Row) -> list[Row]:
    """The rules' average F1 minus joint training's, seed by seed, beside the paper's."""
    rows = []
    for kind, papers in _TAGGING.items():
        joint = np.array(_average(raw[kind]["joint"]))
        for name, paper in papers.items():
            mean, reach = over_seeds(np.array(_average(raw[kind][name])) - joint)
            is_first = name == "GradVac"
            rows.append(
                {
                    "said": f"{_KINDS[kind]}: GradVac" if is_first else f"... {name}",
                    "paper": paper,
                    "difference": [mean, mean - reach, mean + reach],
                    "seeds": len(joint),
                    "primary": is_first,
                }
            )
    return rows


def over_seeds(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and the reach of its 95 % interval."""
    mean, _, high = equal_compute.mean_and_interval(np.asarray(values), 1 - _LEVEL)
    return mean, high - mean


def _average(by_language: Row) -> list[float]:
    return [float(mean) for mean in np.mean(list(by_language.values()), axis=0)]


def together(rows: Sequence[Row]) -> str:
    """Groups of methods that may all be the same."""
    head = ["methods", "how many (seeds)", "BLEU (95 % interval)", "do they differ?"]
    head += ["development loss", "do they differ?"]
    return table(
        head,
        [
            (
                *(row["methods"], row["num"], interval(row["bleu"])),
                *(f"p = {row['bleu_differ']:.2f}", interval(row["dev_loss"], 4)),
                f"p = {row['dev_loss_differ']:.3f}",
            )
            for row in rows
        ],
    )


def _mean(numbers: Sequence[float], digits: int) -> str:
    if not numbers:
        return "-"
    mean, *reach = (f"{number:.{digits}f}" for number in numbers)
    return f"{mean} ±\u00a0{reach[0]}" if reach else mean


def setting(data: str, model: str, steps: str, *commands: str, origin: str = _ORIGIN) -> str:
    """What was trained and how, and where the numbers are."""
    what = f"**Data**: {data}; [sources](../data.md). **Model**: {model}. **Steps**: {steps}."
    code = "\n".join(("```", *commands, "```"))
    return f"{what}\n\n{code}\n\n{origin}"


def cosines(rows: Sequence[Row]) -> str:
    """Cosines of all kinds of runs, within families and between."""
    head = ["runs", "seeds", "tasks", "side", "all pairs", "within", "between", "p"]
    lines = []
    for row in rows:
        cells = [row["runs"], str(row["seeds"]), row["tasks"], row["side"]]
        cells.append(f"{row['all']:.3f} ({row['deviation']:.3f})")
        cells += [f"{row['within']:.3f}", f"{row['between']:.3f}", f"{row['p']:.4f}"]
        lines.append([*cells, f"{row['different_lines']:.3f}"])
    return table([*head, "different lines"], lines)


def numbers(by_method: Row, columns: Mapping[str, tuple[str, str]], names: Sequence[str]) -> str:
    """What records say of methods: column -> its name, and the form of its numbers."""
    lines = []
    for name in names:
        known = ((by_method[name][key], form) for key, (_, form) in columns.items())
        lines.append([name, *("" if one is None else f"{one:{form}}" for one, form in known)])
    return table(["method", *(name for name, _ in columns.values())], lines)


def again(by_method: Row) -> str:
    """How far runs of one method and seed on the same batches differ."""
    rows = [[name, str(own["seeds"]), f"{own['dev_loss']:.4f}"] for name, own in by_method.items()]
    return table(["method", "seeds", "largest difference of development loss"], rows)


def early(found: Row) -> str:
    """How soon development losses rank methods as at the end."""
    (first, short), (second, long) = found.items()
    head = [f"step of {int(first):,}", "rank correlation", "lost"]
    head += [f"step of {int(second):,}", "rank correlation", "lost"]
    return table(
        head,
        [
            [f"{a[0]:,}", f"{a[1]:.2f}", f"{a[2]:.4f}", f"{b[0]:,}", f"{b[1]:.2f}", f"{b[2]:.4f}"]
            for a, b in zip(short["steps"], long["steps"], strict=True)
        ],
    )


def parts(folder: Path) -> dict[str, dict[str, str]]:
    """Page -> mark -> what stands there."""
    published, files = read_published(folder), ("transfer", "equal_compute", "finish_alone")
    by_pair, equal, alone = (_read(folder / f"{name}.json") for name in files)
    paper, ours = published["claims"]["paper"], published["claims"]["ours"]
    similar = published["similarity"]
    into = [row for row in paper if row["method"].startswith("into")]
    many = [row for row in [*paper, *ours] if row["method"].startswith("many")]
    of_many = named(many, MANY)
    assert len(of_many) == len(many), "every row about many languages has a name"
    choices = [row for row in paper if row["said"].startswith("Table")]
    written: dict[str, dict[str, str]] = {
        page: {mark: scores(published["methods"], names) for mark, names in own.items()}
        for page, own in _SCORES.items()
    }
    written["table1.md"] |= {
        "claims": claims([row for row in paper if row not in into + many + choices]),
        "into": claims(into),
    }
    written["table2.md"]["claims"] = claims(of_many)
    written["tables6to8.md"]["claims"] = claims(choices)
    written["beyond.md"] |= {
        "ours": claims([row for row in ours if row not in many]),
        "together": together(published["together"]),
    }
    made = published["constructed"]
    written |= {
        "table3.md": {
            "claims": claims(published["claims"]["tagging"]),
            **{
                kind: tagging(by_method)
                for kind, by_method in _read(folder / "tagging.json").items()
            },
        },
        "figure1.md": {"claims": similarity(similar[:6])},
        "figure2.md": {"claims": similarity(similar[6:11]), "bleu": similarity(similar[26:27])},
        "figure3.md": {"updates": numbers(published["updates"], _UPDATES, [*published["updates"]])},
        "figure4.md": {"claims": similarity(similar[11:23])},
        "figure9.md": {"claims": similarity(similar[23:25])},
        "figure11.md": {"claims": similarity(similar[25:26])},
        "geometry.md": {"cosines": cosines(published["cosines"])},
        "why.md": {
            "noise": numbers(published["noise"], _NOISE, _MEASURED),
            "lengths": numbers(published["lengths"], _LENGTHS, _LONGER),
            "again": again(published["again"]),
            "early": early(published["early"]),
        },
        "constructed.md": {
            "claims": claims(published["claims"]["constructed"]),
            "scores": scores(made, [*made]),
        },
        "auto.md": {"law": law_table(published), "runs": runs_table(published)},
        "transfer.md": transfer.parts(by_pair),
        "equal_compute.md": _reports(equal_compute, equal),
        "finish_alone.md": _reports(finish_alone, alone),
    }
    for page, own in _SETTINGS.items():
        origin = _TAGGING_ORIGIN if page == "table3.md" else _ORIGIN
        written[page]["setting"] = setting(*own, origin=origin)
    return written


def _reports(study: ModuleType, found: Row) -> dict[str, str]:
    """Collection -> the tables of a study at equal compute."""
    return {name: "\n".join(study.report(name, own)) + "\n" for name, own in found.items()}


def fill(text: str, written: Mapping[str, str]) -> str:
    """A page with its parts between the marks that name them and those that end them."""
    for name, part in written.items():
        begin = _BEGIN.format(name)
        before, found, rest = text.partition(begin)
        if not found or _END not in rest:
            raise ValueError(f"a page lacks {begin.strip()} ... {_END.strip()}")
        text = f"{before}{begin}\n{part}\n{_END}{rest.partition(_END)[2]}"
    return text


def pages(folder: Path) -> dict[str, str]:
    """Page -> its text as it should be."""
    return {
        name: fill((folder / name).read_text(encoding="utf-8"), written)
        for name, written in parts(folder).items()
    }


def regrets(table: Row) -> list[Row]:
    """What predictors of partners lose, as rows of a picture."""
    found = transfer.regrets_of(table, "BLEU")
    return [
        {"said": said, "difference": transfer.mean_and_interval(found[name]), "is_plain": True}
        for name, said in _PREDICTORS.items()
        if name in found
    ]


def arms(study: ModuleType) -> list[Row]:
    """What every arm of a study at equal compute brings small languages, as rows of a picture."""
    return [
        {"said": f"{collection.capitalize()}: {arm}", "difference": difference}
        for collection, found in _read(study.SAVED).items()
        for arm, difference in study.small_differences(collection, found).items()
    ]


def read_published(folder: Path) -> Row:
    """What was computed from the runs, with the differences in tagging."""
    published = _read(folder / "published.json")
    said = {**published["claims"], "tagging": tagging_claims(_read(folder / "tagging.json"))}
    return {**published, "claims": said}


def _read(path: Path) -> Row:
    found: Row = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    for name, text in pages(HERE).items():
        write_text(HERE / name, text)
    by_way = {way: regrets(table) for way, table in _read(transfer.SAVED).items()}
    studies = {study.__name__: arms(study) for study in (equal_compute, finish_alone)}
    for name, draw in pictures(read_published(HERE), by_way, studies).items():
        with mpl.rc_context(dict(STYLE)), unknown_glyphs_as_boxes():
            path = HERE / "pictures" / f"{name}.svg"
            draw().savefig(path, transparent=True, metadata={"Date": None})
    sys.stdout.write("The pages and pictures are written.\n")


if __name__ == "__main__":
    main()
