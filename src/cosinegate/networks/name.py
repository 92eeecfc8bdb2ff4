"""What tables and records call a network."""

from cosinegate.config.schema import NetworkConfig


def network_name(network: NetworkConfig) -> str:
    """What a table calls the network."""
    if network.library is not None:
        return f"{network.library.name}-{network.model}"
    size = network.depth if network.blocks is None else "-".join(map(str, network.blocks))
    width = network.width if network.widths is None else "-".join(map(str, network.widths))
    return f"resnet{size}-w{width}"
