"""Which parameters share a component: every trainable one is in exactly one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner
from gradvac.engine import split

GRANULARITIES = ["whole_model", "enc_dec", "all_layer", "all_matrix"]


class Layer(nn.Module):
    """A Transformer layer with parameters of its own, outside any leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.gate = nn.Parameter(torch.zeros(4))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(4)


class Own(nn.Module):
    """An encoder-decoder as one writes it oneself; embedding and softmax tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.positions = nn.Parameter(torch.zeros(7, 4))
        self.encoder, self.decoder = Half(), Half()
        self.softmax = nn.Linear(4, 11)
        self.softmax.weight = self.embedding.weight


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 10)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.heads = nn.ModuleDict({"fr": nn.Linear(4, 2), "hi": nn.Linear(4, 3)})


class Plain(nn.Module):
    """No stack anywhere, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)


def tiny_bert(**options: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 20, "intermediate_size": 16, "max_position_embeddings": 16}
    return BertConfig(**sizes, **options)


def bert() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(tiny_bert())


def bert_mlm(**options: Any) -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(tiny_bert(**options))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(config)


def m2m100() -> nn.Module:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
    config = M2M100Config(vocab_size=20, d_model=8, max_position_embeddings=16, **sides)
    return M2M100ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16, **tokens)
    return GPT2LMHeadModel(config)


def layers(prefix: str, count: int = 2) -> list[str]:
    return [f"{prefix}.{i}" for i in range(count)]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "own": (
        Own,
        [
            "positions",
            "embedding",
            *layers("encoder.layers"),
            "encoder.norm",
            *layers("decoder.layers"),
            "decoder.norm",
            "softmax",
        ],
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        [*layers("encoder.layers"), "encoder.norm", *layers("decoder.layers"), "decoder.norm"],
    ),
    "bert": (
        bert,
        ["bert.embeddings", *layers("bert.encoder.layer"), "bert.pooler", "classifier"],
    ),
    "bert mlm": (bert_mlm, ["bert.embeddings", *layers("bert.encoder.layer"), "cls"]),
    "t5": (
        t5,
        [
            "shared",
            *layers("encoder.block"),
            "encoder.final_layer_norm",
            *layers("decoder.block"),
            "decoder.final_layer_norm",
        ],
    ),
    "m2m100": (
        m2m100,
        [
            "model.shared",
            *layers("model.encoder.layers"),
            "model.encoder.layer_norm",
            *layers("model.decoder.layers"),
            "model.decoder.layer_norm",
        ],
    ),
    "gpt2": (
        gpt2,
        ["transformer.wte", "transformer.wpe", *layers("transformer.h"), "transformer.ln_f"],
    ),
    "resnet": (ResNet, ["conv", "norm", *layers("layer1"), *layers("layer2"), "fc"]),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()),
        ["0", "2"],
    ),
    "mlp with norms": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 1)),
        ["0", "1", "3"],
    ),
    "heads": (Heads, ["trunk.0", "trunk.2", "heads.fr", "heads.hi"]),
    "plain": (Plain, ["model", "first", "second"]),
    "one layer": (lambda: nn.Linear(2, 2), ["model"]),
}
each_model = pytest.mark.parametrize("name", MODELS)
WITH_BOTH_SIDES = {"own", "nn.Transformer", "t5", "m2m100"}


@each_model
def test_layers(name: str) -> None:
    make, expected = MODELS[name]
    assert list(split(make(), "all_layer")) == expected


@each_model
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_trainable_parameter_is_in_exactly_one(name: str, granularity: str) -> None:
    if granularity == "enc_dec" and name not in WITH_BOTH_SIDES:
        granularity = "all_layer"
    model = MODELS[name][0]()
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    components = split(model, granularity)
    every_name = dict(model.named_parameters(remove_duplicate=False))
    found = [every_name[parameter] for own in components.values() for parameter in own]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(found) == len(set(found)) == len(trainable)
    assert set(found) == set(trainable)
    for line, parameters in zip(str(components).splitlines()[1:], components.values(), strict=True):
        size = sum(every_name[parameter].numel() for parameter in parameters)
        assert line.split()[-1] == f"{size:,}"


@pytest.mark.parametrize("name", sorted(WITH_BOTH_SIDES))
def test_encoder_and_decoder(name: str) -> None:
    components = split(MODELS[name][0](), "enc_dec")
    for side in ("encoder", "decoder"):
        assert all(side in parameter.split(".") for parameter in components[side])
    rest = set(components) - {"encoder", "decoder"}
    assert rest <= {"shared"}
    for parameter in components.get("shared", ()):
        assert not {"encoder", "decoder"} & set(parameter.split("."))


def test_cross_attention_belongs_to_the_decoder() -> None:
    components = split(m2m100(), "enc_dec")
    assert "model.decoder.layers.0.encoder_attn.q_proj.weight" in components["decoder"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("bert", r"32 are in an encoder, 0 in a decoder, 9 in neither; .* 'classifier'\]"),
        ("untied bert mlm", r"32 are in an encoder, [12] in a decoder, .* \['bert', 'cls'\]"),
        ("gpt2", r"0 are in an encoder, 0 in a decoder, 28 in neither; .* 'lm_head'\]"),
        ("mlp", r"0 are in an encoder, 0 in a decoder, 4 in neither; .* \['0', '1', '2', '3'\]"),
    ],
)
def test_a_model_without_both_sides_is_told_what_was_found(name: str, found: str) -> None:
    model = bert_mlm(tie_word_embeddings=False) if name == "untied bert mlm" else MODELS[name][0]()
    message = rf'^granularity: "enc_dec" needs an encoder and a decoder .* {found}. Use "all_layer"'
    with pytest.raises(ValueError, match=message):
        split(model, "enc_dec")


def test_an_autoencoder_has_both_sides() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)})
    assert list(split(model, "enc_dec")) == ["encoder", "decoder"]


def test_parameters_of_non_leaf_modules() -> None:
    components = split(Own(), "all_layer")
    layer = components["encoder.layers.1"]
    assert "encoder.layers.1.attention.in_proj_weight" in layer
    assert "encoder.layers.1.attention.out_proj.bias" in layer
    assert "encoder.layers.1.gate" in layer
    assert "encoder.layers.1.feed_forward.2.weight" in layer
    assert components["positions"] == ("positions",)


def test_tied_parameters_count_once_under_their_first_name() -> None:
    components = split(Own(), "all_layer")
    assert components["embedding"] == ("embedding.weight",)
    assert components["softmax"] == ("softmax.bias",)
    shared = split(t5(), "all_matrix")
    assert "shared.weight" in shared
    assert not any("embed_tokens" in name or "lm_head" in name for name in shared)


def test_whole_model_and_matrices() -> None:
    model = Own()
    names = [name for name, _ in model.named_parameters()]
    assert split(model, "whole_model") == {"model": tuple(names)}
    assert split(model, "all_matrix") == {name: (name,) for name in names}


def test_a_callable_names_the_component() -> None:
    def by_kind(name: str) -> str:
        return "biases" if name.endswith("bias") else "rest"

    components = split(MODELS["mlp"][0](), by_kind)
    assert components == {"rest": ("0.weight", "2.weight"), "biases": ("0.bias", "2.bias")}


@pytest.mark.parametrize("returned", [None, 3, ("encoder",)])
def test_a_callable_must_return_strings(returned: object) -> None:
    message = r"granularity: the callable must return .*\(str\) .* returned .* for '0.weight'"
    with pytest.raises(ValueError, match=message):
        split(MODELS["mlp"][0](), lambda _: returned)


def test_the_table_can_be_read() -> None:
    model = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 1))
    aligner = Aligner(model, ["fr", "hi"], engine="per_task")
    assert repr(aligner.components).splitlines() == [
        "component  tensors  parameters",
        "0                2       2,100",
        "2                2         101",
    ]
    assert dict(aligner.components) == {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    with pytest.raises(TypeError):
        aligner.components["0"] = ()


def test_frozen_layers_are_no_components() -> None:
    model = Own()
    model.encoder.requires_grad_(False)
    assert not any(name.startswith("encoder") for name in split(model, "all_layer"))
    with pytest.raises(ValueError, match="0 are in an encoder"):
        split(model, "enc_dec")


def test_a_compiled_model_keeps_its_names() -> None:
    class Wrapper(nn.Module):  # what torch.compile returns, without compiling
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

        def forward(self, x: Tensor) -> Tensor:
            return self._orig_mod(x)

    aligner = Aligner(Wrapper(MODELS["mlp"][0]()), ["fr", "hi"], engine="per_task")
    assert list(aligner.components) == ["0", "2"]
