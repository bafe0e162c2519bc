"""How context parallelism deals out the tokens of a sequence. Plain numbers, no torch."""

from typing import Any

ORDERS = ("headtail", "contiguous")
METHODS = ("allgather", "ring", "ulysses")


def sequence_order(job_config: Any) -> str:
    """The order that a job asks for: `[mixle] context_parallel_order`, or else TorchTitan's load balancer."""
    own: str | None = job_config.mixle.context_parallel_order
    return own or job_config.parallelism.context_parallel_load_balancer or "contiguous"


def chunks_of_rank(order: str, rank: int, cp: int) -> list[int]:
    """Which of the equal chunks of a sequence a rank holds, in the order in which it holds them.

    "contiguous" has one chunk a rank. "headtail" has two, one from either end, so that under a causal mask, where late
    tokens attend to more keys than early ones, every rank has the same work.
    """
    return [rank] if order == "contiguous" else [rank, 2 * cp - 1 - rank]


def chunks_per_rank(order: str) -> int:
    return len(chunks_of_rank(order, 0, 1))
