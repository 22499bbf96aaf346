// Turn a panel into the columns and lines that the charting library takes.

import { number } from "./dom.js";
import { colour } from "./palette.js";

const DASHES = [undefined, [5, 4], [2, 3], [9, 3, 2, 3], [12, 5]]; // of a run's first, second, ... line

export function smoothed(values, share) {
  // Return the exponential mean, corrected for its bias to 0 at the beginning as in Adam.
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

export function stackedUp(columns) {
  const tops = [];
  for (const column of columns) {
    const below = tops.at(-1);
    tops.push(column.map((value, i) => (value ?? 0) + (below ? below[i] : 0)));
  }
  return tops;
}

function meanOfSeeds(panel, tables) {
  // Return one table for runs that differ in their seed: means, and the range of the seeds as interval.
  if (tables.length < 2) return tables[0];
  const columns = panel.series.length;
  const [x, ...joined] = uPlot.join(tables.map((table) => [table.x, ...table.y]));
  const reduced = (reduce) => panel.series.map((_, i) => x.map((_, at) => {
    const values = tables.map((_, run) => joined[run * columns + i][at]).filter((value) => value !== null && value !== undefined);
    return values.length ? reduce(values) : null;
  }));
  return { run: tables[0].run, x, y: reduced((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: reduced((values) => Math.min(...values)), high: reduced((values) => Math.max(...values)), seeds: tables.length };
}

export function tablesOf(panel, view) {
  // Return the tables to draw: on the chosen axis, and one for all seeds of an experiment if that is chosen.
  const onAxis = panel.tables.filter((table) => table[view.axis]).map((table) => ({ ...table, x: table[view.axis] }));
  if (!view.grouped || panel.stacked) return onAxis;
  const groups = new Set(onAxis.map((table) => view.seeds[table.run]));
  return [...groups].map((group) => meanOfSeeds(panel, onAxis.filter((table) => view.seeds[table.run] === group)));
}

export function csvOf(drawing, axis) {
  // Return what is drawn as CSV: a column for each line, and for the ends of its interval.
  const columns = drawing.lines.flatMap((line) => [[line.label, line.values ?? drawing.data[line.column]],
    ...(line.interval ?? []).map((column, i) => [`${line.label}, ${["low", "high"][i]}`, drawing.data[column]])]);
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const rows = drawing.data[0].map((x, at) => [x, ...columns.map(([, values]) => values[at] ?? "")].join(","));
  return [[axis, ...columns.map(([name]) => name)].map(quoted).join(","), ...rows].join("\n") + "\n";
}

function linesOf(panel, table, runs, place) {
  // Return a line for each metric, with the two ends of its interval if it has one.
  return panel.series.map((series, i) => ({
    label: runs.length > 1 ? `${runs[table.run]}${table.seeds ? ` (${table.seeds} seeds)` : ""}${panel.series.length > 1 ? `, ${series.label}` : ""}` : series.label,
    colour: colour(runs.length > 1 ? table.run : i),
    dashed: runs.length > 1 && i > 0,
    dash: runs.length > 1 ? DASHES[i % DASHES.length] : DASHES[0],
    column: place + i,
    run: table.run,
    points: table.y[i].filter((value) => value !== null).length,
    ends: table.low?.[i] && table.high?.[i] ? [table.low[i], table.high[i]] : null,
  })).filter((line) => line.points > 0);
}

export function tickTexts(ticks) {
  // Return ticks as text, with as many digits as neighbours need to differ.
  const most = Math.max(...ticks.map(Math.abs));
  const apart = ticks.length > 1 && ticks[1] !== ticks[0] ? Math.ceil(Math.log10(most / Math.abs(ticks[1] - ticks[0]))) + 1 : 3;
  const digits = Math.min(Math.max(apart, 3), 12);
  return ticks.map((tick) => most < 1e-3 || Number.isInteger(tick) ? number(tick, digits) : String(Number(tick.toPrecision(digits))));
}

export function lastAt(column, idx) {
  // Return the position of a column's last value up to idx, or -1.
  return column.slice(0, idx + 1).findLastIndex((value) => value !== null && value !== undefined);
}

export function columnsOf(panel, runs, smoothing) {
  // Return data (x and all columns), lines (what is drawn), and bands (pairs of columns).
  if (panel.stacked) {
    // The highest is first: each is painted down to 0, over those before it.
    const [only] = panel.tables;
    const lines = panel.series.map((series, i) => ({ label: series.label, colour: colour(i),
      column: only.y.length - i, run: only.run, values: only.y[i], points: only.x.length }));
    return { data: [only.x, ...stackedUp(only.y).reverse()], lines, bands: [] };
  }
  const [tables, lines, bands] = [[], [], []];
  let place = 1;
  for (const table of panel.tables) {
    const runLines = linesOf(panel, table, runs, place);
    const columns = [...(smoothing ? table.y.map((column) => smoothed(column, smoothing)) : table.y)];
    for (const line of runLines.filter((candidate) => candidate.ends)) {
      line.interval = [place + columns.length, place + columns.length + 1];
      bands.push({ columns: line.interval, colour: line.colour });
      columns.push(...line.ends);
    }
    lines.push(...runLines);
    tables.push([table.x, ...columns]);
    place += columns.length;
  }
  return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], lines, bands };
}
