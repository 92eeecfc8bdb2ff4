"""One file for each gate. A gate decides how open its block is, for each sample."""

from cosinegate.gates.cosine import Controller, CosineGate
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate

__all__ = ["Controller", "CosineGate", "Decision", "Gate"]
