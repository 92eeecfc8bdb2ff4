"""The results of a benchmark as a table and as a figure."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cosinegate.runs.outputs import save_figure
from cosinegate.terminal import console
from cosinegate.terminal.escape import code, markdown

MARK = "CosineGate benchmark"
plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name


def as_markdown(results: dict[str, Any]) -> str:
    """Returns the results as a Markdown page."""
    lines = [
        f"# {markdown(results['run'])} on {results['data']}, {results['threads']} thread(s)",
        "",
        f"Test accuracy {100 * results['accuracy']:.2f}%; with int8 convolutions "
        f"{100 * results['int8']['accuracy']:.2f}%{_rerouted(results)}. "
        f"Dense is {markdown(results['dense'])}: FLOPs executed are over its. "
        "Models took turns in one process; a time ratio is to it on the same engine in the same round, "
        "the median over rounds, and `spread` the middle half of the rounds' ratios (of dense, of its times). "
        f"{results['blocks'][0]} of {results['blocks'][1]} blocks are left. "
        "`bar` is the executed FLOPs plus what is allowed (for gates, gather and scatter, where images are routed).",
        "",
        "| batch | engine | model | way | FLOPs counted | FLOPs executed | time ratio | bar | ms an image | spread | "
        "to fastest dense |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        bar = "" if row["bar"] is None else f"{row['bar']:.3f} {'met' if row['met'] else 'missed'}"
        lines.append(
            f"| {row['batch']} | {row['engine']} | {markdown(row['model'])} | {row['way']} | {row['counted']:.3f} | "
            f"{row['executed']:.3f} | {row['time_ratio']:.3f} | {bar} | {row['ms_per_image']:.3f} | "
            f"{row['spread']:.2f} | {row['to_fastest']:.3f} |"
        )
    lines += _ways(results["rows"]) + _kernels(results["kernels"])
    return "\n".join([*lines, "", f"Command: {code('python ' + results['provenance']['command'])}", ""])


def _rerouted(results: dict[str, Any]) -> str:
    return ", where some images take another route" if results["model"] != "compiled" else ""


def _ways(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines about every way to run each model."""
    lines = ["", "Every way to run them, ms an image; the table above has the fastest of each:", ""]
    lines += ["| batch | engine | model | ways |", "|---:|---|---|---|"]
    for row in rows:
        ways = ", ".join(f"{way} {ms:.3f}" for way, ms in sorted(row["ways"].items(), key=lambda item: item[1]))
        lines.append(f"| {row['batch']} | {row['engine']} | {markdown(row['model'])} | {ways} |")
    return lines


def _kernels(kernels: dict[str, dict[str, dict[str, dict[str, float]]]]) -> list[str]:
    """Returns the lines about where the time goes, for the batch sizes that were profiled."""
    lines = []
    for engine in ("onnxruntime", "torch"):
        words = "by its profiler (one thread, ms an image, the batch whole; profiling itself takes time)"
        kinds = list(next(iter(kernels.values()))[engine]["dense"])
        lines += ["", f"Where {engine}'s time goes, {words}:", "", f"| batch | model | {' | '.join(kinds)} | sum |"]
        lines += [f"|---:|---|{'---:|' * (len(kinds) + 1)}"]
        for batch, engines in kernels.items():
            for name, spent in engines[engine].items():
                figures = " | ".join(f"{value:.3f}" for value in (*spent.values(), sum(spent.values())))
                lines.append(f"| {batch} | {markdown(name)} | {figures} |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the time ratios of the run's network on every engine and batch size."""
    rows = [row for row in results["rows"] if row["model"] == results["model"]]
    batches, engines = (sorted({row[key] for row in rows}) for key in ("batch", "engine"))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        ratios = [next(r["time_ratio"] for r in rows if r["engine"] == engine and r["batch"] == b) for b in batches]
        positions = [i - 0.4 + width * (index + 0.5) for i in range(len(batches))]
        bars = axes.bar(positions, ratios, width * 0.95, label=f"time, {engine}")
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2, bbox={"fc": "w", "ec": "none", "pad": 1})
    axes.axhline(1, color="black", linewidth=1, zorder=0)
    axes.axhline(results["counted"], color="tab:gray", linestyle=":", label=f"FLOPs counted {results['counted']:.2f}")
    axes.axhline(results["executed"], color="black", linestyle="--", label=f"FLOPs executed {results['executed']:.2f}")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(xlabel="images in a batch", ylabel="of the dense network, same engine", ylim=(0, None))
    axes.set_title(f"Time of the {results['model']} forms, {results['threads']} thread(s)", fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    save_figure(figure, path, MARK, dpi=150)
    plt.close(figure)


def in_short(results: dict[str, Any], card: dict[str, Any]) -> str:
    """Returns one line about what compiling saved and where the file is."""
    ratios = {
        row["batch"]: f"{row['time_ratio']:.2f} of the time for {row['batch']} image{'s' * (row['batch'] > 1)}"
        for row in results["rows"]
        if row["model"] == results["model"] and row["engine"] == "onnxruntime"
    }
    computed, blocks = results["blocks"]
    same = round(card["forms"]["deployed"]["same_class"] * card["test_images"])
    return (
        f"compiled: {computed} of {blocks} blocks are left, {results['executed']:.3f} of the dense network's FLOPs, "
        f"{', '.join(ratios.values())} (onnxruntime), the same class on {same:,} of {card['test_images']:,} images; "
        f"{card['folder']}/network.onnx"
    )


def show(results: dict[str, Any]) -> None:
    """Prints the results as a table."""
    rows = [
        (
            str(row["batch"]),
            row["engine"],
            row["model"],
            row["way"],
            f"{row['counted']:.3f}",
            f"{row['executed']:.3f}",
            f"{row['time_ratio']:.3f}",
            "" if row["bar"] is None else f"{row['bar']:.3f} {'met' if row['met'] else 'missed'}",
            f"{row['ms_per_image']:.3f}",
        )
        for row in results["rows"]
    ]
    columns = ("batch", "engine", "model", "way", "counted", "executed", "time ratio", "bar", "ms/image")
    console.show_table(f"{results['run']}, accuracy {console.percent(results['accuracy'])}", columns, rows)
    console.say("time ratio: to the dense network on the same engine, each in its fastest way to run the batch")
    bar = "0.05, for one image and for 64 and more"
    if results["model"] != "compiled":
        bar = "0.10 (batches of 64 and more) or 0.15 (one image on onnxruntime)"
    console.say(f"bar: executed FLOPs plus {bar}; {results['blocks'][0]} of {results['blocks'][1]} blocks are left")
    console.say(f"written to {results['folder']}")
