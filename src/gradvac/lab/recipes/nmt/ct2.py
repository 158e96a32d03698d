"""CTranslate2: our Transformer in its format, and searched by it.

Its beam search keeps and ends hypotheses as ours does, so that it finds the same ones. It divides
by length^p where we divide by ((5 + length) / 6)^p: their order is made our own afterwards, and
only where more have ended than there are beams may one be dropped that ours would have chosen.
Beyond ours it lists the best translations of a sentence and draws them at random.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradvac.lab.recipes.nmt.batches import Ragged
from gradvac.lab.recipes.nmt.beam_search import Hypothesis, length_penalty
from gradvac.lab.recipes.nmt.model import DecoderLayer, Transformer
from gradvac.lab.recipes.nmt.settings import DecodingConfig
from gradvac.lab.recipes.nmt.vocabulary import BOS, EOS, UNKNOWN
from gradvac.utils.hints import install_line

Hypotheses = list[list[Hypothesis]]  # of every sentence


def convert(
    model: Transformer,
    pieces: Sequence[str],
    folder: Path,
    *,
    longest: int,
    quantization: str | None = None,
) -> None:
    """Write a model as CTranslate2 reads it.

    Args:
        model: With pre-norm or post-norm.
        pieces: The vocabulary, by number.
        folder: Where to.
        longest: Positions it shall have; sinusoids end nowhere, but a table does.
        quantization: "int8", "float16", ...; None: as they are.
    """
    specs: Any = importlib.import_module("ctranslate2.specs")
    size, weights = model.size, _numbers(model.embedding.weight)
    is_pre_norm = not isinstance(model.decoder.norm, nn.Identity)
    layers = (size.encoder_layers, size.decoder_layers)
    spec = specs.TransformerSpec.from_config(layers, size.heads, pre_norm=is_pre_norm)
    spec.encoder.embeddings[0].weight = weights
    spec.decoder.embeddings.weight = weights
    spec.decoder.projection.weight = weights
    for ours, theirs in ((model.encoder, spec.encoder), (model.decoder, spec.decoder)):
        theirs.position_encodings.encodings = _numbers(model.positions.make(longest))
        if is_pre_norm:
            _set_norm(theirs.layer_norm, ours.norm)
        for layer, other in zip(ours.layers, theirs.layer, strict=True):
            _set_layer(other, layer)
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(list(pieces))
    spec.config.bos_token = spec.config.decoder_start_token = pieces[BOS]
    spec.config.eos_token, spec.config.unk_token = pieces[EOS], pieces[UNKNOWN]
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _set_layer(theirs: Any, ours: Any) -> None:
    # Queries, keys and values are one product there too; so are keys and values of the source.
    _set_attention(theirs.self_attention, [ours.attention.read, ours.attention.write])
    _set_norm(theirs.self_attention.layer_norm, ours.after_attention.norm)
    _set_linear(theirs.ffn.linear_0, ours.network.first)
    _set_linear(theirs.ffn.linear_1, ours.network.second)
    _set_norm(theirs.ffn.layer_norm, ours.after_network.norm)
    if isinstance(ours, DecoderLayer):
        cross = ours.cross_attention
        _set_attention(theirs.attention, [cross.query, cross.memory, cross.write])
        _set_norm(theirs.attention.layer_norm, ours.after_cross_attention.norm)


def _set_attention(theirs: Any, ours: Sequence[nn.Module]) -> None:
    for other, product in zip(theirs.linear, ours, strict=True):
        _set_linear(other, product)


def _set_linear(theirs: Any, ours: Any) -> None:
    theirs.weight, theirs.bias = _numbers(ours.weight), _numbers(ours.bias)


def _set_norm(theirs: Any, ours: Any) -> None:
    theirs.gamma, theirs.beta = _numbers(ours.weight), _numbers(ours.bias)


def _numbers(values: torch.Tensor) -> NDArray[np.float32]:
    return values.detach().float().cpu().numpy()


def longest_text(decoding: DecodingConfig, max_tokens: int) -> int:
    """Positions that sources and translations can reach, also with settings of others."""
    source = max_tokens + 2
    return max(1024, source, round(source * decoding.max_ratio) + decoding.max_extra + 1)


class CT2Search:
    """Translates sentences of token numbers, as `BeamSearch` does."""

    def __init__(
        self,
        model: Transformer,
        pieces: Sequence[str],
        settings: DecodingConfig,
        forbidden: Sequence[int],
        *,
        longest: int,
    ) -> None:
        if importlib.util.find_spec("ctranslate2") is None:
            need = "decoding.engine: CTranslate2 is not installed"
            raise ValueError(f"{need}; {install_line('export')}.")
        ctranslate2: Any = importlib.import_module("ctranslate2")
        device = model.embedding.weight.device
        with TemporaryDirectory() as folder:
            convert(model, pieces, Path(folder), longest=longest)
            self._translator = ctranslate2.Translator(
                folder,
                device=device.type,
                device_index=device.index or 0,
                intra_threads=torch.get_num_threads(),
            )
        self._pieces, self._settings = list(pieces), settings
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self._suppressed = [[pieces[number]] for number in forbidden]
        self._sampling: dict[str, Any] = {}
        if settings.sampling_topk is not None:
            temperature = settings.sampling_temperature
            self._sampling["sampling_topk"] = settings.sampling_topk
            self._sampling["sampling_temperature"] = 1.0 if temperature is None else temperature

    def decode_several(self, sources: Ragged, limits: Sequence[int], num: int) -> Hypotheses:
        """Find several translations of every sentence: the best of the beam, or drawn ones.

        Args:
            sources: With everything the encoder reads.
            limits: Most tokens of each translation, `</s>` included.
            num: How many; at most as many as beams, unless they are drawn.
        """
        sentences = np.split(sources.tokens, np.cumsum(sources.lengths)[:-1])
        by_limit: dict[int, list[int]] = defaultdict(list)  # one limit holds for a whole call
        for number, limit in enumerate(limits):
            by_limit[limit].append(number)
        found: dict[int, list[Hypothesis]] = {}
        for limit, numbers in by_limit.items():
            texts = [[self._pieces[token] for token in sentences[n]] for n in numbers]
            found |= zip(numbers, self._search(texts, limit, num), strict=True)
        return [found[number][:num] for number in range(len(sentences))]

    def _search(self, texts: Sequence[Sequence[str]], limit: int, num: int) -> Hypotheses:
        # Its penalty, length^p, which says what is dropped if more than the beams have ended, is
        # like ours for translations about as long as their sources.
        usual = float(np.mean([len(text) - 1 for text in texts]))  # without <2xx>
        power = self._settings.length_penalty * usual / (5.0 + usual)
        results = self._translator.translate_batch(
            texts,
            beam_size=self._settings.beams,
            # Without sampling all that ended, so that ours is the order among them.
            num_hypotheses=num if self._sampling else self._settings.beams,
            length_penalty=power,
            min_decoding_length=0,
            max_decoding_length=limit,
            suppress_sequences=self._suppressed,
            return_scores=True,
            return_end_token=True,
            max_batch_size=32,
            **self._sampling,
        )
        return [self._ordered(one.hypotheses, one.scores, power) for one in results]

    def _ordered(
        self, texts: Sequence[Sequence[str]], scores: Sequence[float], power: float
    ) -> list[Hypothesis]:
        """The translations of a sentence; those that the limit cut off come last."""
        alpha = self._settings.length_penalty
        found: list[Hypothesis] = []
        cut: list[Hypothesis] = []
        for text, score in zip(texts, scores, strict=True):
            tokens = tuple(self._numbers[piece] for piece in text)
            total = score * len(tokens) ** power
            normal = Hypothesis(tokens[:-1], total / float(length_penalty(len(tokens), alpha)))
            is_whole = tokens[-1:] == (EOS,)
            (found if is_whole else cut).append(normal)
        if self._sampling:
            return [*found, *cut]
        return sorted(found, key=lambda one: -one.score) + sorted(cut, key=lambda one: -one.score)
