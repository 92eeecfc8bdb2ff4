"""The parts of a run's record, with the ranges of their values."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Self

from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from cosinegate.config.ranges import is_plain_name
from cosinegate.terminal.errors import UserError

MOST_EPOCHS = 10**9


def _or_nan(value: Any, check: Callable[[Any], float]) -> float:
    return value if isinstance(value, float) and math.isnan(value) else check(value)


OrNan = WrapValidator(_or_nan)  # of a run that diverged: a page shows a dash, a table refuses it
PlainName = Annotated[str, Predicate(is_plain_name)]  # some of them name files
Printable = Annotated[str, Predicate(str.isprintable)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionOrNan = Annotated[Fraction, OrNan]
Percent = Annotated[float, Field(ge=-1, le=101), OrNan]  # with room for rounding
Ratio = Annotated[float, Field(ge=0, le=1e6)]  # the dense network = 1
RatioOrNan = Annotated[Ratio, OrNan]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Number = Annotated[int | float, Field(ge=0, le=1e12)]  # a count, which metrics.csv has as a float
Count = Annotated[int, Field(ge=0, le=MOST_EPOCHS)]
Epoch = Annotated[int, Field(ge=1, le=MOST_EPOCHS)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


class Part(BaseModel):
    """A part of a record. Keys of other versions are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns what record.json holds: the keys that were given, null or not."""
        return self.model_dump(exclude_unset=True)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other values. Ends with one line where a value is one that no run can have."""
        content = self.as_dict() | changes
        try:
            return self.model_validate(content)
        except ValidationError as error:
            raise UserError(f"a run's record cannot hold {wrong_value(error, content)}") from error


class Epochs(Part):
    """Planned and trained epochs; null for exits that were fitted to a checkpoint without its run's record."""

    planned: Epoch | None = None
    done: Count | None


class Accuracy(Part):
    """Accuracy of the last and the best validation, and of the test; epochs count from 1."""

    last: FractionOrNan | None = None
    last_epoch: Count | None = None
    best: FractionOrNan | None = None
    best_epoch: Count | None = None
    best_skip_percent: Percent | None = None
    epoch_100: FractionOrNan | None = None
    epoch_100_skip_percent: Percent | None = None
    test: FractionOrNan | None = None
    test_of: str | None = None  # the checkpoint


class Flops(Part):
    """FLOPs counted as the paper does, executed, and as compiling the gates would leave them."""

    counted: RatioOrNan | None = None
    executed: RatioOrNan | None = None
    dense_per_image: Annotated[int, Field(ge=0, le=10**18)] | None = None
    compiled: Ratio | None = None


class Compiled(Part):
    """The compiled network: FLOPs, blocks, and the number of test images with the trained network's class."""

    executed: Ratio
    blocks: Count
    dynamic_blocks: Count | None = None
    same_class: Count
    images: Count


class Latency(Part):
    """How `latency_ms` was measured, and its ratio to the dense network in the same minutes."""

    batch: Count | None = None
    engine: str | None = None
    threads: Count | None = None
    time_ratio: Ratio | None = None
    measured: str | None = None


class Cut(Part):
    """The trainer's keys that made a run see less than its epochs have."""

    max_steps: int | None = None
    max_time: str | None = None
    overfit_batches: Number | None = None


class Source(Part):
    """The run that weights were taken from."""

    run: str | None = None
    checkpoint: str | None = None
    sha256: str | None = None
    identity: str | None = None
    seed: Seed | None = None
    epochs: Count | None = None


class Exits(Part):
    """Early exits: the network that they were fitted to, where they stand, and at which budget."""

    source: str | None = None
    after: list[Count] | None = None
    budget: Ratio | None = None
    own_accuracy: Fraction | None = None
    own_executed: Ratio | None = None


class Program(Part):
    """The program that trains: commit and packages."""

    git_commit: str | None = None
    git_changed: bool | None = None
    versions: dict[str, Any] | None = None


class Span(Program):
    """The first and the last epoch that a program trained."""

    epochs: Annotated[list[Epoch], Field(min_length=2, max_length=2)]


def wrong_value(error: ValidationError, content: Any) -> str:
    """Returns the first wrong key and its value, in words."""
    keys = []
    for key in error.errors(include_url=False, include_context=False)[0]["loc"]:
        if not isinstance(content, dict) or key not in content:
            break
        keys.append(key)
        content = content[key]
    return f"{'.'.join(keys)} = {str(content)[:80]}"
