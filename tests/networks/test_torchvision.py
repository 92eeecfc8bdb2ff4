"""The slot asks nothing of the architecture: gates in torchvision's ResNets."""

import pytest
import torch
import torchvision
from conftest import config
from torchvision.models.resnet import BasicBlock

from cosinegate.deploy.export import export
from cosinegate.evaluate import evaluate
from cosinegate.gates.controls.constant import ConstantGate
from cosinegate.networks.flops import dense_flops
from cosinegate.networks.name import network_name
from cosinegate.networks.torchvision import TorchvisionResNet, residual_blocks
from cosinegate.relaxation import Relaxation
from cosinegate.train import train
from cosinegate.training.build import build_module


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_open_gates_are_torchvisions_own_network(name):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    opening = Relaxation(temperature=1.0, hard=True, threshold=0.5)
    gated = TorchvisionResNet(
        model,
        make_gate=lambda channels: ConstantGate(start=0.9, opening=opening),
        consistency=False,
        detach_target=False,
    ).eval()
    output = gated(x)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    assert output.routing.gates.shape == (2, {"resnet18": 8, "resnet50": 16}[name])
    assert torch.equal(output.routing.gates, torch.ones_like(output.routing.gates))


def test_its_blocks_are_found_in_order_with_the_first_of_each_stage():
    found = residual_blocks(torchvision.models.resnet18(weights=None))
    assert [is_first for _, is_first in found] == [True, False] * 4
    assert all(isinstance(block, BasicBlock) for block, _ in found)
    assert [block.conv1.in_channels for block, _ in found] == [64, 64, 64, 128, 128, 256, 256, 512]


@pytest.mark.parametrize(
    ("network", "gate"), [("resnet18", "cosine_novelty"), ("resnet18", "aig"), ("resnet50", "cosine_novelty")]
)
def test_a_gated_torchvision_network_trains_a_few_steps(network, gate):
    chosen = config(f"network={network}", f"gate={gate}", "objective.warmup_epochs=0")
    module = build_module(chosen).train()
    torch.manual_seed(0)  # of the gates' noise
    module.objective.prog = 1.0
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8)
    before = [[p.detach().clone() for p in block.gate.parameters()] for block in module.network.blocks]
    sgd, losses = torch.optim.SGD(module.network.parameters(), lr=0.003), []
    for _ in range(4):
        sgd.zero_grad()
        found = module.objective(module.network(x), target)
        found.total.backward()
        sgd.step()
        losses.append(found.ce.item())
    assert min(losses[1:]) < losses[0], losses
    for block, was in zip(module.network.blocks, before, strict=True):  # every block's gate has learned
        assert any(not torch.equal(a, b) for a, b in zip(was, block.gate.parameters(), strict=True))
    with torch.no_grad():
        routing = module.network.eval()(x).routing
    assert set(routing.gates.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("network", "gate"), [("resnet18", "cosine"), pytest.param("resnet50", "aig", marks=pytest.mark.slow)]
)
def test_it_trains_through_the_program_and_is_compiled_and_exported(network, gate, tmp_path):
    short = ["data=digits", "data.batch_size=16", "trainer.max_epochs=1", "threads=1", "callbacks.curves=null"]
    short += [f"trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
    objective = "per_block" if gate == "aig" else "cosinegate"
    chosen = config(f"network={network}", f"gate={gate}", f"objective={objective}", *short, f"runs_dir={tmp_path}")
    record = train(chosen).as_dict()
    blocks = {"resnet18": 8, "resnet50": 16}[network]
    assert (record["status"], record["network"]) == ("finished", f"torchvision-{network}")
    assert len(record["blocks_open"]) == blocks
    assert record["compiled"]["same_class"] <= record["compiled"]["images"] == 359
    card = export(config(f"run={chosen.run_dir}", "threads=1", "images=20", "dynamic=round", config_name="export"))
    assert card["compiled"]["computed"] == card["forms"]["deployed"]["blocks"]
    for name in ("torch", "network.onnx"):
        assert card["forms"][name]["equal"]
    found, *_ = evaluate(config(f"run={chosen.run_dir}/export", "limit_batches=1", config_name="evaluate"))
    assert found["flops"]["executed"] == pytest.approx(card["executed"], rel=1e-3)


def test_it_composes_from_config_with_its_name_and_its_parameters():
    chosen = config("network=resnet18", "gate=none", "data=mnist")
    assert network_name(chosen.network) == "torchvision-resnet18"
    network = build_module(chosen).network
    assert (
        sum(p.numel() for p in network.parameters()) == 11_689_512 - 990 * 513 - 2 * 64 * 49
    )  # 10 classes, one colour
    assert dense_flops(network, (28, 28, 1)) > 0
