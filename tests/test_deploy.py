"""What is written down of a deployed network rebuilds it, and what never changes can be taken out of it."""

import hashlib
import json

import numpy as np
import pytest
import torch
from deployed import EXITS, FORMS, eager, images, trained
from safetensors.torch import load_file

from cosinegate.deploy.folded import folded
from cosinegate.deploy.onnx_forms import BranchForm, run_onnx, session, write_onnx
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.specialise import routed_otherwise, settled, specialise
from cosinegate.deploy.weights import described, read_exported, rebuilt, write_weights
from cosinegate.errors import UserError


def without(part: dict, name: str) -> dict:
    return {key: value for key, value in part.items() if key != name}


@pytest.mark.parametrize("overrides", FORMS)
def test_weights_and_card_rebuild_the_network(overrides, rng, tmp_path):
    network = folded(trained(*overrides, rng=rng))
    write_weights(network, tmp_path / "weights.safetensors")
    digest = hashlib.sha256((tmp_path / "weights.safetensors").read_bytes()).hexdigest()
    card = {"network": described(network), "files": {"weights.safetensors": digest}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    again = read_exported(tmp_path)
    x = images(9, rng)
    assert torch.equal(SkippingNetwork(again)(x), SkippingNetwork(network)(x))
    bad = tmp_path / "cut.safetensors"
    bad.write_bytes((tmp_path / "weights.safetensors").read_bytes()[:-50])
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(network), bad)
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(network) | {"width": 3}, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="this program reads"):
        rebuilt(described(network) | {"format": 99}, tmp_path / "weights.safetensors")
    (tmp_path / "card.json").write_text(json.dumps(card | {"files": {"weights.safetensors": "another"}}))
    with pytest.raises(UserError, match="missing or damaged"):
        read_exported(str(tmp_path))
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(UserError, match="not an export's card"):
        read_exported(tmp_path)


def test_a_card_of_an_earlier_version_is_read_or_answered_with_a_line(rng, tmp_path):
    network, x = folded(trained(*EXITS, "gate.exit_classifier=shared", rng=rng)), images(9, rng)
    write_weights(network, tmp_path / "weights.safetensors")
    fourth = json.loads(json.dumps(described(network)), object_hook=lambda part: without(part, "own"))
    fourth = rebuilt(fourth | {"format": 4}, tmp_path / "weights.safetensors")
    assert torch.equal(SkippingNetwork(fourth)(x), SkippingNetwork(network)(x))  # which knew no exit's classifier
    older = json.loads(json.dumps(described(network)).replace('"exit"', '"scored"'))
    with pytest.raises(UserError, match="another version: scored is none of"):
        rebuilt(older | {"format": 3}, tmp_path / "weights.safetensors")


def test_specialising_removes_what_never_changes_and_says_what_that_costs(rng, tmp_path):
    network = trained("network.depth=20", "gate.predictor.look=stage", rng=rng)
    turns = {1: torch.inf, 2: -torch.inf, 7: -torch.inf, 8: -torch.inf}
    for place, turn in turns.items():
        network.blocks[place].gate.opening.threshold.fill_(turn)
    x = images(60, rng)
    logits, gates = eager(network, x)
    made, changes = specialise(folded(network), x, tolerance=0.0)
    assert [(change["block"], change["done"]) for change in changes] == [
        (1, "removed"),
        (2, "always computed"),
        (7, "always computed"),
        (8, "always computed"),
    ]
    assert all(change["otherwise"] == 0 for change in changes)
    alone, of_thresholds = settled(folded(network))  # infinite ones need no images to be known
    assert of_thresholds == changes
    assert [block.head is None for block in alone.blocks] == [block.head is None for block in made.blocks]
    runtime = SkippingNetwork(made)
    torch.testing.assert_close(runtime(x), logits, rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates, gates)
    assert [block.looks for block in made.blocks] == [i == 4 for i in range(9)]
    write_onnx(BranchForm(made), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
    scores, decided = run_onnx(session(tmp_path / "branch.onnx", 1), x.contiguous().numpy(), 1)
    np.testing.assert_allclose(scores, logits.numpy(), rtol=0, atol=1e-4)
    assert np.array_equal(decided, gates[:, [4, 5]].numpy())
    write_weights(made, tmp_path / "weights")
    assert not [name for name in load_file(tmp_path / "weights") if name.startswith("blocks.1.")]
    torch.testing.assert_close(SkippingNetwork(rebuilt(described(made), tmp_path / "weights"))(x), runtime(x))
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(folded(network)), tmp_path / "weights")
    least = gates[:, [4, 5]].float().mean(0)
    tolerant, more = specialise(folded(network), x, tolerance=float(max(least.min(), 0.02)))
    runtime = SkippingNetwork(tolerant)
    runtime(x)
    assert len(more) >= len(changes)
    assert routed_otherwise(gates, runtime.gates) <= sum(change["otherwise"] for change in more) + 1e-6
