"""What gradvac says and computes on tiny settings, as JSON to compare with what it said before.

    python tests/golden/golden.py               compare with the expected files
    python tests/golden/golden.py --write       rewrite the expected files
    python tests/golden/golden.py tagging ...   only some parts
    python tests/golden/golden.py PART --print  the JSON of one part

Only the command line (`python -m gradvac`), the files of a run that docs describe, and the public
names of `import gradvac` are used, so that it survives any change inside the package. Times,
hashes, versions and memory are left out. A part is a function below and a file in `expected/`.

Commands run as `python -m gradvac` does, each in a fork of this process, which has imported once
what they need: that takes longer than most commands.
"""

import argparse
import hashlib
import html
import importlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).parent / "expected"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
}
WIDTH, WIDE = 100, 400  # of help; of what commands say, which then needs no line breaks

# --- commands -------------------------------------------------------------------------------------


def command(*words: str, stdin: str = "", width: int = WIDE, status: int = 0) -> tuple[str, str]:
    """Standard output and error of a command in the current folder."""
    with tempfile.TemporaryDirectory() as place:
        given, out, err = (Path(place) / name for name in ("in", "out", "err"))
        given.write_text(stdin, encoding="utf-8")
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which are idle
            child = os.fork()
        if not child:
            _become(words, given, out, err, width)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said, told = out.read_text("utf-8"), err.read_text("utf-8")
    if ended != status:
        raise RuntimeError(f"gradvac {' '.join(words)}: status {ended}\n{said}\n{told}")
    return said, told


def _become(words: Sequence[str], given: Path, out: Path, err: Path, width: int) -> None:
    """Be `python -m gradvac WORDS` to the end."""
    for number, path, flags in ((0, given, os.O_RDONLY), (1, out, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(path, flags), number)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    os.environ["COLUMNS"] = str(width)
    sys.argv = ["gradvac", *words]
    status = 1
    try:
        runpy.run_module("gradvac", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        else:
            status = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_VOLATILE = (
    (r"[\d,.]+ tokens/s\s+\S+ left", "TOKENS/s TIME left"),
    (r"\d+:\d\d:\d\d", "TIME"),
    (r"[\d.]+ s$", "TIME"),
    (r"\([\d.]+ MB\)", "(SIZE)"),
    (r"/\S*/configs/", "configs/"),
    (r"(config|data|torch|version|device):[^|\s;,]+", r"\1:X"),
)


def lines_of(text: str) -> list[str]:
    """Lines of what a command said, without the frames and blanks of tables."""
    for pattern, instead in _VOLATILE:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    text = re.sub("[─-╿]+", " ", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def told(*words: str, stdin: str = "", status: int = 0) -> dict[str, list[str]]:
    """What a command said, as lines; what it said on standard error apart, if anything."""
    out, err = command(*words, stdin=stdin, status=status)
    said = {"says": lines_of(out), "warns": lines_of(err)}
    return {key: lines for key, lines in said.items() if lines}


# --- files of a run -------------------------------------------------------------------------------

_UNSTEADY = re.compile(r"seconds|tokens_per_second|peak_memory|signature$|^of_weights$|^check$")


def steady(value: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if not _UNSTEADY.search(key)}
    if isinstance(value, list):
        return [steady(item) for item in value if not _is_at_equal_time(item)]
    return re.sub(r"version:[^|]+", "version:X", value) if isinstance(value, str) else value


def _is_at_equal_time(row: Any) -> bool:
    return isinstance(row, dict) and " after " in str(row.get("name", ""))


def arrays_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of an archive of NumPy; NaN is null."""
    import numpy as np

    found: dict[str, Any] = {}
    for name, array in sorted(arrays.items()):
        if name == "about":
            continue
        if array.dtype.kind == "f":
            exact = array.astype(np.float64).astype(object)
            exact[np.isnan(array)] = None
            found[name] = exact.tolist()
        else:
            found[name] = array.tolist()
    return found


def record_of(path: Path) -> dict[str, Any]:
    """The record of a run, read as its documentation says, means over components alone."""
    import numpy as np

    data, start, chunks = path.read_bytes(), 0, []
    while start < len(data):
        end = start + 20 + int.from_bytes(data[start + 8 : start + 16], "little")
        chunks.append(dict(np.load(io.BytesIO(data[start + 20 : end]))))
        start = end
    known = {}
    for name in chunks[0]:
        if name in ("tasks", "components", "rule", "vaccinated"):
            known[name] = chunks[0][name]
            continue
        array = np.concatenate([chunk[name] for chunk in chunks])
        known[name] = array
        if array.ndim > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of means of nothing
                known[name] = np.nanmean(array.astype(np.float64), axis=1)
    return arrays_of(known)


def run_of(run: Path) -> dict[str, Any]:
    """Everything in a run folder that should stay as it is."""
    import numpy as np
    from safetensors.numpy import load_file

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    signature = json.loads((run / "signature.json").read_text())
    found: dict[str, Any] = {
        "files": sorted(path.name for path in run.iterdir() if not path.name.startswith(".")),
        "config": tomllib.loads((run / "config.toml").read_text("utf-8")),
        "metrics": steady(metrics),
        "signature": {key: signature[key] for key in ("rule", "granularity", "engine", "tasks")},
        "weights": {
            name: {"shape": list(one.shape), "norm": _norm(name, one)}
            for name, one in sorted(load_file(run / "best.safetensors").items())
        },
    }
    if (run / "record.bin").exists():
        found["record"] = record_of(run / "record.bin")
    if (run / "similarity.npz").exists():
        with np.load(run / "similarity.npz") as archive:
            found["similarity"] = arrays_of(dict(archive))
    for path in sorted((run / "scores").glob("*")):
        if path.suffix == ".txt":
            lines = path.read_text("utf-8").splitlines()
            found.setdefault("outputs", {})[path.name] = {"lines": len(lines), "first": lines[:3]}
        elif path.suffix == ".json":
            found.setdefault("scores", {})[path.name] = steady(json.loads(path.read_text("utf-8")))
        elif path.suffix == ".npz":
            with np.load(path) as archive:
                sums = {name: one.sum(axis=0) for name, one in archive.items() if one.ndim}
            found.setdefault("counts", {})[path.name] = arrays_of(sums)
    return found


def _norm(name: str, weights: Any) -> float | None:
    """The length of weights; not of biases, where Adam may make steps of gradients that are 0."""
    import numpy as np

    return None if name.endswith("bias") else float(np.linalg.norm(weights.astype(np.float64)))


def page_of(path: Path) -> list[str]:
    """The visible text of a page, down to its settings."""
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", path.read_text("utf-8"))
    lines = lines_of(html.unescape(re.sub(r"<[^>]+>", "\n", text)))
    lines = lines[: lines.index("All settings")] if "All settings" in lines else lines
    hidden = ("config", "data", "device", "torch", "version")
    return ["X" if n and lines[n - 1] in hidden else line for n, line in enumerate(lines)]


def comparison_of(*words: str) -> dict[str, Any]:
    """A comparison as JSON and as Markdown."""
    lines = lines_of(command("compare", *words)[0])
    kept = []
    is_cost = False
    for line in lines:
        is_cost = line == "## Cost" if line.startswith("#") else is_cost
        if " after " not in line.partition("|")[2].partition("|")[0]:
            kept.append(" | ".join(line.split(" | ")[:3]) if is_cost else line)
    found = json.loads(command("compare", *words, "--json")[0])
    return {"json": steady(found), "markdown": kept}


# --- parts ----------------------------------------------------------------------------------------

NMT = (
    *("data.vocabulary.size=2000", "batch.tokens=600", "optimizer.lr=2e-2", "decoding.beams=2"),
    *("train.max_steps=24", "train.validate_every=8", "train.checkpoint_every=12"),
    *("train.log_every=4", "train.record_every=4", "validation.sentences=40"),
)


def helps() -> dict[str, Any]:
    """The help of every command."""
    found: dict[str, Any] = {}

    def walk(*words: str) -> None:
        text, _ = command(*words, "--help", width=WIDTH)
        found[" ".join(("gradvac", *words))] = [line.rstrip() for line in text.splitlines()]
        commands = text.partition("─ Commands ─")[2]
        for name in re.findall(r"^│ ([a-z][\w-]*) ", commands, re.MULTILINE):
            walk(*words, name)

    walk()
    return found


def mistakes() -> dict[str, Any]:
    """What users are told about mistakes, and what cheap commands say."""
    wrong = (
        "nmt train nothing_here",
        "nmt train twin train.max_stepz=3",
        "nmt train twin align.rule=gradvacc",
        "nmt train twin align.rule=pcgrad align.beta=0.1",
        "nmt train twin train.metric=dev/bleuu",
        "nmt train twin data.languages=[]",
        "nmt score missing",
        "tagging train tiny data.kind=verbs",
        "tagging train tiny model.encoder=missing",
        "similarity missing",
        "report missing",
        "compare missing",
        "compare missing --out table.pdf",
        "sweep nothing_here",
        "sweep twin --launcher ssh",
        "corpus write out --languages xx",
    )
    found: dict[str, Any] = {text: told(*text.split(), status=1) for text in wrong}
    found["sweep twin --dry-run"] = told("sweep", "twin", "--dry-run")
    found["corpus write"] = told("corpus", "write", "corpus", "--languages", "qsm,qpl")
    found["corpus files"] = {
        str(path.relative_to("corpus")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path("corpus").rglob("*"))
        if path.is_file()
    }
    return found


def translation() -> dict[str, Any]:
    """Two translation runs on constructed languages, from text to comparison."""
    found: dict[str, Any] = {"prepare": told("nmt", "prepare", "twin", *NMT)}
    rules = {"gradvac": (), "pcgrad": ("align.rule=pcgrad", "align.granularity=enc_dec")}
    for name, settings in rules.items():
        run = ("--run", f"runs/{name}")
        found[f"train {name}"] = told("nmt", "train", "twin", *NMT, *settings, *run)
        found[f"score {name}"] = told("nmt", "score", f"runs/{name}", "--set", "dev")
    found["similarity"] = told("similarity", "runs/gradvac", "--lines", "24")
    lines = "the old tree holds the river .\nshe sees a green stone\n"
    for target in ("qsm", "qpl"):
        words = ("nmt", "translate", "runs/gradvac", "--to", target)
        found[f"translate {target}"] = told(*words, stdin=lines)
    both = ("runs/gradvac", "runs/pcgrad")
    found["report"] = told("report", "runs/gradvac")
    found["page"] = page_of(Path("report.html"))
    found["report of both"] = told("report", *both, "--out", "both.html")
    found["figures"] = told("figures", "runs/gradvac", "--format", "svg")
    options = ("--set", "dev", "--baseline", "runs/pcgrad", "--metric", "chrF++")
    found["compare"] = comparison_of(*both, *options)
    found |= {run: run_of(Path(run)) for run in both}
    return found


def tagging() -> dict[str, Any]:
    """A tagging run with a random encoder."""
    command("corpus", "write", "corpus", "--languages", "qsm,qsk,qpl,qpt")
    build_encoder(sorted(Path("corpus").glob("*.q*")), Path("encoder"))
    settings = (
        *("model.encoder=encoder", "data.dev_limit=60", "batch.rows=16", "batch.epochs=0"),
        *("data.limit.qsm=200", "data.limit.qpl=200", "data.limit.qsk=50", "data.limit.qpt=50"),
        *("train.max_steps=24", "train.validate_every=8", "train.checkpoint_every=12"),
        *("train.log_every=4", "train.record_every=4", "train.threads=1", "optimizer.lr=3e-3"),
    )
    found: dict[str, Any] = {"prepare": told("tagging", "prepare", "tiny", *settings)}
    found["train"] = told("tagging", "train", "tiny", *settings)
    scored, _ = command("tagging", "score", "runs/tiny", "--set", "dev", "--json")
    found["scores"] = steady(json.loads(scored))
    found["similarity"] = told("similarity", "runs/tiny", "--lines", "24")
    lines = Path("corpus/dev.qsm").read_text("utf-8").splitlines(keepends=True)[:3]
    found["predict"] = told("tagging", "predict", "runs/tiny", stdin="".join(lines))
    found["report"] = told("report", "runs/tiny")
    found["page"] = page_of(Path("report.html"))
    found["runs/tiny"] = run_of(Path("runs/tiny"))
    return found


def build_encoder(texts: Sequence[Path], folder: Path) -> None:
    """A random BERT with a WordPiece tokenizer of single letters, for some texts."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, logging

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for path in texts for letter in path.read_text("utf-8").strip()})
    letters = [letter for letter in letters if not letter.isspace()]
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertModel(
        BertConfig(
            vocab_size=len(pieces),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **{f"{kind}_token": name for kind, name in names.items()},
    ).save_pretrained(folder)


SWEEP = """
recipe = "nmt"
base = "twin"
score = ["dev"]

[set]
"data.languages" = ["qsm", "qpl", "qpt"]
"data.train" = "constructed:languages.toml:train"
"data.dev" = "constructed:languages.toml:dev"
"data.test" = "constructed:languages.toml:test"
"data.vocabulary.size" = 2000
"batch.tokens" = 600
"optimizer.lr" = 2e-2
"train.max_steps" = 24
"train.validate_every" = 12
"decoding.beams" = 2
"validation.sentences" = 40

[grid]
"train.seed" = [0, 1]

[[methods]]
name = "joint"
set = { "align.rule" = "sum" }

[[methods]]
name = "gradvac"
"""


def sweep() -> dict[str, Any]:
    """Two methods by two seeds, compared on few sentences: scoring takes longer than training."""
    import gradvac

    languages = Path(gradvac.__file__).parent / "lab" / "languages" / "default.toml"
    few, num = re.subn(
        r"(?m)^splits = .*$", "splits = { dev = 60, test = 60 }", languages.read_text("utf-8")
    )
    assert num == 1
    Path("languages.toml").write_text(few, encoding="utf-8")
    Path("small.toml").write_text(SWEEP, encoding="utf-8")
    said = told("sweep", "small.toml", "--out", "out")["says"]
    kept = [line.rpartition(" | ")[0] or line for line in said]  # seconds are last
    metrics = {
        str(path.parent.relative_to("out")): [
            steady(json.loads(line)) for line in path.read_text().splitlines()
        ]
        for path in sorted(Path("out").rglob("metrics.jsonl"))
    }
    compared = {
        f"compare {metric}": comparison_of("out", "--set", "dev", "--metric", metric)
        for metric in ("BLEU", "chrF++")
    }
    return {"says": kept, "metrics": metrics, **compared}


# --- the library ----------------------------------------------------------------------------------


def library() -> dict[str, Any]:
    """Three steps of every rule and granularity on a small transformer in float64.

    By either engine where components are layers; `tests/engine` compares engines everywhere.
    """
    import gradvac

    tasks = ["fr", "hi", "tr"]
    rules: dict[str, Callable[[], Any]] = {
        "Sum": gradvac.Sum,
        "GradVac": lambda: gradvac.GradVac(beta=0.1),
        "GradVac, some": lambda: gradvac.GradVac(
            beta=0.5, vaccinated=["hi", "tr"], order="fixed", preserve_norm=True
        ),
        "fixed target": lambda: gradvac.GradVac(target=0.5),
        "PCGrad": gradvac.PCGrad,
        "MGDA": gradvac.MGDA,
        "MGDA, loss+": lambda: gradvac.MGDA("loss+"),
        "GradNorm": gradvac.GradNorm,
        "Control, norm": lambda: gradvac.rule_named(
            "studies/controls.py:Control", control="norm", beta=0.5
        ),
        "Only": lambda: gradvac.Only(gradvac.GradVac(target=0.5), ["*"], from_step=1),
    }
    found: dict[str, Any] = {"names": list(gradvac.__all__)}
    for name, rule in rules.items():
        for granularity in GRANULARITIES[:1] if "," in name or name == "Only" else GRANULARITIES:
            both = granularity == GRANULARITIES[0]
            for engine in ("one_backward", "per_task") if both else ("one_backward",):
                key = f"{name} / {granularity} / {engine}"
                options = {"granularity": granularity, "engine": engine}
                found[key] = list(steps(tasks, rule, options))
    ema, layers = (lambda: gradvac.GradVac(beta=0.1)), {"granularity": "all_layer"}
    found["auto"] = list(steps(tasks, ema, layers))
    found["resumed"] = list(steps(tasks, ema, layers, resume=True))
    found["accumulated"] = list(steps(tasks, ema, layers, parts=2))
    found["recomputed"] = list(
        steps(tasks, ema, {"granularity": "enc_dec", "engine": "one_backward", "recompute": True})
    )
    found["by loss"] = list(steps(tasks, ema, layers, by_task=True))
    found["Adam metric"] = list(steps(tasks, ema, layers, adam=True))
    return found


def steps(
    tasks: list[str],
    make_rule: Callable[[], Any],
    options: Mapping[str, Any],
    *,
    resume: bool = False,
    parts: int = 1,
    by_task: bool = False,
    adam: bool = False,
) -> Iterator[dict[str, Any]]:
    """What three steps of training did."""
    import torch

    from gradvac import AdamMetric, Aligner

    model = _model()
    update = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)  # more than rounding
    options = {**options, **({"metric": AdamMetric(update)} if adam else {})}
    aligner = Aligner(model, tasks, make_rule(), **options)
    for number in range(3):
        if resume and number == 2:
            state = aligner.state_dict()
            aligner = Aligner(model, tasks, make_rule(), **options)
            aligner.load_state_dict(state)
        update.zero_grad()
        done = None
        for part in range(parts):
            chance = torch.Generator().manual_seed(100 * number + part)
            source, target = torch.randint(12, (2, 9, 5), generator=chance)
            rows = [tasks[row % 3] for row in range(9)]
            weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).repeat(3)
            losses = model(source, target) * weights
            more = {"accumulate": part + 1 < parts}
            if by_task:
                done = aligner.backward(
                    {t: losses[i::3].sum() for i, t in enumerate(tasks)}, **more
                )
            else:
                done = aligner.backward(losses, rows, **more)
        assert done is not None
        entry = {name: _digest(getattr(done, name)) for name in SHOWN}
        entry |= {"engine": aligner.engine, "gradient": _gradient(model)}
        if number == 2:
            entry |= {"aligner": repr(aligner), "alignment": repr(done)}
            entry |= {"tasks": list(done.tasks), "components": list(done.components)}
        update.step()
        yield entry


GRANULARITIES = ("all_layer", "whole_model", "enc_dec", "all_matrix")
SHOWN = ("similarity", "target", "weights", "norms", "active", "update_cosine", "update_ratio")


def _model() -> Any:
    import torch
    from torch import nn

    class Small(nn.Module):
        """An encoder and a decoder of one layer each, and a loss for every row."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(12, 8)
            sizes = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, **sizes)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16, **sizes)
            self.output = nn.Linear(8, 12)

        def forward(self, source: Any, target: Any) -> Any:
            memory = self.encoder(self.embedding(source))
            scores = self.output(self.decoder(self.embedding(target), memory))
            losses = nn.functional.cross_entropy(
                scores.flatten(0, 1), target.roll(1, 1).flatten(), reduction="none"
            )
            return losses.view(target.shape).mean(1)

    model, chance = Small().double(), torch.Generator().manual_seed(0)
    with torch.no_grad():  # normal numbers, as of the usual initialisation, differ between CPUs
        for weights in model.parameters():
            weights.copy_(torch.rand(weights.shape, generator=chance, dtype=torch.float64) - 0.5)
    return model


def _digest(values: Any) -> Any:
    """All of few numbers; of many the length, and a sum that depends on their places."""
    import torch

    flat = values.detach().double().flatten()
    unknown = int(flat.isnan().sum())
    flat = flat.nan_to_num()
    if len(flat) <= 6:
        return {"values": flat.tolist(), "unknown": unknown}
    places = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return {
        "shape": list(values.shape),
        "length": float(flat.norm()),
        "places": float(flat @ places),
        "unknown": unknown,
    }


def _gradient(model: Any) -> dict[str, float]:
    """Length of `.grad` by module, and a sum that depends on its places."""
    found = {}
    for name, module in model.named_children():
        digests = [_digest(p.grad) for p in module.parameters() if p.grad is not None]
        found[name] = sum(d["length"] ** 2 for d in digests) ** 0.5
        found[f"{name} places"] = sum(d["places"] for d in digests)
    return found


# --- comparing ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    one.__name__: one for one in (helps, mistakes, library, translation, tagging, sweep)
}
EXACT = ("helps", "mistakes")
CLOSE = {"library": (1e-6, 1e-9)}  # relative and absolute, in float64
RUNS = (1e-4, 1e-4)  # in float32, after some steps
RECORD = (2e-3, 2e-3)  # kept in half precision
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def produce(part: str) -> dict[str, Any]:
    """What a part says now; it works in a folder of its own."""
    os.environ.update(ENVIRONMENT)
    sys.path.append(str(EXPECTED.parents[1]))
    importlib.import_module("fork_server").import_shared()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            found: dict[str, Any] = json.loads(json.dumps(PARTS[part]()), parse_float=_rounded)
        finally:
            os.chdir(before)
    return found


def _rounded(number: str) -> float:
    return float(f"{float(number):.9g}")


def differences(part: str, expected: Any, found: Any) -> list[str]:
    """One line for each thing that is not as expected."""
    before, now = dict(_leaves(expected)), dict(_leaves(found))
    lines = []
    for key in dict.fromkeys([*before, *now]):
        if key not in now:
            lines.append(f"{key}: gone, was {before[key]!r}")
        elif key not in before:
            lines.append(f"{key}: new, {now[key]!r}")
        elif not _is_same(part, key, before[key], now[key]):
            lines.append(f"{key}:\n    was {before[key]!r}\n    is  {now[key]!r}")
    return lines


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{place} > {key}" if place else key)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, value


def _is_same(part: str, key: str, before: Any, now: Any) -> bool:
    if part in EXACT or "config" in key or type(before) is not type(now):
        return bool(before == now)
    relative, absolute = CLOSE.get(part, RECORD if " > record > " in key else RUNS)
    if isinstance(before, float):
        return abs(before - now) <= absolute + relative * abs(before)
    if isinstance(before, str) and part != "library":  # its numbers are rounded
        if _NUMBER.sub("0", before) != _NUMBER.sub("0", now):
            return False
        pairs = zip(_NUMBER.findall(before), _NUMBER.findall(now), strict=True)
        return all(_is_near(*pair, relative) for pair in pairs)
    return bool(before == now)


def _is_near(before: str, now: str, relative: float) -> bool:
    """Whether two numbers of a text differ by at most one in the last decimal; counts: not."""
    if "." not in before or "." not in now:
        return before == now
    decimals = len(before.partition("e")[0].partition(".")[2])
    step = 1.001 * 10.0**-decimals if "e" not in before else 0.0
    return abs(float(before) - float(now)) <= step + relative * abs(float(before))


def expected_file(part: str) -> Path:
    return EXPECTED / f"{part}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--write", action="store_true", help="rewrite the expected files")
    parser.add_argument("--print", action="store_true", help="print what is found")
    asked = parser.parse_args()
    status = 0
    for part in asked.parts or PARTS:
        found = produce(part)
        if asked.print:
            print(json.dumps(found, ensure_ascii=False))
        elif asked.write:
            EXPECTED.mkdir(exist_ok=True)
            text = json.dumps(found, ensure_ascii=False, indent=1) + "\n"
            expected_file(part).write_text(text, encoding="utf-8")
        else:
            lines = differences(part, json.loads(expected_file(part).read_text("utf-8")), found)
            print("\n".join([f"{part}: {len(lines)} differences", *lines]))
            status |= bool(lines)
    sys.exit(status)


if __name__ == "__main__":
    main()
