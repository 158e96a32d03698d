"""A random BERT with a real WordPiece tokenizer, small enough for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from gradvac.lab.recipes.tagging.encoder import quiet_transformers

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def save_tiny_encoder(
    folder: Path, lines: Sequence[str], *, size: int, layers: int = 2, longest: int = 32
) -> None:
    """Learn a tokenizer from lines, and save it with an untrained model."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{key}_token": token for key, token in SPECIAL.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **names)
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=longest,
        )
    )
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
