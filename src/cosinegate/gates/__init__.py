"""One file a policy. A gate answers one question: how open, for each sample?"""

from cosinegate.gates.cosine import Controller, CosineGate
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate, Seen
from cosinegate.gates.predictive import LEAK, STATISTICS, PredictiveGate, Predictor

__all__ = ["LEAK", "STATISTICS", "Controller", "CosineGate", "Decision", "Gate", "PredictiveGate", "Predictor", "Seen"]
