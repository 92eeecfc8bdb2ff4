"""Routing or pruning: a block that is open, or closed, for every sample routes nothing."""

DYNAMIC = (0.05, 0.95)  # a block routes by input when the fraction of the samples that compute it lies between these


def routed_percent(opened: list[float]) -> float:
    """Returns the part of skip_percent that dynamic blocks skip; `opened` is each block's open fraction.

    The rest is static: blocks that are closed for all samples, or nearly all.
    """
    return 100 * sum(1 - fraction for fraction in opened if DYNAMIC[0] <= fraction <= DYNAMIC[1]) / len(opened)
