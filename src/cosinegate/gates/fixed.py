"""A control: a pattern that is given before training and never moves."""

from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Seen, Slot, StaticGate, decided
from cosinegate.schema import GateConfig


class FixedGate(StaticGate):
    """Open or closed for good: a smaller network inside the slots of the larger one."""

    def __init__(self, is_open: bool) -> None:
        super().__init__()
        self.for_good = is_open

    @property
    def constant(self) -> bool:
        return self.for_good

    @property
    def is_open(self) -> bool:
        return self.for_good

    @property
    def is_closed(self) -> bool:
        return not self.for_good

    def decide(self, seen: Seen) -> Decision:
        logit = seen.new_full((len(seen),), 1.0 if self.for_good else -1.0)
        return decided((logit > 0).to(logit.dtype), logit)

    def extra_repr(self) -> str:
        return f"is_open={self.for_good}"


def make(config: GateConfig, slot: Slot) -> FixedGate:
    return FixedGate(bool(config.pattern[slot.place]))
