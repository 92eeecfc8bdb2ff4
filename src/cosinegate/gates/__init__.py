"""One file a gate. A gate answers one question: how open is the block, for each sample?"""

from cosinegate.gates.cosine import Controller, CosineGate
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate

__all__ = ["Controller", "CosineGate", "Decision", "Gate"]
