"""A card and its weights rebuild the network that they describe, and nothing else."""

import json

import pytest
import torch
from conftest import config
from deployed import (
    CLOSED,
    LAST_STAGE,
    OPEN,
    chosen,
    cosine,
    digits,
    eager,
    images,
    network_of,
    with_exits,
    write,
)
from safetensors.torch import load_file, save_file

from cosinegate.deploy.card import CARD, WEIGHTS, actions_of, read_network, sha256
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.fold import folded
from cosinegate.deploy.source import is_written_network
from cosinegate.networks import GatedNetwork
from cosinegate.networks.compile import Action, compile_gates
from cosinegate.terminal.errors import UserError

PATTERN = [CLOSED, OPEN, CLOSED, CLOSED, OPEN, OPEN]


def dense() -> tuple[GatedNetwork, list[Action] | None]:
    return network_of(config(*LAST_STAGE)), None


def compiled(*overrides: str) -> tuple[GatedNetwork, list[Action] | None]:
    network, changes = compile_gates(cosine(PATTERN, *overrides), images())
    return network, actions_of(changes)


def exits() -> tuple[EarlyExitNetwork, list[Action] | None]:
    return with_exits(), None


@pytest.mark.parametrize(
    ("made", "of"),
    [
        (dense, LAST_STAGE),
        (compiled, ()),
        (lambda: compiled("network.shortcut=projection"), ("network.shortcut=projection",)),
        (exits, LAST_STAGE),
    ],
    ids=["dense", "compiled", "projection", "exits"],
)
def test_weights_and_card_rebuild_the_network(made, of, tmp_path):
    network, actions = made()
    of = config(*of) if of == LAST_STAGE else chosen("cosine", *of)
    write(network, of, actions, tmp_path)
    card, again, read = read_network(tmp_path)
    assert card == json.loads((tmp_path / CARD).read_text())
    assert read.network == of.network
    assert type(again) is type(network)
    assert list(again.state_dict()) == list(network.state_dict())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in network.state_dict().items())
    assert not any(parameter.requires_grad for parameter in again.parameters())
    x = digits("test")
    expected = eager(network.to(memory_format=torch.channels_last), x)
    assert torch.equal(eager(again, x).logits, expected.logits)
    if made is exits:
        assert torch.equal(eager(again, x).routing.gates, expected.routing.gates)
        assert (again.after, again.threshold.item()) == (network.after, network.threshold.item())


def test_what_is_removed_is_not_written(tmp_path):
    network, actions = compiled()
    write(network, chosen("cosine"), actions, tmp_path)
    names = set(load_file(tmp_path / WEIGHTS))
    trained = set(cosine(PATTERN).state_dict())
    gone = {name for name in trained if ".gate." in name or name.startswith(("blocks.0.", "blocks.2.", "blocks.3."))}
    assert names == trained - gone


def test_folding_leaves_no_batchnorm_and_the_network_as_it_was():
    network = with_exits()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    plain = folded(network)
    assert not [module for module in plain.network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in before.items())
    dense, x = network_of(config(*LAST_STAGE)), images()
    torch.testing.assert_close(eager(folded(dense), x).logits, eager(dense, x).logits, rtol=1e-4, atol=1e-4)


def test_a_card_that_is_not_of_its_weights_is_one_line(tmp_path):
    network, actions = compiled()
    good = write(network, chosen("cosine"), actions, tmp_path)
    inner, names = good["network"], [action.name for action in actions]
    wide = inner["config"] | {"network": inner["config"]["network"] | {"width": 400}}
    deep = inner["config"] | {"network": inner["config"]["network"] | {"depth": 10**9 + 1}}
    for changes, words in [
        ({"actions": names[:-1]}, "not the weights of its card"),
        ({"actions": names[::-1]}, "not the weights of its card"),
        ({"actions": ["predicted"] * 6}, "not the weights of its card"),
        ({"actions": ["exec"] * 6}, "not the weights of its card"),
        ({"actions": 5}, "not the weights of its card"),
        ({"actions": None}, "not the weights of its card"),
        ({"exits": {"2": 16}}, "not the weights of its card"),
        ({"exits": {"99": 16}}, "exits after"),
        ({"exits": {"2": 10**12}}, "channels"),
        ({"exits": ["2"]}, "not the weights of its card"),
        ({"config": wide}, "not the weights of its card"),
        ({"config": deep}, "network.depth"),
        ({"config": None}, "another version"),
        ({"format": 6}, "a card of format 6, where this version reads 7: export again"),
    ]:
        (tmp_path / CARD).write_text(json.dumps(good | {"network": inner | changes}))
        with pytest.raises(UserError, match=words):
            read_network(tmp_path)
    for text in ("{", "[]", '{"network": 5}', '{"network": {}, "files": []}', "[" * 10**5):
        (tmp_path / CARD).write_text(text)
        with pytest.raises(UserError, match="not a card of this program"):
            read_network(tmp_path)
    (tmp_path / CARD).unlink()
    with pytest.raises(UserError, match="not a card of this program"):
        read_network(tmp_path)


def test_weights_that_are_not_the_cards_are_one_line(tmp_path):
    network, actions = compiled()
    card = write(network, chosen("cosine"), actions, tmp_path)
    path, stored = tmp_path / WEIGHTS, load_file(tmp_path / WEIGHTS)
    first = "stem.0.weight"
    for other in (
        {name: tensor for name, tensor in stored.items() if name != first},
        stored | {"more": torch.zeros(1)},
        stored | {first: torch.zeros(3)},
        stored | {first: stored[first].to(torch.int8)},
        stored | {first: stored[first].half()},
    ):
        save_file(other, path)
        with pytest.raises(UserError, match="missing or damaged"):
            read_network(tmp_path)
        (tmp_path / CARD).write_text(json.dumps(card | {"files": {WEIGHTS: sha256(path)}}))
        with pytest.raises(UserError, match="not the weights of its card"):
            read_network(tmp_path)
        (tmp_path / CARD).write_text(json.dumps(card))
    path.write_bytes(path.read_bytes()[:-50])
    (tmp_path / CARD).write_text(json.dumps(card | {"files": {WEIGHTS: sha256(path)}}))
    with pytest.raises(UserError, match="not the weights of its card"):
        read_network(tmp_path)
    with path.open("r+b") as file:
        file.truncate(2**40)  # of holes: it takes no disk, and would take a terabyte of memory
    with pytest.raises(UserError, match="missing or damaged"):
        read_network(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="missing or damaged"):
        read_network(tmp_path)


def test_a_runs_folder_is_a_run_whatever_card_lies_in_it(tmp_path):
    assert not is_written_network(tmp_path)
    network, actions = compiled()
    write(network, chosen("cosine"), actions, tmp_path)
    assert is_written_network(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    assert not is_written_network(tmp_path)
