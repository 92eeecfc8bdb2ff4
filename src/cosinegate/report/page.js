"use strict";
// The page's data is a list of runs; every chart is drawn anew when a control or the colour scheme changes.
const { runs, frontier } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]; // Okabe and Ito
const CIVIDIS = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
// What a record or a row lacks, or has as something else than a number, is shown as a dash.
const isNumber = (value) => typeof value === "number";
const figure = (value, digits = 3) => (isNumber(value) ? value.toFixed(digits) : "–");
const percent = (fraction) => (isNumber(fraction) ? `${(100 * fraction).toFixed(2)}%` : "–");
const lacking = (values) => { // a sentence that says which of them are not known
  const names = Object.keys(values).filter((name) => !isNumber(values[name]));
  return names.length ? ` Not recorded: ${names.join(", ")}.` : "";
};
const charts = {};

function draw(id, words, option) {
  const element = $(id);
  if (charts[id]) charts[id].dispose();
  charts[id] = echarts.init(element, dark.matches ? "dark" : null, { renderer: "svg" });
  const common = { backgroundColor: "transparent", color: COLOURS, animation: false };
  charts[id].setOption({ ...common, grid: { left: 60, right: 24, top: 48, bottom: 56 }, ...option });
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", words);
  element.parentElement.querySelector("figcaption").textContent = words;
}

const axis = (name, more = {}) => ({ type: "value", name, nameLocation: "middle", nameGap: 32, ...more });
const nearest = { tooltip: { trigger: "axis" }, legend: { top: 0, type: "scroll" } };

function lines(run, names, style, prefix = "") {
  return Object.entries(names)
    .filter(([name]) => run.curves[name])
    .map(([name, label]) => ({
      name: prefix + label, type: "line", symbolSize: 5, connectNulls: true, ...style,
      data: run.epochs.map((epoch, k) => [epoch, run.curves[name][k]]),
    }));
}

function marked(run) {
  const phase = run.phases.map(([name, start, end]) => [{ name: window.innerWidth < 600 ? name.split(" ")[0] : name, xAxis: start }, { xAxis: end }]);
  const itemStyle = { color: "rgba(128,128,128,.08)", borderColor: "rgba(128,128,128,.5)", borderWidth: 1 };
  return phase.length ? { markArea: { silent: true, itemStyle, label: { fontSize: 10, color: "#888" }, data: phase } } : {};
}

function drawCurves(run, other) {
  const first = run.epochs[0] ?? 1, last = run.epochs[run.epochs.length - 1] ?? 1;
  const x = axis("epoch", { min: first - 0.5, max: Math.max(last, ...(other ? other.epochs : [])) + 0.5, minInterval: 1, axisLabel: { showMinLabel: false, showMaxLabel: false } });
  const both = (names, style) => { // the other run's curve has its counterpart's colour, dashed
    const own = lines(run, names, style).map((line, k) => ({ ...line, color: COLOURS[k % COLOURS.length] }));
    if (!other) return own;
    const theirs = lines(other, names, { ...style, lineStyle: { type: "dashed" } }, `${other.name}: `);
    return [...own, ...theirs.map((line) => ({ ...line, color: own.find((o) => line.name.endsWith(`: ${o.name}`))?.color }))];
  };
  const versus = other ? ` Dashed: ${other.name}, best ${percent(other.record.accuracy.best)}, FLOPs counted ${figure(other.record.flops.counted)}.` : "";
  const accuracy = both({ "train/acc": "train", "val/acc": "validation" }, {});
  if (accuracy.length) Object.assign(accuracy[0], marked(run));
  const best = run.record.accuracy;
  draw("accuracy", best.best == null && !run.curves["val/acc"] ? "No epoch has been validated yet."
    : `Accuracy over ${run.epochs.length} epochs: best ${percent(best.best)} in epoch ${figure(best.best_epoch, 0)}, last ${percent(best.last)}.`
    + lacking({ "best accuracy": best.best, "its epoch": best.best_epoch, "last accuracy": best.last }) + versus,
    { ...nearest, xAxis: x, yAxis: axis("accuracy", { scale: true, axisLabel: { formatter: percent } }), series: accuracy });
  const names = { "gates/mean": "mean gate, hard (FLOPs counted)", "flops/executed": "FLOPs executed / dense" };
  if (run.gated) Object.assign(names, { "gates/relaxed_mean": "mean gate, relaxed", "schedule/prog": "prog(t)" });
  const series = both(names, {});
  if (run.gated) series.push({ name: "skipped, as the paper counts", type: "line", symbolSize: 5, connectNulls: true, color: COLOURS[4], data: run.epochs.map((epoch, k) => [epoch, run.skipped[k]]) });
  if (run.gated && series.length) {
    Object.assign(series[0], marked(run));
    if (isNumber(run.tau_target)) series[0].markLine = { symbol: "none", lineStyle: { type: "dotted" }, data: [{ yAxis: run.tau_target, name: "target" }] };
  }
  const { counted, executed } = run.record.flops;
  const skipped = run.record.skip_percent;
  draw("efficiency", counted == null && executed == null ? "No FLOPs yet."
    : !run.gated ? `A dense network: executed ${figure(executed)} of its FLOPs.` + lacking({ "FLOPs executed": executed }) + versus
    : `Compute: counted ${figure(counted)} (the mean gate, so ${figure(skipped, 1)}% skipped as the paper counts), executed ${figure(executed)} of the dense network's FLOPs.`
    + lacking({ "FLOPs counted": counted, "percent skipped": skipped, "FLOPs executed": executed, ...(run.has_target && { target: run.tau_target }) }) + versus,
    { ...nearest, xAxis: x, yAxis: axis("fraction"), series });
}

function heat(id, words, columns, rows, cells, x, y) {
  draw(id, words, {
    tooltip: { formatter: ({ value }) => `${y} ${echarts.format.encodeHTML(rows[value[1]])}, ${x} ${columns[value[0]]}: ${percent(value[2])} compute it` },
    grid: { left: 12, right: 24, top: 28, bottom: 84, containLabel: true },
    xAxis: { type: "category", data: columns, name: x, nameLocation: "middle", nameGap: 26 },
    yAxis: { type: "category", data: rows, name: y, nameLocation: "start", inverse: true },
    visualMap: { min: 0, max: 1, calculable: true, orient: "horizontal", left: "center", bottom: 0, inRange: { color: CIVIDIS }, formatter: (v) => percent(v) },
    series: [{ type: "heatmap", data: cells }],
  });
}

function drawGates(run) {
  const kept = run.epochs.map((_, k) => k).filter((k) => run.blocks.some((curve) => curve[k] != null));
  const cells = run.blocks.flatMap((curve, block) => kept.map((k, column) => [column, block, curve[k]]));
  const dynamic = run.record.dynamic_blocks;
  if (!run.record.exits) heat("block-epoch", `Fraction of the images that compute each block, by epoch. ${dynamic ?? "?"} of ${run.blocks.length} blocks are dynamic in the end: open for 5 to 95% of the images.`,
    kept.map((k) => String(run.epochs[k])), run.blocks.map((_, b) => String(b)), cells, "epoch", "block");
  if (!run.routes) return;
  const { classes, class_x_block: table } = run.routes;
  heat("class-block", "Fraction of each class's images that compute each block. Rows that look alike: the gates do not tell the classes apart.",
    table[0].map((_, b) => String(b)), classes, table.flatMap((row, k) => row.map((v, b) => [b, k, v])), "block", "class");
}

function drawBlock(run, block) { // the index among the blocks that have a gate
  const { blocks, edges, counts, open_rate: rate, threshold, open } = run.routes.cir;
  const centre = counts[block].map((_, k) => (edges[k] + edges[k + 1]) / 2);
  const turn = threshold[block];
  const shown = turn != null && turn >= edges[0] && turn <= edges[edges.length - 1];
  const mark = shown ? { markLine: { symbol: "none", label: { formatter: "threshold" }, data: [{ xAxis: turn }] } } : {};
  const where = shown ? `at CIR ${turn.toFixed(2)}` : "outside the range of CIR that occurs";
  const x = axis("CIR", { min: edges[0], max: edges[edges.length - 1] });
  draw("cir", `Block ${blocks[block]}: CIR of ${run.routes.images} test images. The gate turns ${where}, at the mean of its controller's offset; it computes ${percent(open[block])} of the images.`,
    { tooltip: { trigger: "axis" }, xAxis: x, yAxis: axis("images"), series: [{ name: "images", type: "bar", barWidth: "95%", data: centre.map((c, k) => [c, counts[block][k]]), ...mark }] });
  draw("open-rate", `Block ${blocks[block]}: fraction of the images that compute it, by their CIR.`,
    { tooltip: { trigger: "axis" }, xAxis: x, yAxis: axis("open fraction", { min: 0, max: 1 }), series: [{ name: "open fraction", type: "line", symbolSize: 6, data: centre.map((c, k) => [c, rate[block][k]]), ...mark }] });
}

function drawRoutes(run) {
  const { by_computed: groups, paths, number_of_paths: all, images } = run.routes;
  draw("by-computed", "Accuracy by the number of blocks that computed an image: " + groups.map(([n, count, acc]) => `${n} blocks, ${count} images, ${percent(acc)}`).join("; ") + ".",
    { tooltip: { trigger: "axis" }, legend: { top: 0 }, xAxis: { type: "category", name: "blocks computed", nameLocation: "middle", nameGap: 28, data: groups.map(([n]) => String(n)) },
      yAxis: [axis("images"), axis("accuracy", { min: 0, max: 1 })],
      series: [{ name: "images", type: "bar", barMaxWidth: 64, data: groups.map((g) => g[1]) }, { name: "accuracy", type: "line", yAxisIndex: 1, symbolSize: 9, data: groups.map((g) => g[2]) }] });
  draw("paths", `${all} distinct ${all === 1 ? "path" : "paths"}. The most common, ■ computed and □ skipped: ` + paths.slice(0, 3).map(([word, count, acc]) => `${squares(word)} ${percent(count / images)} of the images, accuracy ${percent(acc)}`).join("; ") + ".",
    { tooltip: { trigger: "axis" }, grid: { left: 12, right: 40, top: 16, bottom: 40, containLabel: true }, xAxis: axis("images"), yAxis: { type: "category", inverse: true, data: paths.map(([word]) => squares(word)) },
      series: [{ name: "images", type: "bar", barMaxWidth: 28, data: paths.map((p) => p[1]) }] });
  const { examples, fewest } = run.routes;
  $("route-drawing").replaceChildren();
  const alike = groups.length === 1 ? "All images took equally many blocks: these are just the first and the last. " : "";
  $("route").querySelector("figcaption").textContent = `${alike}Pick an image to see its route.`;
  fill("fewest", examples.slice(0, fewest)); fill("most", examples.slice(fewest));
}

const squares = (word) => [...word].map((c) => (c === "1" ? "■" : "□")).join("");

function fill(id, examples) {
  $(id).replaceChildren(...examples.map((example) => {
    const button = document.createElement("button");
    const image = Object.assign(document.createElement("img"), { src: example.src, alt: `${example.label}, ${count(example)} blocks` });
    const route = Object.assign(document.createElement("span"), { className: "small", textContent: squares(example.open.join("")) });
    button.append(image, route);
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => pick(button, example));
    return button;
  }));
}

const count = (example) => example.open.reduce((a, b) => a + b, 0);

function pick(button, example) {
  for (const other of document.querySelectorAll(".images button")) other.setAttribute("aria-pressed", String(other === button));
  const blocks = example.open.map((open, block) => {
    const box = document.createElement("span");
    box.className = open ? "block computed" : "block";
    box.textContent = `${open ? "■" : "□"} ${block}`;
    if (example.cir) box.append(document.createElement("br"), figure(example.cir[block], 2));
    return box;
  });
  const image = Object.assign(document.createElement("img"), { src: example.src, alt: example.label });
  $("route-drawing").replaceChildren(image, ...blocks);
  const verdict = example.label === example.predicted ? "rightly" : `wrongly, it is ${example.label}`;
  $("route").querySelector("figcaption").textContent =
    `Test image ${example.index}, taken for ${example.predicted} (${verdict}): ${count(example)} of ${example.open.length} blocks computed it.` + (example.cir ? " Under each block: its CIR." : "");
}

function drawFrontier() {
  $("s-frontier").hidden = frontier.length < 2;
  if (frontier.length < 2) return;
  const step = frontier.filter((p) => p.on_frontier).sort((a, b) => a.counted - b.counted);
  draw("frontier", `${frontier[0].family}: ${frontier.length} configurations, the mean over their seeds. On the frontier: ` + step.map((p) => `${p.label} ${percent(p.accuracy)} at ${figure(p.counted)}`).join("; ") + ".",
    { tooltip: { formatter: ({ data }) => `${echarts.format.encodeHTML(data.name ?? "frontier")}: ${percent(data.value ? data.value[1] : data[1])}` }, xAxis: axis("FLOPs counted: mean gate", { scale: true }), yAxis: axis("test accuracy", { scale: true, axisLabel: { formatter: percent } }),
      series: [{ type: "scatter", symbolSize: 11, data: frontier.map((p) => ({ name: p.label, value: [p.counted, p.accuracy] })) },
        { type: "line", step: "end", symbol: "none", data: step.map((p) => [p.counted, p.accuracy]) }] });
}

function drawExits(run) {
  $("s-exits").hidden = !run.exits;
  if (!run.exits) return;
  const { after, own, points } = run.exits;
  const budget = (point) => figure(point.budget, 2);
  draw("exits", `Exits after blocks ${after.join(", ")}. Without exits ${percent(own.accuracy)} at ${figure(own.executed)} of the dense network's FLOPs. By budget: ` + points.map((p) => `${budget(p)}, ${percent(p.accuracy)} at ${figure(p.executed)}`).join("; ") + ".",
    { tooltip: { formatter: ({ data }) => `${percent(data[1])} at ${figure(data[0])}` }, legend: { top: 0 }, xAxis: axis("FLOPs executed / dense", { scale: true }), yAxis: axis("test accuracy", { scale: true, axisLabel: { formatter: percent } }),
      series: [{ name: "with exits, by budget", type: "line", symbolSize: 9, label: { show: true, position: "bottom", formatter: ({ dataIndex }) => budget(points[dataIndex]) }, data: points.map((p) => [p.executed, p.accuracy]) },
        { name: "without exits", type: "scatter", symbol: "rect", symbolSize: 11, data: [[own.executed, own.accuracy]] }] });
}

function drawCard(run) {
  const r = run.record, a = r.accuracy, f = r.flops;
  const facts = { experiment: r.experiment, data: r.data, seed: r.seed, status: r.status,
    epochs: `${r.epochs.done ?? "–"} of ${r.epochs.planned ?? "–"}` + (r.ended_early ? `, ended by ${r.ended_early}` : ""),
    "test accuracy": percent(a.test), "best accuracy": a.best == null ? "–" : `${percent(a.best)} (epoch ${figure(a.best_epoch, 0)}, on ${r.selected_on})`,
    "FLOPs counted": figure(f.counted), "FLOPs executed": figure(f.executed), "dynamic blocks": r.dynamic_blocks ?? "–", paths: r.paths ?? "–",
    parameters: r.parameters ?? "–", "images/s": figure(r.images_per_second, 0), commit: String(r.git_commit ?? "–").slice(0, 10) + (r.git_changed ? " (changed)" : ""),
    torch: r.versions.torch ?? "–", lightning: r.versions.lightning ?? "–",
    ...(r.exits && { exits: `after blocks ${r.exits.after.join(", ")}; budget ${figure(r.exits.budget)} of the network's own FLOPs; without exits ${percent(r.exits.own_accuracy)} at ${figure(r.exits.own_executed)} of dense` }),
    command: r.command, folder: run.folder };
  $("card").replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const row = Object.assign(document.createElement("div"), { className: ["command", "folder", "exits"].includes(name) ? "wide" : "" });
    row.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
    return row;
  }));
  $("config").textContent = run.config;
  $("record").textContent = JSON.stringify(r, null, 2);
  const open = r.status !== "finished";
  $("unfinished").hidden = !open;
  $("unfinished").textContent = `This run is not finished: ${r.status}, ${r.epochs.done} of ${r.epochs.planned ?? "–"} epochs.` + (r.error ? ` ${r.error}` : "");
}

function show() {
  const run = runs[Number($("run").value)];
  for (const option of $("against").options) option.disabled = option.value === $("run").value; // not with itself
  if ($("against").value === $("run").value) $("against").value = "";
  const other = $("against").value === "" ? null : runs[Number($("against").value)];
  drawCard(run);
  drawFrontier();
  drawExits(run);
  const { exits } = run.record; // they are fitted without epochs: there is nothing to draw over them
  $("s-curves").hidden = $("block-epoch").parentElement.hidden = Boolean(exits);
  if (!exits) drawCurves(run, other);
  for (const section of document.querySelectorAll(".gated")) section.hidden = !run.gated || (!run.routes && (exits || section.classList.contains("routed")));
  if (!run.gated) return;
  $("class-block").parentElement.hidden = !run.routes;
  drawGates(run);
  if (!run.routes) return;
  drawRoutes(run);
  $("s-geometry").hidden = !run.routes.cir; // a gate of another paper looks at no CIR
  if (!run.routes.cir) return;
  const { blocks } = run.routes.cir;
  const block = Math.min(Number($("block").value || 0), blocks.length - 1);
  options("block", blocks.map((b, index) => [String(index), `block ${b}`]), String(block));
  drawBlock(run, block);
}

function options(id, pairs, chosen) {
  $(id).replaceChildren(...pairs.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
  $(id).value = chosen;
}

options("run", runs.map((run, k) => [String(k), run.name]), "0");
options("against", [["", "none"], ...runs.map((run, k) => [String(k), run.name])], "");
$("against-label").hidden = runs.length < 2;
for (const id of ["run", "against"]) $(id).addEventListener("change", show);
$("block").addEventListener("change", () => drawBlock(runs[Number($("run").value)], Number($("block").value)));
dark.addEventListener("change", show);
window.addEventListener("resize", () => Object.values(charts).forEach((chart) => chart.resize()));
show();
