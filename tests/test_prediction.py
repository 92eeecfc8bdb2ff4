"""How well gates know what F would have told them, as it is logged."""

from types import SimpleNamespace

import pytest
import torch
from conftest import config
from lightning.pytorch.strategies import SingleDeviceStrategy

from cosinegate.build import build_module
from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.callbacks.prediction import PredictionStatistics
from cosinegate.networks import Output, Routing


def test_r2_and_agreement_are_those_of_all_batches_of_the_blocks_that_ran(rng):
    """Against numpy's words for it: one block whose F never ran, batches of two sizes, gates on two of three blocks."""
    module, logged = build_module(config("+experiment=digits_predictive")), {}
    module.log_dict = lambda values, **_: logged.update({name: value.item() for name, value in values.items()})
    callback = PredictionStatistics(EpochSums())
    trainer = SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    callback.places = [1, 2, 4]
    fields = []
    for size in (30, 11):
        predicted, exact = torch.rand(2, size, 6, generator=rng)
        exact[:, 2] = torch.nan
        agrees = (torch.rand(size, 6, generator=rng) > 0.3).float()
        routing = Routing(predicted, predicted, predicted, exact, agrees, predicted)
        callback.on_train_batch_end(trainer, module, {"output": Output(predicted, routing)}, None, 0)
        fields.append((predicted, exact, agrees))
    callback.on_train_epoch_end(trainer, module)
    predicted, exact, agrees = (torch.cat(parts).double().numpy() for parts in zip(*fields, strict=True))
    r2 = {b: 1 - ((exact - predicted)[:, b] ** 2).mean() / exact[:, b].var() for b in (1, 4)}
    expected = {f"predict/r2_block_{b:02d}": value for b, value in r2.items()}
    expected |= {f"predict/agreement_block_{b:02d}": agrees[:, b].mean() for b in (1, 4)}
    expected |= {"predict/r2": sum(r2.values()) / 2, "predict/agreement": agrees[:, [1, 4]].mean()}
    assert logged == pytest.approx(expected, rel=1e-5)
