"""Model components: which parameters share one Gram matrix, and the side each is on.

A granularity maps every trainable parameter to exactly one component (the paper's "model
component"). Tied parameters count once, under the first of their names.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import nn

Granularity = str | Callable[[str], str]

GRANULARITIES = ("whole_model", "enc_dec", "all_layer", "all_matrix")
ENCODER, DECODER, SHARED = "encoder", "decoder", "shared"
_WORDS = {
    DECODER: frozenset({"decoder", "decoders", "dec"}),
    ENCODER: frozenset({"encoder", "encoders", "enc"}),
}


class Components(Mapping[str, tuple[str, ...]]):
    """Component name -> names of its parameters, in model order; prints as a table."""

    def __init__(self, members: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> None:
        self._members = dict(members)
        self._sizes = {
            name: sum(sizes[p] for p in parameters) for name, parameters in self._members.items()
        }

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def members(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """The parameters themselves, by component."""
        parameters = dict(model.named_parameters())
        return [[parameters[name] for name in names] for names in self.values()]

    def __repr__(self) -> str:
        width = max(len("component"), *(len(name) for name in self))
        lines = [f"{'component':{width}}  tensors  parameters"]
        lines += [
            f"{name:{width}}  {len(parameters):7}  {self._sizes[name]:>10,}"
            for name, parameters in self._members.items()
        ]
        return "\n".join(lines)


def split(model: nn.Module, granularity: Granularity) -> Components:
    """The components of a model.

    Args:
        model: Any module; parameters with `requires_grad=False` are left out.
        granularity: "whole_model", "enc_dec", "all_layer", "all_matrix", or a callable from a
            parameter name to the name of its component.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapeless = [n for n, p in trained.items() if isinstance(p, nn.UninitializedParameter)]
    if shapeless:
        raise ValueError(
            f"model: {shapeless[0]} has no shape before its lazy module has run; run the model on "
            "a batch first."
        )
    sizes = {name: p.numel() for name, p in trained.items()}
    if not sizes:
        raise ValueError("model: has no parameter with requires_grad=True; nothing to train.")
    assign = _assignment(model, granularity, list(sizes))
    members: dict[str, tuple[str, ...]] = {}
    for parameter in sizes:
        component = assign(parameter)
        if not isinstance(component, str):
            raise ValueError(
                f"granularity: the callable must return a component name (str) for every "
                f"parameter, but returned {component!r} for {parameter!r}."
            )
        members[component] = (*members.get(component, ()), parameter)
    return Components(members, sizes)


def _assignment(
    model: nn.Module, granularity: Granularity, parameters: list[str]
) -> Callable[[str], str]:
    if callable(granularity):
        return granularity
    if granularity == "whole_model":
        return lambda _: "model"
    if granularity == "all_matrix":
        return lambda name: name
    if granularity == "all_layer":
        layers = _layers(model)
        return lambda name: layers[name]
    if granularity == "enc_dec":
        return _enc_dec(model, parameters)
    raise ValueError(
        f"granularity: must be one of {GRANULARITIES} or a callable, got {granularity!r}."
    )


def _enc_dec(model: nn.Module, parameters: list[str]) -> Callable[[str], str]:
    """Encoder, decoder, and what neither owns (a shared embedding, a head): "shared"."""
    sides = {name: side_and_owner(name) for name in parameters}
    counts = Counter(side for side, _ in sides.values())
    owners = {side: {owner for other, owner in sides.values() if other == side} for side in counts}
    # Side by side: the `decoder` inside a masked language model's head makes it no decoder.
    if owners.get("encoder", set()).isdisjoint(owners.get("decoder", set())):
        raise ValueError(
            'granularity: "enc_dec" needs an encoder and a decoder side by side, but of the '
            f"parameters {counts['encoder']} are in an encoder, {counts['decoder']} in a decoder, "
            f"{counts['shared']} in neither; the submodules are "
            f'{[name for name, _ in model.named_children()]}. Use "all_layer", or a callable.'
        )
    return lambda name: sides[name][0]


def _layers(model: nn.Module) -> dict[str, str]:
    """Parameter name -> layer.

    A layer is an entry of a stack (`ModuleList`, or a `Sequential` of like modules), the outermost
    one: a T5 block, not its sub-layers. What lies outside the stacks (embeddings, final norms,
    heads) is grouped by the largest module that holds no stack.
    """
    layer_of: dict[int, str] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            layer_of.setdefault(id(parameter), _join(path, name))
        for name, child in module.named_children():
            where = _join(path, name)
            if _is_stack(module) or not _holds_stack(child):
                for parameter in child.parameters():
                    layer_of.setdefault(id(parameter), where)
            else:
                visit(child, where)

    if _holds_stack(model):
        visit(model, "")
    else:  # no stack anywhere: every module that owns parameters is a layer
        for name, parameter in model.named_parameters():
            layer_of[id(parameter)] = name.rpartition(".")[0] or "model"
    return {name: layer_of[id(parameter)] for name, parameter in model.named_parameters()}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_stack(module: nn.Module) -> bool:
    """Whether the children are layers, not parts with layers of their own."""
    if isinstance(module, nn.ModuleList):
        return True
    kinds = {type(child) for child in module.children() if any(True for _ in child.parameters())}
    return isinstance(module, nn.Sequential) and len(kinds) == 1


def _holds_stack(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    return any(isinstance(m, containers) and len(m) > 0 for m in module.modules())


def side_of(name: str) -> str:
    """The side of a model that a parameter or component is on: encoder, decoder or shared."""
    return side_and_owner(name)[0]


def side_and_owner(name: str) -> tuple[str, str]:
    """The side, and the path of the module that owns it.

    The outermost word decides: `decoder.layers.0.encoder_attn` is in the decoder.
    """
    segments = name.split(".")
    for depth, segment in enumerate(segments):
        words = frozenset(segment.lower().split("_"))
        for side, side_words in _WORDS.items():
            if words & side_words:
                return side, ".".join(segments[:depth])
    return SHARED, ""
