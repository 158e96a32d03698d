"""The laboratory: whole systems trained with the library; the docstring of `gradvac` is the map."""
