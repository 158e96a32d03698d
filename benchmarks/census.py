"""A census of Hugging Face's architectures: which engine runs, is it exact, what does it cost?

    OMP_NUM_THREADS=1 python benchmarks/census.py                       # all, some minutes
    OMP_NUM_THREADS=1 python benchmarks/census.py --only Llama Swin
    OMP_NUM_THREADS=1 python benchmarks/census.py --page docs/architectures.md

Tiny configs with random weights and data: nothing is downloaded. `error` is the largest relative
error of a parameter's gradient against per_task over four steps, in float64 (in float32 where an
operation knows no other), weighted by task so that a swapped row shows. `ratio` is the time of the
processor in the aligned backward of 8 tasks over that of the plain one: with so little arithmetic,
what the host adds on a fast GPU; `in C++` has it with what is written in C++, which is built first,
and whose gradients are compared too. `measured` counts the places whose owners are measured in
every step, because an operation may move rows; `slow` names operations that are called task by
task.
"""

import argparse
import copy
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from gradvac import Aligner, Sum
from gradvac.utils.native import native

ROWS, TOKENS, TASKS = 16, 8, 8
# By every name that a config has for it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "num_labels": 5,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LLAMAS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "StableLm")
_LLAMAS += ("Cohere", "Olmo2", "Granite", "Starcoder2", "Helium", "Glm", "Persimmon")
_GPTS = ("GPT2", "GPTNeoX", "GPTBigCode", "OPT", "Bloom")
DECODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*_LLAMAS, *_GPTS)},
    "Falcon": {"head_dim": None},
    "GPTJ": {"rotary_dim": 4},
    "Gemma3": {"config": "Gemma3Text", "sliding_window": 8},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "Rwkv": {"attention_hidden_size": 32},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Olmoe": {"num_experts": 4, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "sliding_window": 8, **EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        **EXPERTS,
    },
}
_BERTS = ("Bert", "Roberta", "XLMRoberta", "Electra", "MPNet", "RemBert", "Albert", "ConvBert")
ENCODERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*_BERTS, "Deberta", "FNet", "Nystromformer", "ModernBert")},
    "DistilBert": {"dim": 32},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}
PAIRS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("T5", "MT5", "Bart", "MBart", "M2M100", "Marian", "Pegasus")},
    "LongT5": {"local_radius": 4},
}
_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_channels": 3}
IMAGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ViT", "DeiT", "Beit", "Dinov2", "ViTMSN")},
    "Swin": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "num_attention_heads": None,  # another name for it
        "head_dim": None,
        "window_size": 2,
    },
    "ConvNext": {**_STAGES, "num_stages": 2, "patch_size": 4},
    "ResNet": {**_STAGES, "embedding_size": 16, "layer_type": "basic"},
}
KINDS = {
    "CausalLM": DECODERS,
    "TokenClassification": ENCODERS,
    "ConditionalGeneration": PAIRS,
    "ImageClassification": IMAGES,
}


def build(name: str, head: str) -> nn.Module:
    settings = dict(KINDS[head][name])
    config = getattr(transformers, f"{settings.pop('config', name)}Config")
    if head == "ImageClassification":
        settings = {"image_size": 16, "patch_size": 4, **settings}
    for_what = "LMHeadModel" if name == "GPT2" else f"For{head}"
    if name == "Marian":
        for_what = "MTModel"
    torch.manual_seed(0)
    every = {key: value for key, value in {**SMALL, **settings}.items() if value is not None}
    model: nn.Module = getattr(transformers, name + for_what)(config(**every))
    # Running statistics, and no dropout: another draw would be another loss.
    return model.train() if name == "Rwkv" else model.eval()


def losses_of(model: Any, head: str, data: Tensor) -> Tensor:
    if head == "ImageClassification":
        logits, labels = model(data).logits[:, None], torch.arange(len(data))[:, None] % 5
    elif head == "TokenClassification":
        logits, labels = model(data).logits, data % 5
    elif head == "CausalLM":
        options = {} if "Rwkv" in type(model).__name__ else {"use_cache": False}
        logits, labels = model(data, **options).logits[:, :-1], data[:, 1:]
    else:
        decoded = model(input_ids=data, decoder_input_ids=data.flip(1), use_cache=False)
        logits, labels = decoded.logits, data.roll(1, 1)
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def batch(head: str, dtype: torch.dtype) -> Tensor:
    if head == "ImageClassification":
        return torch.randn(ROWS, 3, 16, 16, dtype=dtype)
    return torch.randint(2, 64, (ROWS, TOKENS))


class Taken:
    """What the census says of one architecture."""

    def __init__(self, name: str, head: str, dtype: torch.dtype) -> None:
        self.name, self.head, self._dtype = name, head, dtype
        self.error, self.ratios, self._slow = 0.0, list[str](), set[str]()
        model = build(name, head).to(dtype)
        for wish in ("0", "1"):
            os.environ["GRADVAC_NATIVE"] = wish
            native.cache_clear()
            is_there = wish == "0" or native() is not None
            self.ratios.append(f"{self._align(model):.1f}" if is_there else "not built")

    def _align(self, model: Any) -> float:
        """Compare four steps with per_task; the ratio of the time of others to plain ones."""
        weights = {f"task{t}": 1.0 + 0.7 * t for t in range(TASKS)}
        rows = [row % TASKS for row in range(ROWS)]
        twin = copy.deepcopy(model)
        aligner = Aligner(model, list(weights), Sum(weights), engine="auto")
        reference = Aligner(twin, list(weights), Sum(weights), engine="per_task")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(4):
                data = batch(self.head, self._dtype)
                for own, by in ((model, aligner), (twin, reference)):
                    own.zero_grad()
                    by.backward(losses_of(own, self.head, data), rows)
                self.error = max(self.error, distance(model, twin))
        self.engine, why = aligner.engine, repr(aligner)
        self.places = why.partition("measured every step (")[2].partition(" places")[0] or "none"
        slow = [
            str(w.message).partition("slower: ")[2] for w in warned if "slower" in str(w.message)
        ]
        self._slow |= {one.split(" of ")[0] for s in slow for one in s.split(", ")}
        return self._ratio(model, aligner, rows, data)

    def _ratio(self, model: nn.Module, aligner: Aligner, rows: list[int], data: Tensor) -> float:
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(20):
            losses = losses_of(model, self.head, data)
            start = time.process_time()
            if step % 2:
                aligner.backward(losses, rows)
            else:
                losses.sum().backward()
            times[bool(step % 2)].append(time.process_time() - start)
        return statistics.median(times[True]) / statistics.median(times[False])

    def row(self) -> str:
        return (
            f"| {self.name} | {self.engine} | {self.error:.0e} | {' | '.join(self.ratios)} | "
            f"{self.places} | {', '.join(sorted(self._slow)) or 'none'} |"
        )


def distance(model: nn.Module, twin: nn.Module) -> float:
    """The largest relative error; of a parameter's own scale, or a hundredth of the model's."""
    pairs = [
        (mine.grad, theirs.grad)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True)
        if theirs.grad is not None
    ]
    scale = 0.01 * torch.stack([theirs.norm() for _, theirs in pairs]).norm()
    missing = any(mine is None for mine, _ in pairs)
    errors = [float((a - b).norm() / (b.norm() + scale)) for a, b in pairs if a is not None]
    return float("inf") if missing else max(errors)


COLUMNS = ("model", "engine", "error", "ratio", "in C++", "measured", "slow")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
PAGE = """# Architectures

Written by `python benchmarks/census.py --page docs/architectures.md` (torch {torch}, transformers
{transformers}, two CPU cores): {count} architectures of Hugging Face with tiny configs, batches of
16 rows of 8 tasks, interleaved. *Error*: the largest relative error of a parameter's gradient
against per_task; 1e-8 and above where a model computes in float32 whatever it is given.
*Ratio*: time of the processor in the aligned backward over that of the plain one, with almost no
arithmetic, as the host beside a fast GPU; on models of a usual size it is far smaller
([log](log.md)). *In C++*: the same with the executor in C++, whose gradients count in the error
too ([Engines](engines.md#in-c)). *Measured*: places whose owners are measured every step,
because an operation may move rows ([Engines](engines.md#which-rows-belong-to-which-task)). *Slow*:
operations that are called task by task.

{table}
"""


def take(only: list[str] | None) -> Iterator[Taken]:
    for head, every in KINDS.items():
        for name in every:
            if only and name not in only:
                continue
            try:
                try:
                    taken = Taken(name, head, torch.float64)
                except RuntimeError:  # an operation that knows no float64
                    taken = Taken(name, head, torch.float32)
            except Exception as error:
                print(f"{name}: {traceback.format_exception_only(error)[-1][:300]}", flush=True)
                continue
            print(taken.row(), flush=True)
            yield taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of architectures")
    parser.add_argument("--page", type=Path, help="write the table as a page, or complete it")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(HEAD)
    rows = {taken.name: taken.row() for taken in take(args.only)}
    if args.page:
        write_page(args.page, rows)


def write_page(page: Path, rows: dict[str, str]) -> None:
    """Write the table; rows of architectures that were not taken now are kept."""
    lines = page.read_text("utf-8").splitlines() if page.exists() else []
    kept = {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("| ")}
    order = [name for every in KINDS.values() for name in every]
    found = {**kept, **rows}
    table = [found[name] for name in order if name in found]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = PAGE.format(**versions, count=len(table), table="\n".join([HEAD, *table]))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
