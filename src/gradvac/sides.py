"""Encoder or decoder: the side of a model that a parameter or component is on, by its name."""

ENCODER, DECODER, SHARED = "encoder", "decoder", "shared"
_WORDS = {
    DECODER: frozenset({"decoder", "decoders", "dec"}),
    ENCODER: frozenset({"encoder", "encoders", "enc"}),
}


def side_of(name: str) -> str:
    """The side: "encoder", "decoder", or "shared"."""
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
