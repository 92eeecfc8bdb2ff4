"""Early exits for a trained network (BranchyNet, Teerapittayanon et al. 2016), fitted while its weights stay frozen."""

from cosinegate.deploy.exits.network import EarlyExitNetwork, Exit

__all__ = ["EarlyExitNetwork", "Exit"]
