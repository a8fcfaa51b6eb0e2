// SPDX-License-Identifier: Apache-2.0
// The page of `rl-insight-report html`: decodes the counts, draws what the controls ask for.
"use strict";

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");
const fixed = (value, digits = 3) => (Number.isFinite(value) ? value.toFixed(digits) : "-");
// plotly reads a little markup in labels; names are names
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const titled = (text) => ({ text: plain(text), font: { size: 15 }, x: 0, xref: "paper", xanchor: "left" });
const SMALL = { responsive: true, displayModeBar: false }; // zoom by dragging, back by a double click

async function inflated(id) {
  const binary = atob(byId(id).textContent);
  byId(id).remove();
  const bytes = Uint8Array.from(binary, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function startPlotly() {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await inflated("plotly"));
  document.head.append(script);
  if (!window.Plotly) throw new Error("the chart library did not start");
}

/** The rows of the page: labels by column, counts by row. */
class Loads {
  constructor(head, planes) {
    this.head = head;
    this.rows = head.rows;
    const num = head.num_cells;
    this.counts = new Float64Array(num);
    for (let plane = 0, weight = 1; plane < head.num_planes; plane++, weight *= 256) {
      for (let i = 0; i < num; i++) this.counts[i] += planes[plane * num + i] * weight;
    }
    this.series = []; // (role, phase), in the order of the roles
    this.start = [];
    this.byChoice = new Map();
    let offset = 0;
    const { role, phase, rank, step, held } = this.rows;
    role.forEach((r, n) => {
      let s = this.series.findIndex((one) => one.role === r && one.phase === phase[n]);
      if (s < 0) s = this.series.push({ role: r, phase: phase[n], ranks: new Set(), steps: new Set(), end: 0 }) - 1;
      const series = this.series[s];
      series.ranks.add(rank[n]);
      series.steps.add(step[n]);
      series.end = Math.max(series.end, this.rows.first[n] + held[n]);
      const key = `${s}/${rank[n]}/${step[n]}`;
      if (!this.byChoice.has(key)) this.byChoice.set(key, []);
      this.byChoice.get(key).push(n);
      this.start.push(offset);
      offset += held[n];
    });
    this.series.forEach((series, s) => {
      series.layers = [...new Set(role.flatMap((r, n) => (r === series.role && phase[n] === series.phase ? [this.rows.layer[n]] : [])))];
      series.layers.sort((a, b) => a - b);
      series.name = head.roles[series.role] + (head.phases[series.phase] === "forward" ? "" : ` (${head.phases[series.phase]})`);
      series.index = s;
    });
  }

  /** Tokens of each layer and expert: {layer: Float64Array [E]}, NaN where no chosen rank holds the expert. */
  fold(series, rank, steps) {
    const layers = new Map();
    for (const step of steps) {
      for (const n of this.byChoice.get(`${series.index}/${rank}/${step}`) ?? []) {
        const layer = this.rows.layer[n];
        if (!layers.has(layer)) layers.set(layer, new Float64Array(series.end).fill(NaN));
        const row = layers.get(layer);
        for (let i = 0, e = this.rows.first[n]; i < this.rows.held[n]; i++, e++) {
          row[e] = (Number.isNaN(row[e]) ? 0 : row[e]) + this.counts[this.start[n] + i];
        }
      }
    }
    return new Map([...layers].sort((a, b) => a[0] - b[0]));
  }

  /** Tokens of each device [D] of one layer, or null where nothing is known of devices. */
  onDevices(series, layer, row) {
    const devices = this.head.devices;
    if (!devices || row.some(Number.isNaN)) return null;
    const loads = new Float64Array(devices.num);
    if (devices.slots) {
      const slots = devices.slots[series.layers.indexOf(layer)];
      if (!slots) return null;
      const copies = new Map();
      for (const e of slots) copies.set(e, (copies.get(e) ?? 0) + 1);
      const perDevice = slots.length / devices.num;
      slots.forEach((e, i) => { loads[Math.floor(i / perDevice)] += row[e] / copies.get(e); });
    } else {
      const perDevice = series.end / devices.num;
      row.forEach((tokens, e) => { loads[Math.floor(e / perDevice)] += tokens; });
    }
    return loads;
  }
}

function judged(bins) {
  const known = [...bins].filter((value) => !Number.isNaN(value));
  const sum = known.reduce((a, b) => a + b, 0);
  const mean = sum / known.length;
  const max = known.reduce((a, b) => Math.max(a, b), 0);
  const std = Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / known.length);
  return {
    sum, mean, max,
    ratio: sum ? max / mean : NaN,
    cv: sum ? std / mean : NaN,
    dead: sum ? known.filter((value) => value === 0).length : NaN,
    hottest: bins.indexOf(max),
  };
}

function csvOf(rows) {
  const cell = (value) => {
    const text = Number.isNaN(value) ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\n").join("");
}

function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

class Page {
  constructor(loads) {
    this.loads = loads;
    this.head = loads.head;
    this.order = { column: this.head.devices ? "device max/mean" : "max/mean", down: true };
    this.sayVerdict();
    this.fill("role", loads.series.map((s) => [s.index, s.name]));
    const worst = loads.series.find((one) => this.head.verdict[0]?.role === this.head.roles[one.role]);
    if (worst) byId("role").value = worst.index;
    this.chooseRole();
    byId("role").onchange = () => { this.chooseRole(); this.draw(); };
    for (const id of ["rank", "layer", "normalize", "log", "sort", "all-steps"]) byId(id).onchange = () => this.draw();
    byId("step").oninput = () => { byId("all-steps").checked = false; this.draw(); };
    byId("csv-table").onclick = () => download("layers.csv", csvOf([this.columns, ...this.table.map((row) => this.columns.map((c) => row.values[c]))]));
    byId("csv-counts").onclick = () => download("counts.csv", csvOf(this.countRows()));
    byId("footer").textContent = `rl-insight-hooks ${this.head.version}; charts by plotly.js ${window.Plotly.version} (MIT licence)`;
  }

  sayVerdict() {
    const { title, verdict, notes } = this.head;
    byId("title").textContent = title;
    for (const role of verdict) {
      const item = document.createElement("li");
      const name = document.createElement("span");
      name.className = "role";
      name.textContent = role.role + (role.phase === "forward" ? "" : ` (${role.phase})`);
      item.append(name, `: ${role.text}`);
      const hot = role.hottest.map((h) => `layer ${h.layer} expert ${h.expert} ${h.over_mean.toFixed(1)}x`).join(", ");
      for (const more of [role.trend, hot && `hottest experts (tokens over the layer's mean): ${hot}`]) {
        if (!more) continue;
        const line = document.createElement("span");
        line.className = "more";
        line.textContent = more;
        item.append(line);
      }
      byId("verdict").append(item);
    }
    if (!notes.length) return;
    const box = byId("notes");
    box.hidden = false;
    box.querySelector("summary").textContent = `${notes.length} ${notes.length === 1 ? "note" : "notes"} about the data`;
    for (const note of notes) {
      const item = document.createElement("li");
      item.textContent = note;
      box.querySelector("ul").append(item);
    }
  }

  fill(id, options) {
    const select = byId(id);
    const before = select.value;
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    if (options.some(([value]) => String(value) === before)) select.value = before;
    select.disabled = options.length < 2;
  }

  chooseRole() {
    const { head } = this;
    this.series = this.loads.series[Number(byId("role").value)];
    const ranks = [...this.series.ranks].sort((a, b) => a - b);
    this.fill("rank", ranks.map((r) => [r, r < 0 ? "all, merged" : String(r)]));
    this.fill("layer", [[-1, "all"], ...this.series.layers.map((la) => [la, this.layerText(la)])]);
    this.steps = [...this.series.steps].sort((a, b) => a - b);
    const slider = byId("step");
    slider.max = this.steps.length - 1;
    slider.value = Math.min(Number(slider.value), this.steps.length - 1);
    slider.disabled = this.steps.length < 2;
    byId("all-steps").disabled = this.steps.length < 2;
    if (this.steps.length < 2) byId("all-steps").checked = true;
  }

  layerText(layer) {
    const { layers, layer_names: names } = this.head;
    const text = layers[layer] === null ? "unknown" : String(layers[layer]);
    return names[layer] === text ? text : `${text}: ${names[layer]}`;
  }

  layerShort(layer) {
    return this.head.layers[layer] === null ? "?" : String(this.head.layers[layer]);
  }

  stepText(step) {
    return this.head.steps[step] === null ? "no step" : `step ${this.head.steps[step]}`;
  }

  draw() {
    const all = byId("all-steps").checked;
    const step = this.steps[Number(byId("step").value)];
    const chosen = all ? this.steps : [step];
    const which = all ? (this.steps.length > 1 ? `${this.steps.length} steps` : this.stepText(step)) : this.stepText(step);
    byId("step-shown").textContent = which;
    this.rank = Number(byId("rank").value);
    this.layer = Number(byId("layer").value);
    this.folded = this.loads.fold(this.series, this.rank, chosen);
    this.what = `${this.series.name}, ${which}, ${this.rank < 0 ? "ranks merged" : `rank ${this.rank}`}`;
    byId("empty").hidden = this.folded.size > 0;
    this.drawHeatmap();
    this.drawDevices();
    this.drawTrend();
    this.fillTable();
  }

  drawHeatmap() {
    const layers = [...this.folded.keys()];
    const rows = [...this.folded.values()];
    let experts = [...Array(this.series.end).keys()];
    if (byId("sort").value === "load") {
      const total = experts.map((e) => rows.reduce((sum, row) => sum + (row[e] || 0), 0));
      experts.sort((a, b) => total[b] - total[a] || a - b);
    }
    const perRow = byId("normalize").value === "row";
    const log = byId("log").checked;
    const shown = (value, mean) => {
      if (Number.isNaN(value)) return null;
      const scaled = perRow ? (mean ? value / mean : 0) : value;
      return log ? Math.log10(scaled + 1) : scaled;
    };
    const z = [], details = [];
    let top = 0;
    for (const row of rows) {
      const { mean } = judged(row);
      z.push(experts.map((e) => shown(row[e], mean)));
      top = z.at(-1).reduce((a, b) => Math.max(a, b ?? 0), top);
      details.push(experts.map((e) => [number(row[e]), mean ? (row[e] / mean).toFixed(2) : "-", e]));
    }
    const unit = perRow ? "tokens /<br>layer's mean" : "tokens";
    const bar = { title: { text: log ? `${unit}<br>(log)` : unit } };
    if (log) {
      const ticks = [0, 1, 2, 5].concat(...[1, 2, 3, 4, 5, 6, 7, 8, 9].map((p) => [1, 2, 5].map((m) => m * 10 ** p)));
      const few = ticks.filter((t) => Math.log10(t + 1) <= top + 1e-9).filter((t) => top < 2.5 || /^[01]/.test(String(t)));
      bar.tickvals = few.map((t) => Math.log10(t + 1));
      bar.ticktext = few.map(number);
    }
    const idName = this.head.id_space === "logical" ? "expert" : `expert (${this.head.id_space})`;
    const marked = layers.indexOf(this.layer);
    const shapes = marked < 0 ? [] : [{
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: marked - 0.5, y1: marked + 0.5, line: { color: "#e07b00", width: 2 },
    }];
    const { clientWidth } = byId("heatmap");
    window.Plotly.react("heatmap", [{
      type: "heatmap", z, customdata: details, colorscale: "Viridis", colorbar: bar, zmin: 0, zmax: top || 1, hoverongaps: false,
      x: experts.map(String), y: layers.map((la) => this.layerShort(la)),
      hovertemplate: `layer %{y}, ${idName} %{customdata[2]}<br>%{customdata[0]} tokens, %{customdata[1]}x the mean<extra></extra>`,
    }], {
      title: titled(`Expert load: ${this.what}`),
      height: Math.min(1000, Math.max(300, 140 + 14 * rows.length)),
      margin: { l: 60, r: 20, t: 50, b: 50 }, shapes,
      xaxis: { title: { text: byId("sort").value === "load" ? `${idName}, most loaded first` : idName }, type: "category", nticks: Math.max(4, Math.min(32, Math.floor(clientWidth / 40))), tickangle: 0 },
      yaxis: { title: { text: "layer" }, type: "category", autorange: "reversed", nticks: 30 },
    }, { responsive: true, displaylogo: false, displayModeBar: clientWidth > 700 });
  }

  /** Bars of the devices (of the experts where no devices are known) of the chosen layer, or of all layers added up. */
  drawDevices() {
    const { devices } = this.head;
    const chosen = [...this.folded].filter(([layer]) => this.layer < 0 || layer === this.layer);
    const onDevices = chosen.map(([layer, row]) => this.loads.onDevices(this.series, layer, row));
    const known = chosen.length > 0 && onDevices.every((bins) => bins);
    const bins = known ? new Float64Array(devices.num) : new Float64Array(this.series.end);
    chosen.forEach(([, row], i) => (known ? onDevices[i] : row).forEach((value, b) => { bins[b] += value || 0; }));
    const { mean } = judged(bins);
    const where = this.layer < 0 ? "all layers added up" : `layer ${this.layerShort(this.layer)}`;
    const name = known ? "device" : "expert";
    const why = known ? `, ${devices.source}` : devices ? "; devices need all experts" : "; --num-devices or --map shows them";
    window.Plotly.react("devices", [{
      type: "bar", x: [...bins.keys()], y: [...bins], marker: { color: [...bins].map((value) => (value > mean * 1.0000001 ? "#e07b00" : "#3b76af")) },
      hovertemplate: `${name} %{x}: %{y:,.6~f} tokens<extra></extra>`,
    }], {
      title: titled(`Load of each ${name}: ${where}${why}`),
      height: 320, margin: { l: 70, r: 20, t: 50, b: 50 },
      xaxis: { title: { text: name }, ...(bins.length <= 16 ? { dtick: 1 } : {}) }, yaxis: { title: { text: "tokens" }, rangemode: "tozero" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: mean, y1: mean, line: { dash: "dash", color: "#1c2330", width: 1 } }],
      annotations: [{ xref: "paper", x: 1, y: mean, xanchor: "right", yanchor: "bottom", text: "mean", showarrow: false, bgcolor: "rgba(255,255,255,0.8)" }],
    }, SMALL);
  }

  /** max/mean of each layer and step: over devices where the experts of all rows are on known ones, else over experts. */
  drawTrend() {
    const lines = { mean: [], worst: [], one: [] };
    const byStep = this.steps.map((step) => this.loads.fold(this.series, this.rank, [step]));
    const known = byStep.every((folded) => [...folded].every(([layer, row]) => this.loads.onDevices(this.series, layer, row)));
    const ratioOf = (layer, row) => judged(known ? this.loads.onDevices(this.series, layer, row) : row).ratio;
    for (const folded of byStep) {
      const ratios = [...folded].map(([layer, row]) => ratioOf(layer, row)).filter(Number.isFinite);
      lines.mean.push(ratios.length ? ratios.reduce((a, b) => a + b, 0) / ratios.length : null);
      lines.worst.push(ratios.length ? Math.max(...ratios) : null);
      const row = folded.get(this.layer);
      const ratio = row ? ratioOf(this.layer, row) : NaN;
      lines.one.push(Number.isFinite(ratio) ? ratio : null);
    }
    const x = this.steps.map((s) => (this.head.steps[s] === null ? "no step" : this.head.steps[s]));
    const trace = (name, y, color) => ({ type: "scatter", mode: "lines+markers", name, x, y, line: { color }, hovertemplate: `step %{x}: %{y:.3f}<extra>${name}</extra>` });
    const traces = [trace("worst layer", lines.worst, "#e07b00"), trace("mean over layers", lines.mean, "#3b76af")];
    if (this.layer >= 0) traces.push(trace(`layer ${this.layerShort(this.layer)}`, lines.one, "#2f8f4e"));
    window.Plotly.react("trend", traces, {
      title: titled(`max / mean over ${known ? "devices" : "experts"}, step by step`),
      height: 320, margin: { l: 60, r: 150, t: 50, b: 50 },
      xaxis: { title: { text: "step" }, tickformat: "d", ...(x.length <= 12 ? { tickvals: x } : {}) }, yaxis: { title: { text: "max / mean" } },
    }, SMALL);
  }

  fillTable() {
    const withDevices = Boolean(this.head.devices);
    this.columns = ["layer", "name", "tokens", "max/mean", ...(withDevices ? ["device max/mean"] : []), "cv", "dead experts", "hottest expert", "its tokens"];
    this.table = [...this.folded].map(([layer, row]) => {
      const over = judged(row);
      const devices = this.loads.onDevices(this.series, layer, row);
      return {
        layer,
        values: {
          layer: this.head.layers[layer] ?? "unknown", name: this.head.layer_names[layer], tokens: over.sum, "max/mean": over.ratio,
          "device max/mean": devices ? judged(devices).ratio : NaN, cv: over.cv, "dead experts": over.dead,
          "hottest expert": over.sum ? over.hottest : NaN, "its tokens": over.max,
        },
      };
    });
    const { column, down } = this.order;
    const rank = (value) => (typeof value === "number" && Number.isNaN(value) ? -Infinity : value);
    this.table.sort((a, b) => {
      const [x, y] = [rank(a.values[column]), rank(b.values[column])];
      const way = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y), "en", { numeric: true }) : x - y || 0;
      return (down ? -way : way) || a.layer - b.layer;
    });
    byId("table-title").textContent = `Layers: ${this.what}`;
    byId("table").tHead.rows[0].replaceChildren(...this.columns.map((name) => {
      const head = document.createElement("th");
      head.ariaSort = name === column ? (down ? "descending" : "ascending") : "none";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name + (name === column ? (down ? " \u2193" : " \u2191") : "");
      button.onclick = () => {
        this.order = { column: name, down: name === column ? !down : !["layer", "name"].includes(name) };
        this.fillTable();
      };
      head.append(button);
      return head;
    }));
    const whole = ["tokens", "dead experts", "hottest expert", "its tokens"];
    const text = (name, value) => (typeof value === "string" || name === "layer" ? String(value) : whole.includes(name) ? (Number.isNaN(value) ? "-" : number(value)) : fixed(value));
    byId("table").tBodies[0].replaceChildren(...this.table.map((row) => {
      const line = document.createElement("tr");
      line.className = row.layer === this.layer ? "chosen" : "";
      line.append(...this.columns.map((name) => {
        const cell = document.createElement("td");
        cell.textContent = text(name, row.values[name]);
        return cell;
      }));
      line.onclick = () => { byId("layer").value = row.layer === this.layer ? -1 : row.layer; this.draw(); };
      return line;
    }));
  }

  countRows() {
    const rows = [["layer", "expert", "tokens"]];
    for (const [layer, row] of this.folded) {
      if (this.layer >= 0 && layer !== this.layer) continue;
      row.forEach((tokens, e) => { if (!Number.isNaN(tokens)) rows.push([this.head.layers[layer] ?? "unknown", e, tokens]); });
    }
    return rows;
  }
}

(async () => {
  try {
    if (!window.DecompressionStream) throw new Error("this browser is too old (it has no DecompressionStream)");
    await startPlotly();
    const page = new Page(new Loads(JSON.parse(byId("head").textContent), await inflated("counts")));
    page.draw();
    document.body.dataset.ready = "yes";
  } catch (error) {
    byId("failed").hidden = false;
    byId("failed").textContent = `The page could not be drawn: ${error.message}`;
    document.body.dataset.ready = "failed";
    throw error;
  }
})();
