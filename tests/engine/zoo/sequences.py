"""Attention, recurrence, activation checkpointing and packed batches."""

# B rows, S tokens, D width

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import rows

from ._case import (
    B,
    Block,
    Case,
    D,
    HandWrittenNorm,
    Model,
    S,
    V,
    case,
    distance,
    next_token,
    output,
    tokens_of,
)

# -- attention -------------------------------------------------------------------------------


def nearby(x: Tensor) -> Tensor:
    """A mask [S, S] that prefers near positions."""
    position = torch.arange(x.shape[1], dtype=x.dtype)
    return -(position[:, None] - position).abs()


@case
def multihead_attention() -> Case:
    def run(m: Any, x: Tensor, padded: Tensor) -> Tensor:
        found, weights = m.attention(x, x, x, key_padding_mask=padded < -1.0)
        result: Tensor = m.block(found)
        return torch.cat([result.flatten(1), weights.flatten(1)], dim=1)

    model = Model(run, attention=nn.MultiheadAttention(D, 2, batch_first=True), block=Block())
    return Case(model, output, (torch.randn(B, S, D), torch.randn(B, S)))


@case
def attention_with_mask_per_head() -> Case:
    """A mask [B * heads, S, S], and keys and values of another width with an extra bias."""

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = (x[:, None, :, :1] * y[:, None, None, :, 0]).expand(-1, 2, -1, -1).flatten(0, 1)
        found, _ = m.attention(x, y, y, attn_mask=mask)
        result: Tensor = m.last(found)
        return result

    attention = nn.MultiheadAttention(D, 2, kdim=4, vdim=4, add_bias_kv=True, batch_first=True)
    model = Model(run, attention=attention, last=nn.Linear(D, 2))
    return Case(model, output, (torch.randn(B, S, D), torch.randn(B, 3, 4)))


def encoder_layers() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@case
def transformer_encoder() -> Case:
    model = Model(lambda m, x: m.layers(x, nearby(x)), layers=encoder_layers())
    return Case(model, output, (torch.randn(B, S, D),))


@case
def transformer_encoder_as_long_as_the_batch() -> Case:
    """The mask [S, S] looks like rows of the batch."""
    model = Model(lambda m, x: m.layers(x, nearby(x)), layers=encoder_layers())
    return Case(model, output, (torch.randn(B, B, D),))


@case
def transformer() -> Case:
    model = nn.Transformer(D, 2, 1, 2, 12, dropout=0.0, batch_first=True)
    return Case(model, output, (torch.randn(B, S, D), torch.randn(B, 4, D)), enc_dec=True)


# -- recurrence ------------------------------------------------------------------------------


@case
def lstm_with_states() -> Case:
    def run(m: Any, x: Tensor, state: Tensor) -> Tensor:
        first = m.start(state).view(len(x), 4, D).transpose(0, 1)
        found, (hidden, cell) = m.lstm(x, (first.contiguous(), first.tanh()))
        result: Tensor = m.last(found.mean(1) + (hidden + cell)[-2:].transpose(0, 1).flatten(1))
        return result

    lstm = nn.LSTM(D, D, num_layers=2, bidirectional=True, batch_first=True)
    model = Model(run, lstm=lstm, start=nn.Linear(4, 4 * D), last=nn.Linear(2 * D, 3))
    return Case(model, output, (torch.randn(B, S, D), torch.randn(B, 4)))


@case
def gru() -> Case:
    model = Model(
        lambda m, x: m.last(m.gru(m.words(x))[1][0]),
        words=nn.Embedding(V, D),
        gru=nn.GRU(D, D, batch_first=True),
        last=nn.Linear(D, 3),
    )
    return Case(model, output, (tokens_of(B, S),))


@case
def recurrent_cell() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(x), D, dtype=x.dtype)
        for step in x.unbind(1):
            hidden, cell = m.cell(step, (hidden, cell))
        result: Tensor = m.last(hidden)
        return result

    model = Model(run, cell=nn.LSTMCell(D, D), last=nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, 3, D),))


# -- activation checkpointing ----------------------------------------------------------------


def checkpointed(use_reentrant: bool) -> Case:
    """Whole blocks, a part of a block, and a table tied to a layer inside a checkpoint."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        def saving(part: Any, x: Tensor) -> Any:
            return checkpoint(part, x, use_reentrant=m.use_reentrant)

        x = m.blocks[1].norm(saving(m.blocks[0], m.words(tokens)))
        x = saving(lambda y: m.blocks[1].up(y).tanh(), x)
        result: Tensor = saving(m.head, saving(m.blocks[0], m.blocks[1].down(x)))
        return result

    model = Model(
        run,
        words=nn.Embedding(V, D),
        blocks=nn.ModuleList([Block(HandWrittenNorm()), Block()]),
        head=nn.Linear(D, V),
    )
    model.head.weight = model.words.weight
    model.__dict__["use_reentrant"] = use_reentrant
    return Case(model, next_token, (tokens_of(B, S),))


@case
def checkpointed_not_reentrant() -> Case:
    return checkpointed(use_reentrant=False)


@case
def checkpoint_inside_a_fallback() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(m.block, x + m.shift, use_reentrant=False)
        return result

    model = Model(run, shift=nn.Parameter(torch.randn(D)), block=Block())
    return Case(model, output, (torch.randn(B, S, D),))


# -- packed batches --------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """Keys and values have the rows of the source, the rest those of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(D, D), nn.Linear(D, D)
        self.key = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, y: Tensor, same: Tensor, tasks_of_y: Tensor) -> Tensor:
        with rows(tasks_of_y):
            key, value = self.key(y), self.value(y)
        scores = (self.query(x) @ key.mT).masked_fill(~same, -torch.inf)
        result: Tensor = x + scores.softmax(-1) @ value
        return result


@case
def packed() -> Case:
    """Dimension 0 is tokens; sentences have different lengths on both sides."""

    def losses(m: Any, tasks: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sentence = torch.arange(len(tasks))
        at_source = sentence.repeat_interleave(1 + sentence % 3)
        at_target = sentence.repeat_interleave(1 + (sentence + 1) % 4)
        source, target = source.flatten()[: len(at_source)], target.flatten()[: len(at_target)]
        same = at_target[:, None] == at_source
        with rows(tasks[at_source]):
            memory = m.encoder[1](m.encoder[0](source))
        with rows(tasks[at_target]):
            x = m.decoder["norm"](m.decoder["words"](target))
            x = m.decoder["attention"](x, memory, same, tasks[at_source])
            logits = m.head(x + m.decoder["positions"](torch.zeros(1, dtype=torch.int64)))
        entropy = F.cross_entropy(logits, target, reduction="none")
        return entropy.new_zeros(len(tasks)).index_add(0, at_target, entropy)

    def refuse(*args: object) -> Tensor:
        raise NotImplementedError

    model = Model(
        refuse,
        encoder=nn.Sequential(nn.Embedding(V, D), Block()),
        decoder=nn.ModuleDict(
            {
                "words": nn.Embedding(V, D),
                "positions": nn.Embedding(1, D),
                "norm": HandWrittenNorm(),
                "attention": CrossAttention(),
            }
        ),
        head=nn.Linear(D, V),
    )
    model.head.weight = model.encoder[0].weight
    return Case(model, losses, (tokens_of(B, S), tokens_of(B, S)), enc_dec=True)


@case
def heads_on_the_rows_of_their_task() -> Case:
    """Every head sees the rows of its task alone, and says so."""

    def losses(m: Any, tasks: Tensor, x: Tensor) -> Tensor:
        trunk: Tensor = m.trunk(x)
        total = trunk.new_zeros(len(x))
        for task in set(tasks.tolist()):
            own = (tasks == task).nonzero()[:, 0]
            with rows(tasks[own]):
                total = total.index_copy(0, own, distance(m.heads[task](trunk[own])))
        return total

    def refuse(*args: object) -> Tensor:
        raise NotImplementedError

    heads = nn.ModuleList([Block(), Block(HandWrittenNorm()), Block()])
    return Case(Model(refuse, trunk=Block(), heads=heads), losses, (torch.randn(B, S, D),))
