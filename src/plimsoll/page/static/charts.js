// One panel: a figure with title, unit and legend, drawn by uPlot. Dragging zooms all figures.
// On the keyboard arrows move the cursor, + zooms in around it, and Escape shows the whole run.

import { element, fill, number } from "./dom.js";
import { faint, ink } from "./palette.js";
import { columnsOf, csvOf, lastAt, tablesOf, tickTexts } from "./chart_data.js";

const MARKED = 30; // a line with fewer points has marks
const HEIGHT = 190;
const [MARGIN, CHARACTER] = [44, 7]; // minimum pixels left of the axis; pixels of a digit

export function makeChart(onZoom) {
  const [title, unit, keys] = [element("h3"), element("div", { class: "unit" }), element("div", { class: "keys" })];
  const plot = element("div", { class: "plot" });
  const csv = element("a", { class: "csv", href: "#", onclick: () => { csv.href = URL.createObjectURL(new Blob([chart.csv()], { type: "text/csv" })); } }, "CSV");
  const figure = element("figure", { tabindex: 0 }, csv, title, unit, keys, plot);
  const chart = { figure, title, unit, keys, plot, onZoom, drawn: null, likeness: "", at: null, hidden: new Set(), csv: () => "" };
  figure.addEventListener("keydown", (event) => pressed(chart, event));
  return chart;
}

export function drawChart(chart, panel, view) {
  const drawn = { ...panel, tables: tablesOf(panel, view) };
  chart.figure.classList.toggle("empty", !drawn.tables.length);
  if (!drawn.tables.length) return;
  const drawing = columnsOf(drawn, view.runs, view.smoothing);
  chart.axis = view.axis === "x" ? "step" : view.axis;
  chart.csv = () => csvOf(drawing, chart.axis);
  chart.figure.querySelector(".csv").download = `${panel.title}.csv`;
  const step = chart.at === null ? null : chart.drawn?.data[0][chart.at]; // what is read goes on being read
  chart.lines = drawing.lines;
  chart.steps = view.steps;
  chart.title.textContent = panel.title;
  const means = Math.max(...panel.tables.map((table) => table.together ?? 1));
  chart.unit.textContent = [panel.unit, means > 1 ? `means of ${means} steps` : ""].filter(Boolean).join("; ");
  const width = chart.plot.clientWidth;
  if (!width) return; // inside something that is closed
  const likeness = JSON.stringify([width, view.range, view.theme, view.axis, view.log, [...chart.hidden], panel.band, drawing.lines.map((l) => [l.label, l.points < MARKED]), drawing.bands.length]);
  if (chart.drawn && chart.likeness === likeness) {
    chart.drawn.setData(drawing.data, false);
    rescale(chart.drawn, view.range, drawing.data[0]);
  } else {
    chart.drawn?.destroy();
    chart.drawn = new uPlot(options(chart, panel, drawing, view, width), drawing.data, chart.plot);
    chart.likeness = likeness;
  }
  const at = drawing.data[0].indexOf(step);
  legend(chart, at < 0 ? null : at);
  chart.figure.setAttribute("aria-label", `${panel.title}: ${chart.lines.map((line) => valueText(chart, line, null)).join(", ")}`);
}

function rescale(drawn, range, x) {
  const [min, max] = range ?? [x[0], x.at(-1)];
  drawn.setScale("x", { min, max });
}

function options(chart, panel, drawing, view, width) {
  const stroke = ink("quiet");
  const axis = { stroke, grid: { stroke: ink("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const series = [{}, ...drawing.data.slice(1).map(() => ({ width: 0, spanGaps: true, points: { show: false } }))];
  const isLog = view.log && !panel.stacked && drawing.data.slice(1).flat().every((value) => value === null || value === undefined || value > 0);
  for (const line of drawing.lines) {
    series[line.column] = seriesOf(panel, line);
    for (const column of [line.column, ...(line.interval ?? [])]) series[column].show = !chart.hidden.has(line.label);
  }
  return {
    width, height: HEIGHT, series,
    legend: { show: false },
    padding: [8, 24, 0, 0],
    cursor: { sync: { key: "step", scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: false, range: (u, min, max) => view.range ?? widened(panel, u.data[0], min, max) },
      y: isLog ? { distr: 3 } : { range: (u, min, max) => rangeOf(panel, min, max) } },
    axes: [{ ...axis, grid: { show: false }, size: 26, incrs: view.axis === "hours" ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11] },
      { ...axis, size: (u, texts) => Math.max(MARGIN, ...(texts ?? []).map((text) => 14 + CHARACTER * text.length)), values: (u, ticks) => (isLog ? ticks.map((tick) => (tick === null ? null : number(tick))) : tickTexts(ticks)) }],
    bands: drawing.bands.map((band) => ({ series: [band.columns[1], band.columns[0]], fill: faint(band.colour, 0.2) })),
    hooks: {
      drawClear: [(u) => panel.band && healthy(u, panel.band)],
      draw: [(u) => chart.lines.filter((line) => line.interval && line.points < MARKED && !chart.hidden.has(line.label)).forEach((line) => whiskers(u, line))],
      setCursor: [(u) => legend(chart, u.cursor.idx ?? null)],
      setSelect: [(u) => u.select.width > 4 && zoomTo(chart, u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"))],
    },
  };
}

function seriesOf(panel, line) {
  const paint = { stroke: line.colour, label: line.label };
  if (panel.stacked) return { ...paint, fill: line.colour, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [1, 60] }) };
  return { ...paint, width: 1.5, spanGaps: true, dash: line.dash,
    points: { show: line.points < MARKED, size: 5, fill: line.colour } };
}

function widened(panel, x, min, max) {
  // Widen the range so that a single step is visible, and the first and last column are whole.
  const half = panel.stacked && x.length > 1 ? (x[1] - x[0]) / 2 : min === max ? 0.5 : 0;
  return [min - half, max + half];
}

function rangeOf(panel, min, max) {
  if (min === null || (min === 0 && max === 0)) return [0, 1];
  if (panel.stacked || panel.fromZero) return [0, max * 1.08 || 1];
  const pad = (max - min) * 0.08 || Math.abs(max) * 0.1 || 1;
  return [min - pad, max + pad];
}

function healthy(u, [low, high]) {
  const { left, top, width, height } = u.bbox;
  const at = (value, otherwise) => value === null ? otherwise : Math.min(Math.max(u.valToPos(value, "y", true), top), top + height);
  const [above, below] = [at(high, top), at(low, top + height)];
  u.ctx.fillStyle = `rgba(${ink("good")}, .1)`;
  u.ctx.fillRect(left, above, width, below - above);
}

function whiskers(u, line) {
  // Draw the interval of each point as a whisker.
  const [low, high] = line.interval.map((column) => u.data[column]);
  const cap = 3 * uPlot.pxRatio;
  u.ctx.save();
  u.ctx.strokeStyle = line.colour;
  u.ctx.lineWidth = uPlot.pxRatio;
  u.ctx.beginPath();
  u.data[0].forEach((step, i) => {
    if (low[i] === null || low[i] === undefined || step < u.scales.x.min || step > u.scales.x.max) return;
    const [x, bottom, top] = [u.valToPos(step, "x", true), u.valToPos(low[i], "y", true), u.valToPos(high[i], "y", true)];
    for (const [from, to] of [[[x, bottom], [x, top]], [[x - cap, bottom], [x + cap, bottom]], [[x - cap, top], [x + cap, top]]]) {
      u.ctx.moveTo(...from);
      u.ctx.lineTo(...to);
    }
  });
  u.ctx.stroke();
  u.ctx.restore();
}

function valueText(chart, line, idx) {
  // Return the value at a step, or the last value before it with its step.
  const [steps, column] = [chart.drawn?.data[0] ?? [], line.values ?? chart.drawn?.data[line.column] ?? []];
  const last = lastAt(column, idx ?? steps.length - 1);
  if (last < 0) return `${line.label} –`;
  const now = idx === null ? (chart.axis === "step" ? chart.steps[line.run] : steps[last]) : steps[idx];
  return `${line.label} ${number(column[last])}${steps[last] < now ? ` (${chart.axis} ${number(steps[last])})` : ""}`;
}

function legend(chart, idx) {
  // Show the values at the cursor, or the last values without a cursor.
  chart.at = idx;
  const step = idx === null ? null : chart.drawn?.data[0][idx];
  const entries = chart.lines.map((line) => {
    const mark = element("i", { class: line.dashed ? "dashed" : null });
    mark.style[line.dashed ? "color" : "background"] = line.colour;
    const isHidden = chart.hidden.has(line.label);
    return element("button", { type: "button", "aria-pressed": !isHidden, class: isHidden ? "off" : null, title: "show or hide this line",
      onclick: () => toggle(chart, line) }, mark, valueText(chart, line, idx));
  });
  fill(chart.keys, step === null || step === undefined ? null : element("span", {}, `${chart.axis} ${number(step)}`), ...entries);
}

function toggle(chart, line) {
  const show = chart.hidden.delete(line.label);
  if (!show) chart.hidden.add(line.label);
  for (const column of [line.column, ...(line.interval ?? [])]) chart.drawn.setSeries(column, { show });
  legend(chart, chart.at);
}

function zoomTo(chart, from, to) {
  chart.drawn.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  chart.onZoom(to > from ? [from, to] : null);
}

function pressed(chart, event) {
  const u = chart.drawn;
  if (!u) return;
  const x = u.data[0];
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (move) {
    const idx = Math.min(Math.max((chart.at ?? (move < 0 ? x.length : -1)) + move, 0), x.length - 1);
    u.setCursor({ left: u.valToPos(x[idx], "x"), top: 10 });
  } else if (event.key === "+" && chart.at !== null) {
    const quarter = (u.scales.x.max - u.scales.x.min) / 4;
    zoomTo(chart, x[chart.at] - quarter, x[chart.at] + quarter);
  } else if (event.key === "Escape") chart.onZoom(null);
  else return;
  event.preventDefault();
}
