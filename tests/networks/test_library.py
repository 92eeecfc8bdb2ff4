"""network=timm and network=torchvision: trained, compiled, exported and given exits by the commands as our own are."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_one_line, config, process

from cosinegate.config.identity import identity
from cosinegate.deploy.exits.command import exits
from cosinegate.deploy.export import export
from cosinegate.evaluate import evaluate
from cosinegate.networks.flops import dense_flops
from cosinegate.networks.name import network_name
from cosinegate.train import train
from cosinegate.training.build import build_module
from cosinegate.training.load import load_checkpoint

SHORT = ["data=digits", "data.batch_size=64", "trainer.max_epochs=1", "threads=1", "callbacks.curves=null"]
SHORT += ["trainer.limit_train_batches=3", "data.validation=holdout", "data.holdout=300"]
VIT = ["network=timm", "network.model=vit_tiny_patch16_224"]
VIT += ["network.options={img_size:8,patch_size:2,embed_dim:12,depth:3,num_heads:2,class_token:false,global_pool:avg}"]
RESNET = ["network=torchvision", "network.model=resnet18"]


@pytest.fixture(scope="module")
def vit_run(tmp_path_factory):
    """Gates of the prose's polarity start open."""
    chosen = config(*VIT, "gate=cosine_novelty", *SHORT, f"runs_dir={tmp_path_factory.mktemp('vit')}")
    return train(chosen), chosen


def test_a_gated_vit_trains_through_the_program_and_goes_all_the_way(vit_run):
    record, chosen = vit_run
    assert (record.status, record.network, len(record.blocks_open)) == ("finished", "timm-vit_tiny_patch16_224", 6)
    assert record.compiled.images == 359
    card = export(config(f"run={chosen.run_dir}", "threads=1", "images=40", "dynamic=round", config_name="export"))
    for name in ("torch", "network.onnx"):
        assert card["forms"][name]["equal"]
    found, *_ = evaluate(config(f"run={chosen.run_dir}/export", "limit_batches=1", config_name="evaluate"))
    assert found["flops"]["executed"] == pytest.approx(card["executed"], rel=1e-3)


@pytest.mark.slow
def test_exits_of_a_vit_are_fitted_and_exported_by_the_commands(vit_run):
    _, chosen = vit_run
    fitted = exits(config(f"run={chosen.run_dir}", "threads=1", "images=100", "dynamic=round", config_name="exits"))
    middle, low, high = (point["executed_of_own"] for point in fitted["points"])
    assert 0 < low <= middle <= high <= 1.02
    shrunk = export(config(f"run={fitted['folder']}", "threads=1", "images=40", config_name="export"))
    assert shrunk["forms"]["torch"]["equal"]
    assert shrunk["forms"]["network.onnx"]["equal"]


def test_its_checkpoint_and_card_give_the_same_network(vit_run, rng):
    _, chosen = vit_run
    module, again = load_checkpoint(Path(chosen.run_dir) / "checkpoints" / "last.ckpt")
    assert again.network == chosen.network
    x = torch.randn(4, 1, 8, 8, generator=rng)
    other = build_module(chosen)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.network.eval()(x).logits, module.network.eval()(x).logits)


def test_first_blocks_without_gates_and_parameters_of_a_torchvision_network():
    chosen = config(*RESNET, "gate=none", "data=mnist")
    assert network_name(chosen.network) == "torchvision-resnet18"
    network = build_module(chosen).network
    assert not network.has_gates
    # 10 classes, one colour
    assert sum(p.numel() for p in network.parameters()) == 11_689_512 - 990 * 513 - 2 * 64 * 49
    assert dense_flops(network, (28, 28, 1)) > 0
    gated = build_module(config(*RESNET, "data=digits", "gate.first_blocks=false"))
    assert [block.gate is not None for block in gated.network.blocks] == [False, True] * 4
    assert gated.objective.gated.tolist() == [False, True] * 4


def test_penalties_weighted_by_flops_know_the_parts_of_any_network():
    weights = build_module(config(*VIT, "data=digits", "objective.weighting=flops")).objective.block_weights
    assert weights.shape == (6,)
    assert weights[0] < weights[1]  # attention of 16 tokens takes less than the MLP
    torch.testing.assert_close(weights[::2], weights[:1].expand(3))


def test_keys_of_other_networks_change_no_identity_of_ours():
    assert identity(config("+experiment=balanced")) == "de290c20bb"  # as before those keys were there
    assert identity(config(*VIT)) != identity(config(*VIT, "network.model=vit_small_patch16_224"))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["network=timm"], "network.model"),
        (["network=timm", "network.model=convnext_atom"], "did you mean convnext_atto?"),
        (["network=torchvision", "network.model=resnet19"], "no such network in this library"),
        (["network.model=resnet18"], "goes with network=timm or network=torchvision"),
        ([*VIT[:2], "network.options={img_sze:8}"], "cannot be made so"),
        ([*VIT[:2], "network.options={pretrained:true}"], "fetched weights are for Python"),
        ([*VIT[:2], "network.options={num_classes:3}"], "follows from the data set"),
        ([*VIT[:2], "network.options=3"], "null or a mapping"),
        (["network=timm", "network.model=vgg11"], "no residual block that an adapter knows"),
    ],
)
def test_a_mistake_is_one_line(words, fragment, tmp_path):
    done = process("src/train.py", "data=digits", *words, f"runs_dir={tmp_path}")
    assert_one_line(done, fragment)
    assert list(tmp_path.iterdir()) == []


def test_the_example_goes_from_gates_to_a_file_with_a_network_of_its_own(tmp_path):
    done = process(str(ROOT / "examples" / "own_model.py"), "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trained, *_, written = (
        line for line in done.stdout.splitlines() if line.endswith((".onnx", "%")) or "mean gate" in line
    )
    assert trained.startswith("trained:")
    assert written == "written to own_model.onnx"
    assert "removed" in done.stdout or "gate dropped" in done.stdout
    assert (tmp_path / "own_model.onnx").stat().st_size > 10_000
