"""Gates in models as engineers have them: of another precision, compiled by torch, frozen in part, or cut once."""

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cosinegate
from cosinegate.networks.network import GatedNetwork
from cosinegate.terminal.errors import UserError


class Residual(nn.Module):
    """x + F(x) of features or tokens."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@cosinegate.parts(Residual)
def residual(block: Residual) -> list[cosinegate.Part]:
    return [cosinegate.Part([block.norm, block.mlp[0], block.mlp[1]], channels_last=True)]


class Network(nn.Module):
    """Blocks on the tokens of images, (B, 16, 12)."""

    def __init__(self, block: type[nn.Module] = Residual) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 8, stride=8)
        self.layers = nn.Sequential(block(), block(), block())
        self.head = nn.Linear(12, 10)

    def tokens(self, images: Tensor) -> Tensor:
        return self.embed(images).flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(images)).mean(1))


class OnFeatures(Network):
    """Blocks on features (B, 12)."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(images).mean(1)))


def images(number: int = 6) -> Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def vit() -> nn.Module:
    return timm.create_model("test_vit", num_classes=10, img_size=32, depth=2)


def settled(model: nn.Module, is_open: list[bool]) -> GatedNetwork:
    """Gates that are constants, each open or closed for all images."""
    network = cosinegate.add_gates(model, "constant", example=images(2)).eval()
    with torch.no_grad():
        for part, opens in zip(network.blocks, is_open, strict=True):
            part.gate.logit.fill_(4.0 if opens else -4.0)
    return network


def train_once(network: nn.Module, x: Tensor) -> None:
    loss = cosinegate.CosineGateLoss(lambda_flops=3, lambda_cons=0.1, tau_target=0.1)
    torch.manual_seed(0)
    loss(network(x), torch.arange(len(x)) % 10, epoch=1).total.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["cosine", "controller", "aig", "skipnet"])
def test_gates_have_the_precision_of_the_model(gate, dtype):
    x = images().to(dtype)
    network = cosinegate.add_gates(Network().to(dtype), gate, example=x).train()
    train_once(network, x)
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    assert network.eval()(x).logits.dtype == dtype


def test_blocks_may_run_on_features_without_places():
    network = cosinegate.add_gates(OnFeatures(), "aig", example=images(2))
    assert network(images()).routing.gates.shape == (6, 3)


@pytest.mark.slow
def test_training_under_torch_compile_has_the_same_gradients():
    network = cosinegate.add_gates(Network(), example=images(2), detach_target=True).double().train()
    for part in network.blocks:
        nn.init.constant_(part.gate.controller.w2.weight, 0.1)
        part.gate.opening.noisy = False
    other, x = copy.deepcopy(network), images().double()
    train_once(network, x)
    train_once(torch.compile(other, backend="eager"), x)
    for (name, parameter), compiled in zip(network.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, parameter.grad, msg=lambda words, name=name: f"{name}: {words}")


@pytest.mark.slow
def test_a_compiled_model_of_which_parts_are_left_is_one_graph():
    network = settled(vit(), [True, False, True, True])
    small, _ = cosinegate.compile_gates(network, images())
    with torch.no_grad():
        graph = torch.compile(small, backend="eager", fullgraph=True)
        torch.testing.assert_close(graph(images()), network(images()).logits)


class Outer(nn.Module):
    """A block whose F is another block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.act(x))


cosinegate.parts(Outer)(lambda block: [cosinegate.Part([block.inner], channels_last=True)])
cosinegate.parts(InPlace)(lambda block: [cosinegate.Part([block.act, block.linear], channels_last=True)])


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: Network(Outer), {}, "inside the F of a Outer"),
        (lambda: Network(InPlace), {}, "F writes over its input"),
        (Network, {"example": images(1)}, "two images or more"),
        (Network, {"kind": "aig"}, "gate.kind"),
        (lambda: "resnet18", {}, "must be a torch.nn.Module"),
        (lambda: timm.create_model("tf_efficientnet_cc_b0_4e", num_classes=10), {}, "as their adapters have them"),
    ],
)
def test_more_that_cannot_be_gated_is_refused(model, options, words):
    with pytest.raises(UserError, match=words):
        cosinegate.add_gates(model(), **{"example": images(2)} | options)


class TokensFirst(Network):
    """Tokens before samples, (16, B, 12): with 16 images nothing tells them apart."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(images).transpose(0, 1)).mean(0))


class TwoHeads(Network):
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = super().forward(images)
        return (scores, scores) if self.training else scores


class Reentrant(Network):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(checkpoint(self.layers, self.tokens(images), use_reentrant=True).mean(1))


@pytest.mark.parametrize(
    ("model", "number", "words"),
    [(TokensFirst, 16, "16 samples of 6"), (TwoHeads, 2, "in training too"), (Reentrant, 2, "use_reentrant=False")],
)
def test_what_shows_in_use_alone_is_refused_there(model, number, words):
    network = cosinegate.add_gates(model(), example=images(number)).train()
    with pytest.raises(UserError, match=words):
        network(images())


def test_a_frozen_batchnorm_stays_in_evaluation_mode():
    model = timm.create_model("test_resnet", num_classes=10)
    model.bn1.eval()
    network = cosinegate.add_gates(model, example=images(2))
    wanted = {name for name, module in model.named_modules() if not module.training}
    assert {name for name, module in network.model.named_modules() if not module.training} == wanted == {"bn1"}


def labelled() -> list[tuple[Tensor, Tensor]]:
    return [(images(40), torch.arange(40) % 10)]


@pytest.fixture
def quick_fit(monkeypatch):
    monkeypatch.setattr("cosinegate.deploy.exits.fit.LEAST_STEPS", 5)


def test_a_compiled_model_takes_gates_and_exits_again(quick_fit):
    pattern = [True, False, True, True]
    small, _ = cosinegate.compile_gates(settled(vit(), pattern), images())
    early = cosinegate.add_exits(small, labelled(), after=[2])
    early.threshold.fill_(-torch.inf)  # no image exits
    with torch.no_grad():
        torch.testing.assert_close(early(images()).logits, small(images()), rtol=0, atol=1e-5)
        early.threshold.fill_(torch.inf)
        assert early(images()).routing.gates[0].tolist() == [1, 0, 1, 0]
    again = cosinegate.add_gates(small, "constant", example=images(2)).eval()
    assert [part.gate is not None for part in again.blocks] == pattern
    smaller, _ = cosinegate.compile_gates(again, images())
    torch.testing.assert_close(smaller(images()), again(images()).logits)


def test_exits_leave_the_network_that_they_are_given_as_it_is(quick_fit):
    network = cosinegate.add_gates(timm.create_model("test_resnet", num_classes=10), example=images(2)).train()
    before = copy.deepcopy(network.state_dict())
    cosinegate.add_exits(network, labelled(), after=[0])
    assert network.training
    assert all(p.requires_grad for p in network.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_exits_take_models_of_any_precision(quick_fit, dtype):
    early = cosinegate.add_exits(vit().to(dtype), labelled(), after=[0])
    assert early(images().to(dtype)).logits.dtype == dtype


def test_exits_refuse_before_they_are_fitted(monkeypatch):
    monkeypatch.setattr("cosinegate.api.fit_exits", None)
    with pytest.raises(UserError, match="budget = 3: must lie from"):
        cosinegate.add_exits(vit(), labelled(), budget=3)
    with pytest.raises(UserError, match=r"must give batches \(images, labels\)"):
        cosinegate.add_exits(vit(), images(40))


def test_images_of_another_form_are_refused():
    with pytest.raises(UserError, match="gives a dict"):
        cosinegate.compile_gates(settled(Network(), [True] * 3), [{"image": images()}])


def test_a_block_is_removed_where_its_adapter_looks_into_its_modules():
    network = settled(Network(), [True, False, True])
    small, _ = cosinegate.compile_gates(network, images())
    torch.testing.assert_close(small(images()), network(images()).logits)
    assert torch.equal(pickle.loads(pickle.dumps(small))(images()), small(images()))
