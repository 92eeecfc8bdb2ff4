"""Small networks to deploy: gates that route, BatchNorm statistics of their own, real images."""

import functools

import torch
from conftest import config
from cosinegate.calibration import calibrate
from cosinegate.gate_fit import fit
from same_routes import assert_same_routes
from test_predictive import small

from cosinegate.data.module import ImageData
from cosinegate.networks import Output

EXITS = ("gate=exit", "gate.exit_classifier=own", "objective.lambda_exit=0", "network.blocks=[1,1,4]")
EXITS += ("optimizer.decay_gates=false", "gate.quantile.fit=64")
FORMS = [
    (),
    ("gate.first_blocks=true",),
    ("gate.predictor.look=stage", "network.depth=20"),
    ("network.shortcut=projection", "gate.first_blocks=true", "gate.predictor.look=stage"),
    ("network.post_activation=false", "gate.first_blocks=true"),
    (
        "gate.controller.enabled=false",
        "gate.calibration=none",
        "gate.threshold=0.5",
        "gate.gamma.init=-2.5",
        "gate.polarity=paper",
    ),
    EXITS,
]


@functools.cache
def digits(split: str) -> torch.Tensor:
    data = ImageData(config("+experiment=digits").data, seed=0)
    data.setup()
    return data.whole_images(split)[0]


def images(number: int, rng: torch.Generator) -> torch.Tensor:
    """Real ones, drawn from the test set, each at most once: a threshold between two equal logits would lie on both."""
    drawn = digits("test")[torch.randperm(len(digits("test")), generator=rng)[:number]]
    return drawn.contiguous(memory_format=torch.channels_last)


def trained(*overrides: str, rng: torch.Generator):
    """A network with BatchNorm statistics that are not those it was born with, and gates that route."""
    network = small(*overrides)
    network.train()
    for _ in range(3):
        network(images(64, rng) * 1.1 + 0.1)
    network.eval()
    if "gate=exit" in overrides:
        fit(network, gated(network), images(256, rng), torch.randint(10, (256,), generator=rng))
    if "gate.calibration=none" not in overrides:
        shares = [0.8, 0.5, 0.3] if "gate=exit" in overrides else [0.5] * len(gated(network))
        calibrate(network, shares, images(64, rng))
    else:
        with torch.no_grad():
            logits = network(images(64, rng)).routing.logits
        for place in gated(network):
            network.blocks[place].gate.opening.threshold = logits[:, place].median().sigmoid().item()
    return network


def eager(network, x) -> Output:
    with torch.no_grad():
        return network(x)


def assert_same(scores: torch.Tensor, gates: torch.Tensor, network, expected: Output, atol: float = 1e-4) -> None:
    """Another program of the network takes its routes, and has its scores and classes wherever it took them."""
    same = assert_same_routes(gates, network, expected.routing)
    scores, logits = scores[same], expected.logits[same]
    torch.testing.assert_close(scores, logits, rtol=0, atol=atol)
    best, second = logits.topk(2).values.unbind(1)
    other = scores.argmax(1) != logits.argmax(1)
    assert ((best - second)[other] <= 2 * atol).all()  # of two classes that score alike, either


def gated(network) -> list[int]:
    return [i for i, block in enumerate(network.blocks) if block.gate is not None]
