"""A run's model for other programs: as a Hugging Face folder, or CTranslate2's.

The Transformer with pre-norm is a Pegasus model: sinusoidal positions (its table is saved too),
embeddings scaled by the square root of the width, tied to the softmax. A source is written as
`<2de> some text`; the tokenizer adds `</s>`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from gradvac.lab.recipes.nmt.ct2 import convert, longest_text
from gradvac.lab.recipes.nmt.model import DecoderLayer, Transformer
from gradvac.lab.recipes.nmt.preparation import VOCABULARY
from gradvac.lab.recipes.nmt.settings import DecodingConfig, NmtConfig
from gradvac.lab.recipes.nmt.vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import checkpoint, config
from gradvac.utils.hints import install_line

_PACKAGES = {
    "huggingface": ("transformers", "tokenizers"),
    "ctranslate2": ("ctranslate2",),
}


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    to: str = "huggingface",
    weights: str | int = "best",
    quantization: str | None = None,
) -> Path:
    """Write a run's model as other programs read it.

    Args:
        run: The run folder.
        folder: A folder that is not there yet, or empty.
        to: "huggingface" (`AutoModelForSeq2SeqLM` and `AutoTokenizer` load it) or "ctranslate2".
        weights: "best", "last", "averaged", or a step.
        quantization: ctranslate2: "int8", "float16", ...; None: as they are.

    Returns:
        The folder.

    Raises:
        ValueError: A package is missing, the folder is not empty, or the model is no Pegasus
            ("huggingface": post-norm).
    """
    run, folder = Path(run), Path(folder)
    _check_packages(to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: {folder} is there and not empty; choose a new one.")
    if quantization is not None and to != "ctranslate2":
        raise ValueError('quantization: is of --to ctranslate2; "huggingface" keeps the weights.')
    settings = config.load(NmtConfig, RunFolder(run).config)
    vocabulary_file = RunFolder(run).vocabulary
    vocabulary = Vocabulary.of_run(run)
    model = settings.model.build(len(vocabulary))
    checkpoint.resolve_weights(run, weights).load_into(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then renamed: a folder that is there is complete.
    with TemporaryDirectory(dir=folder.parent, prefix=".export-") as place:
        made = Path(place) / to
        longest = longest_text(settings.decoding, settings.data.max_tokens)
        try:
            if to == "ctranslate2":
                convert(
                    model, vocabulary.pieces(), made, longest=longest, quantization=quantization
                )
            else:
                pegasus = make_pegasus(model, longest=longest, decoding=settings.decoding)
                pegasus.generation_config.suppress_tokens = vocabulary.unspeakable
                pegasus.save_pretrained(made)
                make_tokenizer(vocabulary_file.read_bytes(), longest).save_pretrained(made)
            shutil.copyfile(vocabulary_file, made / VOCABULARY)
        except (OSError, SafetensorError) as error:  # of writers that do not say what they wrote
            raise ValueError(
                f"folder: {folder} could not be written ({error}); make room, or choose another."
            ) from error
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    return folder


def _check_packages(to: str) -> None:
    if to not in _PACKAGES:
        raise ValueError(f"to: must be one of {', '.join(_PACKAGES)}, got {to!r}.")
    missing = [name for name in _PACKAGES[to] if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"to: {to!r} needs {', '.join(missing)}; {install_line('export')}.")


def make_pegasus(model: Transformer, *, longest: int, decoding: DecodingConfig) -> Any:
    """Copy a model into a `PegasusForConditionalGeneration` in eval mode.

    Args:
        model: With pre-norm.
        longest: Positions it shall have; sinusoids end nowhere, but a table does.
        decoding: What `generate` does by itself. Its length penalty divides by length^p, ours by
            ((5 + length) / 6)^p: the same exponent is close, and at 0 both are equal.
    """
    transformers: Any = importlib.import_module("transformers")
    if isinstance(model.decoder.norm, nn.Identity):
        raise ValueError(
            "model.norm_first: only a model with pre-norm (true) is a Pegasus; this one is not."
        )
    size = model.size
    pegasus = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(
            vocab_size=len(model.embedding.weight),
            d_model=size.width,
            encoder_layers=size.encoder_layers,
            decoder_layers=size.decoder_layers,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            encoder_ffn_dim=size.inner,
            decoder_ffn_dim=size.inner,
            activation_function="relu",
            dropout=model.dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            max_position_embeddings=longest,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=EOS,
            tie_word_embeddings=True,
            normalize_before=True,  # this and the next are read by CTranslate2's converter
            normalize_embedding=False,
        )
    )
    pegasus.generation_config = transformers.GenerationConfig(
        num_beams=decoding.beams,
        length_penalty=decoding.length_penalty if decoding.beams > 1 else None,  # refused by save
        early_stopping=decoding.beams > 1,
        max_length=longest,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=EOS,
    )
    with torch.no_grad():
        pegasus.model.shared.weight.copy_(model.embedding.weight)
        sides = ((model.encoder, pegasus.model.encoder), (model.decoder, pegasus.model.decoder))
        for ours, theirs in sides:
            theirs.embed_positions.weight.copy_(model.positions.make(longest))
            _copy([theirs.layer_norm], ours.norm)
            for layer, other in zip(ours.layers, theirs.layers, strict=True):
                _copy_layer(layer, other)
    return pegasus.to(model.embedding.weight.device).eval()


def _copy_layer(ours: Any, theirs: Any) -> None:
    attention = theirs.self_attn
    _copy([attention.q_proj, attention.k_proj, attention.v_proj], ours.attention.read)
    _copy([attention.out_proj], ours.attention.write)
    _copy([theirs.self_attn_layer_norm], ours.after_attention.norm)
    _copy([theirs.fc1], ours.network.first)
    _copy([theirs.fc2], ours.network.second)
    _copy([theirs.final_layer_norm], ours.after_network.norm)
    if isinstance(ours, DecoderLayer):
        cross = theirs.encoder_attn
        _copy([cross.q_proj], ours.cross_attention.query)
        _copy([cross.k_proj, cross.v_proj], ours.cross_attention.memory)
        _copy([cross.out_proj], ours.cross_attention.write)
        _copy([theirs.encoder_attn_layer_norm], ours.after_cross_attention.norm)


def _copy(theirs: Sequence[nn.Module], ours: nn.Module) -> None:
    """Copy a module into one or, part by part, into several."""
    for name, values in ours.named_parameters():
        for other, part in zip(theirs, values.chunk(len(theirs)), strict=True):
            target: Tensor = getattr(other, name)
            target.copy_(part)


def make_tokenizer(vocabulary: bytes, longest: int) -> Any:
    """Make a tokenizer that cuts text as SentencePiece does."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto.FromString(vocabulary)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram(pieces, unk_id=UNKNOWN, byte_fallback=True)
    )
    charsmap = proto.normalizer_spec.precompiled_charsmap
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme="always", split=False
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = [pieces[number][0] for number in (PAD, BOS, EOS, UNKNOWN)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {names[EOS]}", special_tokens=[(names[EOS], EOS)]
    )
    tags = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(name, special=True, normalized=False, rstrip=name in tags)
            for name in (*names, *tags)
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=names[PAD],
        bos_token=names[BOS],
        eos_token=names[EOS],
        unk_token=names[UNKNOWN],
        additional_special_tokens=tags,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
