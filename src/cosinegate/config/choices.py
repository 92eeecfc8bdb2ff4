"""The words a config may use where it has a choice."""

from enum import Enum


class Dataset(Enum):
    cifar10 = "cifar10"
    mnist = "mnist"
    fashion_mnist = "fashion_mnist"
    digits = "digits"
    folder = "folder"  # a person's own images


class Validation(Enum):
    """What the best epoch is chosen on."""

    test = "test"  # the test set, as the paper does; the record says so
    holdout = "holdout"  # training images kept aside; the test set is touched once, at the end


class GateKind(Enum):
    """Who decides."""

    cosine = "cosine"  # the paper's equation
    none = "none"  # the dense baseline
    skipnet = "skipnet"  # SkipNet's feed-forward gate
    aig = "aig"  # ConvNet-AIG's
    controller = "controller"  # the paper's equation without CIR
    random = "random"
    constant = "constant"  # one learned constant a block


class Sided(Enum):
    """Which side of the target the FLOPs penalty pushes from."""

    one = "one"  # the paper's: only a mean gate above the target costs
    two = "two"


class Target(Enum):
    """Whose mean the target is of."""

    network = "network"  # of all blocks together, as the paper has it
    block = "block"  # of every block that has a gate


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
    """Which of a run's checkpoints to load."""

    last = "last"
    best = "best"


class Dynamic(Enum):
    """What compiling does with a block that is open for some images and closed for others."""

    keep = "keep"  # exact; a gate that needs F(x) saves nothing
    round = "round"  # open or closed for all, as most images have it
    predict = "predict"  # an MLP that is fitted to a gate that needs F(x) decides before F


class Cost(Enum):
    """What accuracy is held against."""

    counted = "counted"  # the mean gate, as the paper counts
    executed = "executed"  # FLOPs that ran, over the dense network's
    mflops = "mflops"  # millions of FLOPs that ran, an image
    latency = "latency"  # measured milliseconds an image


class Sampler(Enum):
    """How a search chooses the next place."""

    nsga2 = "nsga2"
    tpe = "tpe"
