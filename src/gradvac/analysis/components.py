"""Where in a model a component is, read off its name."""

import re

ENCODER, DECODER, SHARED = "encoder", "decoder", "shared"
_ENCODER = frozenset({"encoder", "encoders", "enc"})
_DECODER = frozenset({"decoder", "decoders", "dec"})


def side_of(component: str) -> str:
    """The side of a model a component is on: "encoder", "decoder", or "shared".

    The outermost word decides: `decoder.layers.0.encoder_attn` is in the decoder.
    """
    for segment in component.lower().split("."):
        words = frozenset(segment.split("_"))
        if words & _DECODER:
            return DECODER
        if words & _ENCODER:
            return ENCODER
    return SHARED


def layer_of(component: str) -> int | None:
    """The number of the layer, the outermost one named; None for embeddings and the like."""
    number = re.search(r"(?:^|[._])(\d+)(?=[._]|$)", component)
    return None if number is None else int(number[1])
