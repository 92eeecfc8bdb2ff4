"""Gates in other libraries' networks and in a user's own: open they change nothing, closed they save."""

import copy
import pickle

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cosinegate
from cosinegate.deploy.exits.budget import exit_logits
from cosinegate.networks.adapt import ADAPTERS, adapter_of
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.networks.network import GatedNetwork
from cosinegate.terminal.errors import UserError

SIDE = 32


class Own(nn.Module):
    """A user's block: a layer normalisation and an MLP on tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class OwnNetwork(nn.Module):
    def __init__(self, block: type[nn.Module] = Own) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 8, stride=8)
        self.layers = nn.Sequential(block(12), block(12), block(12))
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(images).flatten(2).transpose(1, 2)).mean(1))


@cosinegate.parts(Own)
def own(block: Own) -> list[cosinegate.Part]:
    return [cosinegate.Part([block.norm, block.mlp], channels_last=True)]


def tiny(name: str, **options) -> nn.Module:
    return timm.create_model(name, num_classes=10, **options)


def mobile(setting: list[list[int]]) -> nn.Module:
    return torchvision.models.MobileNetV2(10, width_mult=0.25, inverted_residual_setting=setting)


def efficient(kind: str) -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    of = MBConvConfig if kind == "mb" else FusedMBConvConfig
    return EfficientNet([of(2, 3, 1, 8, 8, 3), of(2, 3, 2, 8, 16, 2)], dropout=0, num_classes=10, last_channel=32)


def torchvision_swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    of = (
        (swin.SwinTransformerBlock, swin.PatchMerging)
        if version == 1
        else (swin.SwinTransformerBlockV2, swin.PatchMergingV2)
    )
    return swin.SwinTransformer(
        [4, 4], 12, [2, 2], [2, 2], [4, 4], num_classes=10, block=of[0], downsample_layer=of[1], stochastic_depth_prob=0
    )


def torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], layer_scale=0.1, num_classes=10)


MODELS = {
    "own": OwnNetwork,
    "timm resnet": lambda: tiny("test_resnet"),
    "timm seresnet": lambda: timm.models.resnet.ResNet(
        timm.models.resnet.BasicBlock,
        (2, 1, 1, 1),
        10,
        channels=(8, 8, 16, 16),
        stem_width=8,
        block_args={"attn_layer": "se"},
    ),
    "timm convnext": lambda: tiny("test_convnext"),
    "timm convnext v2": lambda: tiny("test_convnext3", conv_mlp=True),
    "timm vit": lambda: tiny("test_vit", img_size=SIDE),
    "timm vit with LayerScale": lambda: tiny("test_vit2", img_size=SIDE, depth=2),
    "timm vit, norm after": lambda: tiny(
        "test_vit", img_size=SIDE, block_fn=timm.models.vision_transformer.ResPostBlock
    ),
    "timm deit": lambda: tiny("deit_tiny_distilled_patch16_224", img_size=SIDE, embed_dim=12, depth=2, num_heads=2),
    "timm mixer": lambda: timm.models.mlp_mixer.MlpMixer(10, SIDE, patch_size=8, num_blocks=2, embed_dim=12),
    "timm swin": lambda: tiny(
        "swin_tiny_patch4_window7_224", img_size=SIDE, embed_dim=12, depths=(2, 2), num_heads=(2, 2), window_size=4
    ),
    "timm mobilenet": lambda: tiny("mobilenetv2_035"),
    "timm efficientnet v2": lambda: timm.models.efficientnet._gen_efficientnetv2_s(
        "efficientnetv2_rw_t", channel_multiplier=0.1, depth_multiplier=0.4, num_classes=10
    ),
    "timm mobilenet v4": lambda: tiny("mobilenetv4_conv_small_035"),
    "torchvision resnet": lambda: torchvision.models.ResNet(
        torchvision.models.resnet.BasicBlock, [2, 1, 1, 1], num_classes=10
    ),
    "torchvision bottleneck": lambda: torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10
    ),
    "torchvision mobilenet v2": lambda: mobile([[1, 16, 1, 1], [6, 24, 3, 2]]),
    "torchvision mobilenet v3": lambda: torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25),
    "torchvision efficientnet": lambda: efficient("mb"),
    "torchvision efficientnet v2": lambda: efficient("fused"),
    "torchvision convnext": torchvision_convnext,
    "torchvision vit": lambda: torchvision.models.VisionTransformer(SIDE, 8, 2, 2, 12, 24, num_classes=10),
    "torchvision swin": lambda: torchvision_swin(1),
    "torchvision swin v2": lambda: torchvision_swin(2),
}
EXPORTED = ("own", "timm resnet", "timm convnext", "timm vit", "torchvision mobilenet v2")


def model_of(name: str) -> nn.Module:
    """In double precision, with weights drawn anew: those that start at zero hide errors."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = MODELS[name]().double().eval()
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.3, 0.9)
            elif parameter.abs().max() == 0:
                parameter.normal_()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model


def images(number: int = 6) -> Tensor:
    return torch.randn(number, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    return model_of(request.param)


@torch.no_grad()
def settle(network: GatedNetwork, pattern: list[bool]) -> None:
    """Gates that are constants, each open or closed for all images."""
    for block, is_open in zip(network.blocks, pattern, strict=True):
        block.gate.logit.fill_(4.0 if is_open else -4.0)


def gated(model: nn.Module, gate: str = "constant", **options) -> GatedNetwork:
    return cosinegate.add_gates(model, gate, example=images(2), **options).double().eval()


@torch.no_grad()
def test_open_gates_change_nothing_and_closed_ones_do_and_compiling_keeps_the_rest(model):
    x, before = images(), copy.deepcopy(model.state_dict())
    network = gated(model)
    names = [type(part.block).__name__ for part in network.blocks]
    settle(network, [True] * len(names))
    assert torch.equal(network(x).logits, model(x))
    assert before.keys() <= network.state_dict().keys()
    assert {key for key in network.state_dict() if ".gate." in key} == network.state_dict().keys() - before.keys()
    for index in range(len(names)):
        settle(network, [place != index for place in range(len(names))])
        moved = network(x)
        assert not torch.equal(moved.logits, model(x)), (index, names[index])
        assert torch.equal(moved.routing.gates[0], torch.tensor([float(p != index) for p in range(len(names))]))

    pattern = [index % 3 != 1 for index in range(len(names))]
    settle(network, pattern)
    expected = network(x).logits
    small, changes = cosinegate.compile_gates(network, x)
    assert [change.action.name == "removed" for change in changes.blocks] == [not is_open for is_open in pattern]
    assert not isinstance(small, GatedNetwork)
    assert torch.equal(small(x), expected)
    assert small.state_dict().keys() < before.keys()
    assert all(torch.equal(tensor, before[key]) for key, tensor in small.state_dict().items())
    assert forward_flops(small, x[:1]) < forward_flops(model, x[:1])
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(small)))(x), expected)
    assert model.state_dict().keys() == before.keys()  # what was given is left as it was
    closed, _ = cosinegate.compile_gates(settled_as(network, [False] * len(names)), x)
    assert closed(x).shape == (len(x), 10)
    opened, _ = cosinegate.compile_gates(settled_as(network, [True] * len(names)), x)
    assert opened.state_dict().keys() == before.keys()
    assert not any(adapter_of(module) and "forward" in vars(module) for module in opened.modules())


def settled_as(network: GatedNetwork, pattern: list[bool]) -> GatedNetwork:
    settle(network, pattern)
    return network


@torch.no_grad()
def test_a_mixed_batch_skips_what_multiplying_would_leave_out(model):
    """Gates that decide before F run it for the open samples alone."""
    network, x = gated(model, "random", rate=0.5), images()
    routed = network(x)
    assert 0.2 < routed.routing.gates.mean() < 0.8
    part_inputs = []
    network.run(x, lambda step: part_inputs.append((step.block, step.x)))
    for (part, inputs), z in zip(part_inputs, routed.routing.gates.T, strict=True):
        r = part.residual(inputs)
        multiplied = part.activation(part.shortcut(inputs) + z.view(-1, *(1,) * (r.dim() - 1)) * r)
        torch.testing.assert_close(part.route(inputs, z), multiplied)


def test_gradients_reach_every_parameter_and_the_loss_holds_prog(model):
    network, x = gated(model, "cosine", gamma=-2.5).train(), images()
    loss = cosinegate.CosineGateLoss(lambda_flops=3, lambda_cons=0.1, tau_target=0.01, warmup_epochs=4)
    with torch.no_grad():
        for part in network.blocks:
            part.gate.controller.w2.weight.fill_(0.1)
    out = network(x)
    assert out.routing.gates.shape == out.routing.cir.shape == (len(x), len(network.blocks))
    assert ((out.routing.cir >= 0) & (out.routing.cir <= 2)).all()
    losses = loss(out, torch.arange(len(x)) % 10, epoch=1)
    torch.testing.assert_close(losses.total, losses.ce + 0.1 * losses.cons + 3 * losses.flops)
    torch.testing.assert_close(losses.flops, 0.25 * loss.penalty(out.routing.gates))
    losses.total.backward()
    wanted = dict(model.named_parameters())
    model.train()(x).sum().backward()
    without = {name for name, parameter in wanted.items() if parameter.grad is None}
    found = {name.removeprefix("model.") for name, p in network.named_parameters() if p.grad is None}
    assert found <= without
    assert all(part.gate.gamma.grad.abs() > 0 for part in network.blocks)


@torch.no_grad()
def test_weights_load_before_and_after_gating_and_copies_are_whole(model):
    x, network = images(), gated(model, "cosine")
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(0.9)
    missing, unexpected = network.load_state_dict(other.state_dict(), strict=False)
    assert unexpected == []
    assert all(".gate." in key for key in missing)
    assert torch.equal(network(x).logits, gated(other, "cosine")(x).logits)
    holder = nn.ModuleDict({"network": network})  # as a LightningModule holds it
    twin = copy.deepcopy(holder)
    for parameter in twin.parameters():
        parameter.zero_()
    twin.load_state_dict(holder.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(twin))["network"](x).logits, network(x).logits)
    before = network(x).logits
    network.load_state_dict(model.state_dict(), strict=False)
    assert not torch.equal(network(x).logits, before)


@pytest.mark.parametrize(
    "name", [name if name in EXPORTED else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_what_is_compiled_is_exported_for_any_number_of_images(name, tmp_path):
    network = gated(model_of(name))
    settle(network, [index % 2 == 0 for index in range(len(network.blocks))])
    small = cosinegate.compile_gates(network, images())[0].float()
    path = tmp_path / "small.onnx"
    dynamic = ({0: torch.export.Dim("batch", min=1)},)
    torch.onnx.export(
        small, (images(3).float(),), path, dynamo=True, input_names=["images"], dynamic_shapes=dynamic, verbose=False
    )
    session = onnxruntime.InferenceSession(path)
    for number in (1, 5):
        x = images(number).float()
        (scores,) = session.run(None, {"images": x.numpy()})
        with torch.no_grad():
            expected = small(x).numpy()
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))


def test_flops_are_counted_part_by_part_attention_included():
    network = gated(model_of("timm vit")).float()
    settle(network, [True] * len(network.blocks))
    x = images(1).float()
    whole = forward_flops(network, x)
    assert whole == dense_flops(network, (SIDE, SIDE, 3))
    heads = network.blocks[0].block.attn.num_heads
    tokens, width = 1 + (SIDE // 16) ** 2, network.blocks[0].channels
    settle(network, [False] + [True] * (len(network.blocks) - 1))
    projections = 2 * tokens * width * 4 * width
    assert whole - forward_flops(network, x) == projections + 2 * 2 * heads * tokens**2 * (width // heads)


def test_exits_shrink_the_batch_inside_any_model(rng, monkeypatch):
    """Each image has the answer of the first exit that it takes, and of the whole model where it takes none."""
    monkeypatch.setattr("cosinegate.deploy.exits.fit.LEAST_STEPS", 30)
    for name in ("own", "timm vit", "timm resnet"):
        model = model_of(name).float()
        x, y = torch.randn(120, 3, SIDE, SIDE, generator=rng), torch.arange(120) % 10
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
        early = cosinegate.add_exits(model, loader, after=[0, 1])
        early.threshold.fill_(float(exit_logits(early, x).median()))
        with torch.no_grad():
            output, whole = early(x), model(x)
        computed = output.routing.gates
        stayed = computed[:, -1] == 1
        assert 0 < stayed.sum() < 120
        torch.testing.assert_close(output.logits[stayed], whole[stayed], rtol=0, atol=1e-4)
        one_by_one = torch.cat([early(x[i : i + 1]).logits for i in range(0, 120, 40)])
        torch.testing.assert_close(output.logits[::40], one_by_one, rtol=0, atol=1e-4)
        early.threshold.fill_(torch.inf)
        with torch.no_grad():
            assert early(x).routing.gates[:, 1:].sum() == 0


class Patches(OwnNetwork):
    """Folds patches into the batch, as MobileViT does."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.head(self.layers(x.flatten(0, 1)[:, None]).view(x.shape).mean(1))


class Masked(Own):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * mask


class MaskedNetwork(OwnNetwork):
    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, torch.ones(1, dtype=x.dtype))
        return self.head(x.mean(1))


class Scaled(Own):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.mlp(self.norm(x))


class Shared(OwnNetwork):
    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.head(self.layers(self.layers(x)).mean(1))


class Unknown(nn.Sequential):
    """No adapter knows it."""


class Tuple(OwnNetwork):
    def forward(self, images: Tensor) -> tuple[Tensor]:
        return (super().forward(images),)


REFUSED = {
    "patches in the batch": (Patches, {}, "96 samples of 6"),
    "more than one input": (lambda: MaskedNetwork(Masked), {}, "more than one input"),
    "an adapter that does not fit": (lambda: OwnNetwork(Scaled), {}, "does not fit its block (Scaled)"),
    "runs twice": (Shared, {}, "runs twice"),
    "no known block": (lambda: Unknown(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 10)), {}, "@cosinegate.parts"),
    "images of another size": (
        lambda: MODELS["timm vit"](),
        {"example": torch.zeros(2, 3, 8, 8).double()},
        "takes no images of",
    ),
    "no scores": (Tuple, {}, "must return class scores"),
    "a gate that is not there": (OwnNetwork, {"gate": "cosin"}, "must be one of cosine"),
    "an option that is not there": (OwnNetwork, {"gama": -2}, "did you mean gamma?"),
    "a value out of range": (OwnNetwork, {"gamma": 2.0}, "must be below 0"),
    "a value of another type": (OwnNetwork, {"threshold": "half"}, "threshold"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_gated_is_refused_with_one_line(case):
    make, options, words = REFUSED[case]
    with pytest.raises(UserError) as refused:
        cosinegate.add_gates(make().double(), **{"gate": "cosine", "example": images()} | options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_calls_that_make_no_sense_are_refused():
    network = gated(OwnNetwork().double())
    settle(network, [True] * 3)
    loader = [(images().float(), torch.zeros(6, dtype=torch.long))]
    for call, words in {
        "gates in gates": (lambda: gated(network), "adapted already"),
        "nothing to compile": (lambda: cosinegate.compile_gates(OwnNetwork(), images()), "has no gates"),
        "no images": (lambda: cosinegate.compile_gates(network, images()[:0]), "no images"),
        "few images": (lambda: cosinegate.add_exits(OwnNetwork(), loader), "at least 20"),
        "no class": (lambda: cosinegate.parts(own), "must be a class"),
        "no run": (lambda: cosinegate.load("runs/nothing"), "no such folder"),
    }.values():
        with pytest.raises(UserError, match=words):
            call()


def test_stochastic_depth_is_turned_off_and_small_residuals_are_pointed_out():
    model = tiny("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), ls_init_value=1e-4, drop_path_rate=0.5)
    with pytest.warns(UserWarning, match="stochastic depth is set to 0") as warned:
        network = cosinegate.add_gates(model, example=images(2).float())
    assert any("so small beside s" in str(warning.message) for warning in warned)  # LayerScale
    assert {m.drop_prob for m in network.modules() if isinstance(m, timm.layers.DropPath)} == {0.0}
    assert {m.drop_prob for m in model.modules() if isinstance(m, timm.layers.DropPath)} != {0.0}
    with pytest.warns(UserWarning, match="F.x. starts at zero"):
        cosinegate.add_gates(tiny("test_resnet", zero_init_last=True), example=images(2).float())


def _two_processes(rank: int, address: str, found) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    network = DistributedDataParallel(gated(model_of("timm vit"), "aig").train())
    network(images(4)[2 * rank : 2 * rank + 2]).logits.sum().backward()
    found[rank] = {name: p.grad.clone() for name, p in network.module.named_parameters()}
    dist.destroy_process_group()


def test_two_processes_have_one_gradient(tmp_path):
    with mp.Manager() as manager:
        found = manager.dict()
        mp.start_processes(_two_processes, (f"file://{tmp_path}/store", found), nprocs=2, start_method="fork")
        first, second = found[0], found[1]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_adapter_serves_derived_classes():
    class Derived(Own):
        pass

    assert adapter_of(Derived(4)) is own
    assert adapter_of(nn.Linear(2, 2)) is None
    assert ADAPTERS[Own] is own
