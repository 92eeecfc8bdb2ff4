"""Routing or pruning? A block that is open, or closed, for every sample routes nothing."""

DYNAMIC = (0.05, 0.95)  # a block routes by input when the share of samples that compute it lies between these


def routed_percent(opened: list[float]) -> float:
    """Of skip_percent, what blocks skip that route by input, from each block's share of samples that compute it.

    The rest is static: blocks that are closed for all samples, or nearly so.
    """
    return 100 * sum(1 - share for share in opened if DYNAMIC[0] <= share <= DYNAMIC[1]) / len(opened)
