"""One file a policy. A gate answers one question: how open, for each sample?"""

from cosinegate.gates.cosine import Controller, CosineGate

__all__ = ["Controller", "CosineGate"]
