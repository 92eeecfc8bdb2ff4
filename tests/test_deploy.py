"""What is written down of a deployed network rebuilds it, and what never changes can be taken out of it."""

import hashlib
import json

import pytest
import torch
from cosinegate.deploy.folded import folded
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.weights import described, read_exported, rebuilt, write_weights
from deployed import EXITS, FORMS, assert_same, eager, images, trained
from safetensors.torch import load_file

from cosinegate.deploy.compile import Action, compile_gates
from cosinegate.deploy.onnx_forms import BranchForm, run_onnx, session, write_onnx
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


def test_what_was_compiled_is_written_down_without_what_never_changes(rng, tmp_path):
    network = trained("network.depth=20", "gate.predictor.look=stage", rng=rng)
    turns = {1: torch.inf, 2: -torch.inf, 7: -torch.inf, 8: -torch.inf}
    for place, turn in turns.items():
        network.blocks[place].gate.opening.threshold.fill_(turn)
    x = images(60, rng)
    expected = eager(network, x)
    gates = expected.routing.gates.bool()
    compiled, changes = compile_gates(network, x)
    assert changes.places(Action.removed) == [1]
    assert changes.places(Action.always) == [2, 7, 8]
    assert torch.equal(compiled(x).logits, expected.logits)
    made = folded(compiled)
    runtime = SkippingNetwork(made)
    assert_same(runtime(x), runtime.gates, network, expected)
    assert [block.looks for block in made.blocks] == [i == 4 for i in range(9)]
    write_onnx(BranchForm(made), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
    scores, decided = run_onnx(session(tmp_path / "branch.onnx", 1), x.contiguous().numpy(), 1)
    routes = gates.clone()
    routes[:, [4, 5]] = torch.from_numpy(decided)
    assert_same(torch.from_numpy(scores), routes, network, expected)
    write_weights(made, tmp_path / "weights")
    assert not [name for name in load_file(tmp_path / "weights") if name.startswith("blocks.1.")]
    torch.testing.assert_close(SkippingNetwork(rebuilt(described(made), tmp_path / "weights"))(x), runtime(x))
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(folded(network)), tmp_path / "weights")
