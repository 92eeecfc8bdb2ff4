import numpy as np
import pytest
from conftest import config

from cosinegate.callbacks.routes import Routes
from cosinegate.evaluate import find_routes
from cosinegate.training.build import build_module

OPEN = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=bool)


@pytest.fixture
def routes() -> Routes:
    cir = np.array([[0.1, 0.5, 0.9], [0.2, 0.5, 0.3], [0.3, 0.5, 0.8], [0.9, 0.5, 0.1]])
    label, predicted = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    return Routes(np.arange(4), label, predicted, OPEN, cir, np.array([0.5, 0.6, 0.5]))


def test_paths_classes_and_accuracy_by_hand(routes):
    assert routes.paths(most=2) == [("101", 2, 0.5), ("100", 1, 1.0)]
    assert routes.by_class(3)[:2].tolist() == [[0.5, 0, 0.5], [1, 0, 0.5]]
    assert np.isnan(routes.by_class(3)[2]).all()  # no image of that class
    assert routes.accuracy_by_computed() == [(0, 1, 1.0), (1, 1, 1.0), (2, 2, 0.5)]
    fewest, most = routes.extremes(1)
    assert (fewest.tolist(), routes.computed[most].tolist()) == ([3], [2])


def test_the_open_rate_by_cir_by_hand(routes):
    edges = np.array([0.0, 0.25, 0.5, 1.0])
    assert routes.open_rate_by_cir(0, edges).tolist() == [1.0, 1.0, 0.0]
    rate = routes.open_rate_by_cir(2, edges)
    assert rate.tolist() == [0.0, 0.0, 1.0]
    assert np.isnan(routes.open_rate_by_cir(1, edges)[0])


def test_the_threshold_is_where_the_gate_turns_without_a_controller():
    chosen = config("+experiment=digits", "gate.controller.enabled=false", "gate.threshold=0.12")
    module = build_module(chosen)
    routes, data = find_routes(module, chosen)
    assert routes.open.shape == (359, 3)
    assert 0 < routes.open.mean() < 1
    for block in range(3):  # γ < 0: open below the threshold, for every image
        clear = np.abs(routes.cir[:, block] - routes.threshold[block]) > 1e-5
        assert clear.mean() > 0.95
        assert np.array_equal(routes.open[clear, block], routes.cir[clear, block] < routes.threshold[block])
    assert np.array_equal(routes.label, data.splits["test"][1].numpy())


def test_a_dense_network_has_every_block_open_and_no_cir():
    chosen = config("+experiment=digits", "gate=none")
    routes, _ = find_routes(build_module(chosen), chosen)
    assert routes.open.all()
    assert routes.cir is None
