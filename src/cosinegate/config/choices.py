"""The values of keys that have a choice."""

from enum import Enum


class Dataset(Enum):
    cifar10 = "cifar10"
    mnist = "mnist"
    fashion_mnist = "fashion_mnist"
    digits = "digits"
    folder = "folder"  # a person's own images


class Validation(Enum):
    """The images that the best epoch is chosen on."""

    test = "test"  # the test set, as the paper does; the record says so
    holdout = "holdout"  # training images kept aside; the test set is touched once, at the end


class GateKind(Enum):
    """The kind of the gates."""

    cosine = "cosine"  # the paper's equation
    none = "none"  # the dense baseline
    skipnet = "skipnet"  # SkipNet's feed-forward gate
    aig = "aig"  # ConvNet-AIG's
    controller = "controller"  # the paper's equation without CIR
    random = "random"
    constant = "constant"  # one learned constant a block


class Sided(Enum):
    """The sides of the target from which the FLOPs penalty pushes."""

    one = "one"  # the paper's: only a mean gate above the target costs
    two = "two"


class Target(Enum):
    """The mean gate that the target is for."""

    network = "network"  # of all blocks together, as the paper has it
    block = "block"  # of every block that has a gate


class Polarity(Enum):
    """The sign with which CIR moves the gate."""

    paper = "paper"  # the equation as printed: γ < 0, high CIR closes
    novelty = "novelty"  # the prose and Fig. 1: γ = +|γ_0|, high CIR opens


class Library(Enum):
    """Where a network that is not ours comes from."""

    timm = "timm"
    torchvision = "torchvision"


class Shortcut(Enum):
    """The identity path where the shape changes between stages (He et al.'s options A and B)."""

    pad = "pad"
    projection = "projection"


class Annealing(Enum):
    """How the temperature moves over a run."""

    none = "none"
    linear = "linear"
    exponential = "exponential"
    cosine = "cosine"


class Weighting(Enum):
    """The weight of each block in the penalty's mean gate ḡ."""

    mean = "mean"  # the same, as the paper has it
    flops = "flops"  # as many as its residual costs


class Checkpoint(Enum):
    """The checkpoint of a run that is loaded."""

    last = "last"
    best = "best"


class Dynamic(Enum):
    """How compiling treats a block that is open for some images and closed for others."""

    keep = "keep"  # exact; a gate that needs F(x) saves nothing
    round = "round"  # open or closed for all, as most images have it
    predict = "predict"  # an MLP that is fitted to a gate that needs F(x) decides before F


class Cost(Enum):
    """The cost that accuracy is plotted against."""

    counted = "counted"  # the mean gate, as the paper counts
    executed = "executed"  # FLOPs that ran, over the dense network's
    mflops = "mflops"  # millions of FLOPs that ran, an image
    latency = "latency"  # measured milliseconds an image


class Sampler(Enum):
    """How a search chooses its next trial."""

    nsga2 = "nsga2"
    tpe = "tpe"
