"""Masks the secrets of the environment in every file that a run writes: W&B's key, tokens, passwords."""

import netrc
import os
from pathlib import Path

ENDINGS = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_ACCESS_KEY")
SHORTEST = 16  # a shorter word may be one that a text has by chance
MASK = "(secret)"


def masked(text: str) -> str:
    """Returns the text without the secrets of the environment and of ~/.netrc."""
    for word in sorted(secrets(), key=len, reverse=True):
        text = text.replace(word, MASK)
    return text


def secrets() -> set[str]:
    words = {value for name, value in os.environ.items() if name.upper().endswith(ENDINGS)}
    try:
        machines = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts.values()
        words |= {password for _, _, password in machines if password}
    except (OSError, netrc.NetrcParseError, RuntimeError, ValueError):
        pass  # there is none, or nothing that W&B could read either
    return {word for word in words if len(word) >= SHORTEST and word[0] != "/" and not {" ", "\n"} & set(word)}
