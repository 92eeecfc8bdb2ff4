"""The words a config may use where it has a choice."""

from enum import Enum


class Dataset(Enum):
    cifar10 = "cifar10"
    mnist = "mnist"
    fashion_mnist = "fashion_mnist"
    digits = "digits"


class Validation(Enum):
    """What the best epoch is chosen on."""

    test = "test"  # the test set, as the paper does; the record says so
    holdout = "holdout"  # training images kept aside; the test set is touched once, at the end


class GateKind(Enum):
    cosine = "cosine"
    none = "none"  # the dense baseline


class Polarity(Enum):
    """Which way CIR moves the gate."""

    paper = "paper"  # the equation as printed: γ < 0, high CIR closes
    novelty = "novelty"  # the prose and Fig. 1: γ = +|γ_0|, high CIR opens


class Shortcut(Enum):
    """The identity path where the shape changes between stages (He et al.'s options A and B)."""

    pad = "pad"
    projection = "projection"


class Annealing(Enum):
    """How the temperature goes from its first to its last value over a run."""

    none = "none"
    linear = "linear"
    exponential = "exponential"
    cosine = "cosine"


class Weighting(Enum):
    """What a block counts for in the mean gate ḡ of the penalty."""

    mean = "mean"  # the same, as the paper has it
    flops = "flops"  # as many as its residual costs


class Checkpoint(Enum):
    """Which of a run's checkpoints to look at."""

    last = "last"
    best = "best"


class Cost(Enum):
    """What accuracy is held against."""

    counted = "counted"  # the mean gate, as the paper counts
    executed = "executed"  # FLOPs that ran, over the dense network's
    latency = "latency"  # measured milliseconds an image


class Sampler(Enum):
    """How a search chooses the next place."""

    nsga2 = "nsga2"
    tpe = "tpe"
