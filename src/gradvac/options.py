"""Which options of the aligner go together."""


def refuse_contradictions(
    engine: str,
    *,
    recompute: bool,
    has_storage: bool,
    has_metric: bool,
    exact: bool,
    is_shared: bool,
    is_sharded: bool,
) -> None:
    """Refuse options of `Aligner` that would be ignored, or that exclude each other.

    `has_storage` stands for `offload` and `storage_dtype`; `is_shared` and `is_sharded` say whether
    several processes train the model, and whether FSDP2 divides it among them.
    """
    if engine == "per_task" and recompute:
        raise ValueError('recompute: is for engine="one_backward"; per_task stores gradients.')
    if engine == "one_backward" and has_storage:
        raise ValueError(
            'offload, storage_dtype: are for engine="per_task"; one_backward stores nothing.'
        )
    if is_shared and (recompute or has_storage):
        raise ValueError(
            "recompute, offload, storage_dtype: are for a single process; with several, each "
            "keeps the task gradients of its own rows until they are exchanged."
        )
    if has_metric and (recompute or is_shared):
        raise ValueError(
            "metric (align.space of a config): needs the task gradients of the whole batch in "
            "one process, which are not kept with recompute=True or with several processes."
        )
    if not is_shared and not exact:
        raise ValueError("exact: False is for several processes; a single one is exact.")
    if not exact and is_sharded:
        raise ValueError(
            "exact: False needs the whole gradient in every process, which FSDP2 does not "
            "keep; give every process few tasks instead."
        )
