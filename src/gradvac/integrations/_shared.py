"""What all integrations require of several processes."""

from gradvac import Aligner

_REPLICAS = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_backend(kind: str, argument: str) -> None:
    """Raise for engines that run the backward pass themselves.

    Args:
        kind: Accelerate's word for how processes train together.
        argument: Where the user chose it.
    """
    if kind not in _REPLICAS:
        raise ValueError(
            f"{argument}: {kind} runs the backward pass itself; switch it off. Several processes "
            "train replicas of the model (DistributedDataParallel)."
        )


def check_processes(aligner: Aligner, num_processes: int, argument: str) -> None:
    """Raise before replicas drift apart.

    Args:
        aligner: The aligner.
        num_processes: Processes of the trainer.
        argument: Where the aligner comes from.
    """
    if aligner.num_processes != num_processes:
        raise ValueError(
            f"{argument}: {num_processes} processes train, but the aligner knows of "
            f"{aligner.num_processes}, so replicas would drift apart; give Aligner the model "
            "in DistributedDataParallel, or process_group=torch.distributed.group.WORLD."
        )
