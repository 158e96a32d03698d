"""Scores by task; they live in the library, where reports read them."""

from gradvac.run_files import (
    ALL,
    RESOURCE_LEVELS,
    TaskScores,
    level_rank,
    read_scores,
    scored_weights,
    write_scores,
)

__all__ = [
    "ALL",
    "RESOURCE_LEVELS",
    "TaskScores",
    "level_rank",
    "read_scores",
    "scored_weights",
    "write_scores",
]
