"""One file a policy. A gate answers one question: how open, for each sample?"""

from cosinegate.gates.cosine import Controller, CosineGate, Decision

__all__ = ["Controller", "CosineGate", "Decision"]
