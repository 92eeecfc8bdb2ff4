import matplotlib.pyplot as plt

from cosinegate.plots.curves import curves_figure, draw_curves, phases
from cosinegate.runs.record import read_metrics, write_metrics


def rows_of(gates, blocks=3):
    return {
        epoch: {"gates/mean": gate, "val/acc": 0.5, "train/acc": 0.4, "gates/relaxed_mean": gate}
        | {f"gates/block_{b:02d}": gate for b in range(blocks)}
        for epoch, gate in enumerate(gates, start=1)
    }


def test_phases_follow_the_warmup_and_then_the_gates():
    gates = [1.0] * 10 + [0.9] * 30 + [0.8] * 10 + [0.7] * 50  # settles in epoch 51
    found = phases(rows_of(gates), warmup_epochs=40)
    assert [(name.split()[0], start, end) for name, start, end in found] == [
        ("I", 0.5, 20.5),
        ("II", 20.5, 50.5),
        ("III", 50.5, 100.5),
    ]


def test_a_phase_that_is_not_reached_is_left_out():
    assert [name.split()[0] for name, *_ in phases(rows_of([1.0] * 5), warmup_epochs=40)] == ["I"]
    assert [name.split()[0] for name, *_ in phases(rows_of([0.7] * 5), warmup_epochs=0)] == ["III"]
    assert phases({1: {"val/acc": 0.1}}, 40) == []


def test_the_figure_is_drawn_for_gated_dense_and_single_epoch_runs(tmp_path):
    dense = {1: {"val/acc": 0.5, "train/acc": 0.4, "gates/mean": 1.0}}
    for name, rows in {"gated": rows_of([1.0, 0.9, 0.7]), "one": rows_of([1.0]), "dense": dense}.items():
        path = tmp_path / f"{name}.png"
        draw_curves(rows, path, name, tau_target=0.7, warmup_epochs=1)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000


def test_prog_and_the_target_are_drawn_where_a_penalty_pushes_the_gates():
    rows = {epoch: row | {"schedule/prog": 0.5} for epoch, row in rows_of([1.0, 0.9, 0.7]).items()}

    def words(tau_target: float | None) -> tuple[list[str], bool]:
        figure = curves_figure(rows, "a run", tau_target, warmup_epochs=1)
        plt.close(figure)
        return figure.axes[1].get_legend_handles_labels()[1], any(
            text.get_text().startswith("phases") for text in figure.texts
        )

    gates = ["mean gate, hard (counted FLOPs)", "executed FLOPs / dense", "mean gate, relaxed (training)"]
    assert words(0.7) == ([*gates, "prog(t)", "target 0.7"], True)  # and the phases
    assert words(None) == (gates, False)


def test_metrics_survive_a_round_trip(tmp_path):
    rows = {1: {"a": 0.1, "b": 1e-30}, 2: {"a": 1 / 3}}
    write_metrics(tmp_path, rows)
    assert read_metrics(tmp_path) == rows
