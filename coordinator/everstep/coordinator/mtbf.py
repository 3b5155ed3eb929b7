"""How long a job is expected to train between two failures: what it has shown, and a prior.

The prior's default, 2,500 hours a node, lies between what two fleets with 8 GPUs a node published:
1,000 (jobs of 1,024 GPUs fail every 7.9 hours: Kokolis et al. 2024, arXiv 2410.21680) and 6,300
(419 unexpected interruptions of 16,384 GPUs in 54 days: Llama Team 2024, arXiv 2407.21783). Fleets
differ that much, so it has the weight of a tenth of a failure.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.coordinator.books import JobBook
    from everstep.coordinator.config import CoordinatorConfig


def expected_s(
    failures: int, node_s: float, *, nodes: int, prior_node_s: float, weight: float
) -> float:
    """Return the mean time between failures of a job on `nodes` nodes, in seconds.

    `failures` were seen in `node_s` node-seconds. Before that a node was expected to fail once in
    `prior_node_s`, held with the weight of so many failures (the mean of a Gamma posterior).

    >>> expected_s(0, 0.0, nodes=2, prior_node_s=100.0, weight=0.5)
    50.0
    >>> expected_s(10, 100.0, nodes=1, prior_node_s=1000.0, weight=0.5)
    57.142857142857146
    """
    return (weight * prior_node_s + node_s) / (weight + failures) / nodes


def of_job(book: JobBook, *, nodes: int, now_s: float, config: CoordinatorConfig) -> float:
    """Return how long a job will train between two failures on so many nodes, in seconds."""
    return expected_s(
        len(book.failures),
        _node_s(book, now_s),
        nodes=nodes,
        prior_node_s=config.mtbf_prior_h * 3600,
        weight=config.mtbf_prior_weight,
    )


def _node_s(book: JobBook, now_s: float) -> float:
    """Return how long how many nodes have been in the plan in force."""
    spans = [(g.committed_at_s, len(g.members)) for g in book.generations]
    ends = pairwise([*spans, (now_s, 0)])
    return sum(nodes * max(0.0, until_s - from_s) for (from_s, nodes), (until_s, _) in ends)
