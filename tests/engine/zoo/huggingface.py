"""Hugging Face architectures at toy size, with random weights."""

# B rows, S tokens, D width

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from ._case import B, Case, D, S, case, distance

V = 17
hf: Any = transformers  # typed in part only


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(3, V, shape)


def language_model(model: Any, tasks: Tensor, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(1)


def translation(model: Any, tasks: Tensor, source: Tensor, target: Tensor) -> Tensor:
    mask = torch.ones_like(source)
    mask[::2, -2:] = 0
    found = model(input_ids=source, attention_mask=mask, decoder_input_ids=target)
    losses = F.cross_entropy(found.logits[:, :-1].mT, target[:, 1:], reduction="none")
    return losses.mean(1)


@case
def bert() -> Case:
    config = hf.BertConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=S,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model = hf.BertForTokenClassification(config)

    def losses(model: Any, tasks: Tensor, tokens: Tensor) -> Tensor:
        return distance(model(input_ids=tokens).logits)

    return Case(model, losses, (tokens_of(B, S),))


def t5_model() -> Any:
    config = hf.T5Config(
        vocab_size=V,
        d_model=D,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=4,
        relative_attention_max_distance=6,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


@case
def t5() -> Case:
    return Case(t5_model(), translation, (tokens_of(B, S), tokens_of(B, 4)), enc_dec=True)


SMALL_TRANSLATION: dict[str, Any] = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


@case
def m2m100() -> Case:
    config = hf.M2M100Config(**SMALL_TRANSLATION)
    model = hf.M2M100ForConditionalGeneration(config)
    return Case(model, translation, (tokens_of(B, S), tokens_of(B, 4)), enc_dec=True)


@case
def mbart() -> Case:
    """Its table of positions returns [1, S, D]."""
    config = hf.MBartConfig(**SMALL_TRANSLATION)
    model = hf.MBartForConditionalGeneration(config)
    return Case(model, translation, (tokens_of(B, S), tokens_of(B, 4)), enc_dec=True)


def gpt2_model() -> Any:
    config = hf.GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=D,
        n_layer=2,
        n_head=2,
        n_inner=12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return hf.GPT2LMHeadModel(config)


@case
def gpt2() -> Case:
    return Case(gpt2_model(), language_model, (tokens_of(B, S),))


def llama_model() -> Any:
    config = hf.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    return hf.LlamaForCausalLM(config)


@case
def llama() -> Case:
    return Case(llama_model(), language_model, (tokens_of(B, S),))


@case
def llama_checkpointed() -> Case:
    model = llama_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Case(model, language_model, (tokens_of(B, S),))
