"""Properties that hold for any input, looked for by hypothesis: always the same examples, and few of them."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import config
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cosinegate import cli, geometry
from cosinegate.analysis.frontier import hypervolume, on_frontier
from cosinegate.analysis.runs import families, find_runs, read_run
from cosinegate.config.checks import validate
from cosinegate.config.identity import identity, leaves, primitives
from cosinegate.runs.record import (
    Accuracy,
    Compiled,
    Cut,
    Epochs,
    Flops,
    Latency,
    Record,
    Source,
    read_metrics,
    read_record,
)
from cosinegate.terminal.errors import UserError

ROOT = Path(__file__).parents[1]


def few(examples: int):
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=slow)


def refused(function, *arguments) -> str | None:
    """The line that the function ends with, if it ends with a person's mistake."""
    try:
        function(*arguments)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        return cli.one_line(error)
    except ValueError as error:
        return str(error) if "override" in str(error) else f"not a refusal\n{error}"  # `cli.run` answers Hydra's own


# the config

KINDS = ("cosine", "skipnet", "aig", "constant", "random", "none")  # a schema each
VALUES = st.one_of(
    st.integers(),
    st.sampled_from([10**30, -(10**30), 2**63, 0, 1, -1]),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.none(),
    st.lists(st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text("ab", min_size=1, max_size=2), st.integers(), max_size=2),
)


COMPOSED = {kind: config("+experiment=digits", f"gate={kind}") for kind in KINDS}
KEYS = [
    (kind, key)
    for kind in KINDS
    for key in sorted(leaves(primitives(COMPOSED[kind])))
    if key.startswith("gate.") or (kind == "cosine" and not key.startswith(("callbacks", "logger")))
]


@pytest.fixture(scope="module")
def composed():
    return COMPOSED["cosine"]


@few(120)
@given(where=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_any_key_is_taken_or_refused_with_one_line(where, value):
    kind, key = where
    changed = COMPOSED[kind].copy()

    def ask() -> None:
        OmegaConf.update(changed, key, value, force_add=False)
        validate(changed)

    line = refused(ask)
    if line is None:
        assert len(identity(changed)) == 10
        json.dumps(primitives(changed), allow_nan=False)
    else:
        assert line
        assert "\n" not in line


@few(12)
@given(text=st.text(st.characters(codec="ascii"), max_size=12))
def test_any_text_on_the_command_line_is_taken_or_refused_with_one_line(text):
    line = refused(lambda: validate(config(f"name={text}")))
    assert line is None or "\n" not in line


@few(10)
@given(order=st.randoms(use_true_random=False))
def test_identity_does_not_know_the_order_of_keys(composed, order):
    def shuffled(node):
        if not isinstance(node, dict):
            return node
        keys = list(node)
        order.shuffle(keys)
        return {key: shuffled(node[key]) for key in keys}

    assert identity(OmegaConf.create(shuffled(primitives(composed)))) == identity(
        OmegaConf.create(primitives(composed))
    )


# records

RECORD = json.loads((ROOT / "results" / "cifar10_20" / "exits_own" / "record.json").read_text())
RECORD["compiled"] = {"executed": 0.69, "blocks": 9, "dynamic_blocks": 4, "same_class": 9999, "images": 10000}
PARTS = {"epochs": Epochs, "accuracy": Accuracy, "flops": Flops, "compiled": Compiled, "latency": Latency, "cut": Cut}
PARTS |= {"trunk": Source, "weights": Source}
RECORD_KEYS = [f"{part}.{key}" for part, model in PARTS.items() for key in model.model_fields]
RECORD_KEYS += [*Record.model_fields, "key_of_another_version"]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.just(10**400))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def assert_every_reader_answers(folder: Path) -> None:
    """Every reader of a record: an answer or a UserError, and what is found can be compared and written."""
    lines: list[str] = []
    runs = find_runs([folder], lines.append)
    assert len(lines) + len(runs) == 1
    assert all("\n" not in line and line.startswith("skipped: ") for line in lines)
    for family in families(runs, "counted"):
        assert not set("/\0\n") & set("".join(map(str, family)))
    for reader in (read_record, read_run):
        assert refused(reader, folder) != ""


@few(60)
@given(content=JSON)
def test_any_json_is_a_record_or_passed_over_with_a_line(tmp_path, content):
    (tmp_path / "record.json").write_text(json.dumps(content))
    assert_every_reader_answers(tmp_path)


@few(100)
@given(key=st.sampled_from(RECORD_KEYS), value=JSON)
def test_any_value_in_a_record_is_taken_or_passed_over_with_a_line(tmp_path, key, value):
    record = json.loads(json.dumps(RECORD))
    *parents, last = key.split(".")
    node = record
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert_every_reader_answers(tmp_path)
    run = next(iter(find_runs([tmp_path], lambda line: None)), None)
    if run is not None:
        assert math.isfinite(run.accuracy)
        assert math.isfinite(run.cost("executed"))
        assert run.record.epochs.planned >= 1


@few(60)
@given(content=st.binary(max_size=60) | st.text('epoch,val/ac123.\n"e-', max_size=60).map(str.encode))
def test_any_bytes_are_metrics_or_one_line(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    line = refused(read_metrics, tmp_path)
    assert line is None or line.startswith(f"{tmp_path}/metrics.csv cannot be read")


# geometry

FINITE = st.floats(-(2.0**50), 2.0**50, width=32)
TINY = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e-8, 1e15, -1e15, 1.0])
NUMBER = st.one_of(FINITE, TINY)


def maps(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 2, 1, 2)


BATCH = st.integers(0, 3).flatmap(
    lambda size: st.tuples(*[st.lists(st.lists(NUMBER, min_size=4, max_size=4), min_size=size, max_size=size)] * 2)
)


def slow_cir(s: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Sample by sample, in float64."""
    found = []
    for one, other in zip(s.double().flatten(1), r.double().flatten(1), strict=True):
        a, b, c = (one @ one).item(), (one @ other).item(), (other @ other).item()
        cosine = b / math.sqrt(a) / math.sqrt(c) if a > geometry.TINY and c > geometry.TINY else 0.0
        found.append(1 - min(1.0, max(-1.0, cosine)))
    return torch.tensor(found)


@few(80)
@given(batch=BATCH)
def test_cir_of_finite_maps_is_in_its_range_and_that_of_float64(batch):
    s, r = map(maps, batch)
    *_, dots = geometry.dot_products(s, r)
    cir = geometry.cir(dots)
    assert cir.shape == (len(s),)
    assert ((cir >= 0) & (cir <= 2)).all()
    norms = [x.double().flatten(1).square().sum(1) for x in (s, r)]
    clear = [(n > 2 * geometry.TINY) | (n < geometry.TINY / 2) for n in norms]  # not at the edge of what counts as zero
    sure = clear[0] & clear[1]
    torch.testing.assert_close(cir[sure], slow_cir(s, r).float()[sure], rtol=0, atol=2e-6)


@few(60)
@given(batch=BATCH, z=st.floats(0, 1, width=32), detach=st.booleans())
def test_gradients_of_finite_maps_are_finite(batch, z, detach):
    s, r = (maps(rows).requires_grad_() for rows in batch)
    s_out, r_out, dots = geometry.dot_products(s, r)
    gate = torch.full((len(s),), z, requires_grad=True)
    terms = geometry.cir(dots) + geometry.consistency(dots, gate, detach)
    (terms.sum() + 0 * (s_out.sum() + r_out.sum())).backward()
    for tensor in (s, r, gate):
        assert tensor.grad.isfinite().all()


@few(50)
@given(batch=BATCH, odd=st.sampled_from([math.nan, math.inf, -math.inf]), which=st.integers(0, 1))
def test_what_is_no_number_stays_in_its_own_sample(batch, odd, which):
    s, r = map(maps, batch)
    if not len(s):
        return
    expected = geometry.cir(geometry.dot_products(s, r)[2])
    (s, r)[which][-1, 0, 0, 0] = odd
    cir = geometry.cir(geometry.dot_products(s, r)[2])
    assert torch.equal(cir[:-1], expected[:-1])
    other = (s, r)[1 - which][-1]
    assert cir[-1].isnan() or (cir[-1] == 1 and other.square().sum() <= geometry.TINY)


@few(60)
@given(batch=BATCH, scale=st.sampled_from([2.0**60, 2.0**100, 2.0**77]))
def test_cir_of_maps_too_large_for_float32_is_right_or_no_number(batch, scale):
    s, r = (maps(rows) * scale for rows in batch)
    finite = s.flatten(1).isfinite().all(1) & r.flatten(1).isfinite().all(1)
    cir = geometry.cir(geometry.dot_products(s, r)[2])
    norms = [x.double().flatten(1).square().sum(1) for x in (s, r)]
    sure = finite & ~cir.isnan()
    for n in norms:
        sure &= (n > 2 * geometry.TINY) | (n < geometry.TINY / 2)
    torch.testing.assert_close(cir[sure], slow_cir(s, r).float()[sure], rtol=0, atol=2e-6)


# the frontier

POINTS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0, 1)) | st.tuples(*[st.sampled_from([0.1, 0.5, 0.9])] * 2), max_size=12
)


@few(100)
@given(points=POINTS)
def test_the_frontier_is_what_nothing_dominates(points):
    def dominated(p):
        return any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)

    assert on_frontier(points) == [not dominated(point) for point in points]


@few(60)
@given(points=POINTS, reference=st.tuples(st.floats(0, 2), st.floats(0, 1)))
def test_hypervolume_is_the_area_of_the_cells_that_something_dominates(points, reference):
    xs = sorted({p[0] for p in points if p[0] < reference[0]} | {reference[0]})
    ys = sorted({p[1] for p in points if p[1] > reference[1]} | {reference[1]})
    area = sum(
        (x2 - x1) * (y2 - y1)
        for x1, x2 in itertools.pairwise(xs)
        for y1, y2 in itertools.pairwise(ys)
        if any(p[0] <= x1 and p[1] >= y2 for p in points)
    )
    assert hypervolume(points, reference) == pytest.approx(area, abs=1e-9)
    frontier = [p for p, kept in zip(points, on_frontier(points), strict=True) if kept]
    assert hypervolume(frontier, reference) == pytest.approx(area, abs=1e-9)
