"""What one_backward costs the host: thin Hugging Face models, a backward over the plain one.

python benchmarks/host_time.py [--models BERT T5] [--rule sum] [--check] [--profile]
python benchmarks/host_time.py --models decoder --threads 2 --rounds 15

Processor clock, the least of many rounds, plain and one_backward in turn, one thread unless
`--threads` asks for more, which are timed by the wall clock. `decoder` is not thin: four layers of
width 256 with a tied head, 64 rows of 32 tokens, as one may train on a CPU. `--check` compares task
gradients with per_task in float64 instead, `--profile` shows where the time goes.
"""

# B rows, S tokens, T tasks

import argparse
import copy
import cProfile
import math
import pstats
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import gradvac

B, S, V, D = 16, 16, 500, 32
DECODER_SIZES = 64, 32, 4000, 256  # of the model that is not thin
hf: Any = transformers  # typed in part only
DECODER = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 2 * D,
    "max_position_embeddings": 64,
}
ENCODER = DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * D,
    "decoder_ffn_dim": 2 * D,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = {
    "vocab_size": V,
    "d_model": D,
    "d_kv": D // 4,
    "d_ff": 2 * D,
    "num_layers": 4,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
BEIT = {
    "image_size": 16,
    "patch_size": 4,
    "use_relative_position_bias": True,
    "use_shared_relative_position_bias": False,
    "drop_path_rate": 0.0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER, num_labels=3)),
    "Llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**DECODER, num_key_value_heads=2, head_dim=D // 4, use_cache=False)
    ),
    "NLLB": lambda: hf.M2M100ForConditionalGeneration(hf.M2M100Config(**SEQ2SEQ)),
    "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "Gemma": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**DECODER, num_key_value_heads=2, head_dim=D // 4, use_cache=False)
    ),
    "DeBERTa": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**ENCODER, **DEBERTA, num_labels=3)
    ),
    "BEiT": lambda: hf.BeitForImageClassification(hf.BeitConfig(**ENCODER, **BEIT, num_labels=3)),
    "Falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=V, hidden_size=D, num_hidden_layers=4, num_attention_heads=4, use_cache=False
        )
    ),
    "decoder": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=DECODER_SIZES[2],
            n_embd=DECODER_SIZES[3],
            n_positions=DECODER_SIZES[1],
            n_layer=4,
            n_head=4,
            use_cache=False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    ),
    "ViT": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**ENCODER, image_size=16, patch_size=4, num_labels=3)
    ),
}


def losses_of(name: str, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One loss per row, `[B]`."""
    tokens, target, images = batch
    if name in ("BEiT", "ViT"):
        return F.cross_entropy(
            model(pixel_values=images).logits, target[:, 0] % 3, reduction="none"
        )
    if name in ("BERT", "DeBERTa"):
        return F.cross_entropy(model(input_ids=tokens).logits, target[:, 0] % 3, reduction="none")
    given = {"decoder_input_ids": target} if name in ("NLLB", "T5") else {}
    logits = model(input_ids=tokens, **given).logits
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(1)


def make(name: str, dtype: torch.dtype) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    model.train()
    rows, length, vocabulary, _ = DECODER_SIZES if name == "decoder" else (B, S, V, D)
    tokens, target = torch.randint(3, vocabulary, (2, rows, length))
    return model, (tokens, target, torch.randn(rows, 3, 16, 16, dtype=dtype))


def align(model: Any, num_tasks: int, rule: str, engine: str = "one_backward") -> gradvac.Aligner:
    return gradvac.Aligner(model, [f"task{t}" for t in range(num_tasks)], rule, engine=engine)


def check(name: str, num_tasks: int, rule: str) -> float:
    """The largest relative difference from per_task over some steps, float64."""
    model, batch = make(name, torch.float64)
    twin, worst = copy.deepcopy(model), 0.0
    one, other = align(model, num_tasks, rule), align(twin, num_tasks, rule, "per_task")
    for step in range(4):
        rows = len(batch[0])
        tasks = (torch.randperm(rows) if step % 2 else torch.arange(rows)) % num_tasks
        for m, aligner in ((model, one), (twin, other)):
            m.zero_grad()
            aligner.backward(losses_of(name, m, batch), tasks)
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        gradients = [(mine.grad, theirs.grad) for mine, theirs in pairs]
        assert all((mine is None) == (theirs is None) for mine, theirs in gradients)
        theirs = [theirs for _, theirs in gradients if theirs is not None]
        least = 0.01 * torch.stack([gradient.norm() for gradient in theirs]).norm()
        for mine, expected in gradients:
            if mine is not None and expected is not None:
                error = float((mine - expected).norm() / (expected.norm() + least))
                worst = error if math.isnan(error) else max(worst, error)
    return worst


def backwards(name: str, num_tasks: int, rule: str) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """A forward, and the backwards to be timed after it."""
    model, batch = make(name, torch.float32)
    aligner, tasks = align(model, num_tasks, rule), torch.arange(len(batch[0])) % num_tasks

    def forward() -> Tensor:
        model.zero_grad()
        return losses_of(name, model, batch)

    def plain(losses: Tensor) -> None:
        losses.sum().backward()

    def one_backward(losses: Tensor) -> None:
        aligner.backward(losses, tasks)

    return forward, {"plain": plain, "one_backward": one_backward}


def measure(name: str, num_tasks: int, rule: str, rounds: int) -> dict[str, float]:
    """Seconds of each, the least of some rounds."""
    forward, every = backwards(name, num_tasks, rule)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    least = dict.fromkeys(every, float("inf"))
    for turn in range(rounds + 12):
        for what, backward in every.items():
            losses = forward()
            start = clock()
            backward(losses)
            if turn >= 12:
                least[what] = min(least[what], clock() - start)
    return least


def profile(name: str, num_tasks: int, rule: str, rounds: int) -> None:
    """Where the time of aligned backwards goes."""
    forward, every = backwards(name, num_tasks, rule)
    profiler = cProfile.Profile()
    for turn in range(rounds + 12):
        losses = forward()
        if turn >= 12:
            profiler.enable()
        every["one_backward"](losses)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--rule", default="gradvac")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="compare with per_task in float64")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    for name in args.models:
        if args.check:
            print(f"{name:8} differs by {check(name, args.tasks, args.rule):.1e}", flush=True)
        elif args.profile:
            profile(name, args.tasks, args.rule, args.rounds)
        else:
            least = measure(name, args.tasks, args.rule, args.rounds)
            plain, ours = least["plain"], least["one_backward"]
            print(
                f"{name:8} {1e3 * plain:6.2f} {1e3 * ours:6.2f} ms {ours / plain:5.2f}", flush=True
            )


if __name__ == "__main__":
    main()
