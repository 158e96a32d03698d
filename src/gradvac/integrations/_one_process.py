"""The refusal of several processes, in one place for all integrations."""


def refuse_several(num_processes: int, how: str) -> None:
    """Stop before replicas drift apart.

    Args:
        num_processes: Processes, or replicas within one.
        how: What to set to run in one, as a sentence part.
    """
    if num_processes > 1:
        raise ValueError(
            f"processes: there are {num_processes}, and each would combine its own task gradients; "
            f"the replicas would drift apart. Run in one process: {how}."
        )
