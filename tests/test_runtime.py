"""How the skipping runtime keeps open samples together, and what it does where convolutions are not fused."""

import pytest
import torch
from test_deploy import FORMS, eager, images, trained

from cosinegate.deploy import skipping
from cosinegate.deploy.folded import folded
from cosinegate.deploy.skipping import SkippingNetwork


@pytest.mark.parametrize("overrides", FORMS[1:3])
def test_the_runtime_does_the_same_without_fused_convolutions(overrides, rng, monkeypatch):
    network, x = trained(*overrides, rng=rng), images(50, rng)
    logits, gates = eager(network, x)
    monkeypatch.setattr(skipping, "FUSES", False)
    runtime = SkippingNetwork(folded(network), micro_batch=16)
    torch.testing.assert_close(runtime(x), logits, rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates, gates)


@pytest.mark.parametrize("opened", ["0110100", "1110000", "0000111", "0000001", "0111111", "1000000"])
def test_open_samples_stand_first_and_few_change_places(opened):
    is_open = torch.tensor([letter == "1" for letter in opened])
    number, own = int(is_open.sum()), torch.arange(7.0)
    x = own.view(7, 1, 1, 1).repeat(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    places = skipping.Places()
    places.open_first(x, is_open, number)
    now = x[:, 0, 0, 0]
    assert torch.equal(x, now.view(7, 1, 1, 1).expand_as(x))  # whole maps
    assert sorted(now[:number].tolist()) == own[is_open].tolist()
    assert int((now != own).sum()) == 2 * int((~is_open[:number]).sum())
    assert torch.equal(places.in_own_places(now), own)
    assert torch.equal(places.follow(own), now)
    assert torch.equal(places.follow(now), now)  # once
