"""Routing or pruning? A block that is open, or closed, for every sample routes nothing."""

DYNAMIC = (0.05, 0.95)  # a block routes by input when the fraction of the samples that compute it lies between these


def routed_percent(opened: list[float]) -> float:
    """The part of skip_percent that dynamic blocks skip; `opened` is each block's fraction of open samples.

    The rest is static: blocks that are closed for all samples, or nearly so.
    """
    return 100 * sum(1 - fraction for fraction in opened if DYNAMIC[0] <= fraction <= DYNAMIC[1]) / len(opened)
