// Turn a panel into the columns and lines that the charting library takes.

import { number } from "./dom.js";
import { colour } from "./palette.js";

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

function linesOf(panel, table, runs, place) {
  // Return a line for each metric, with the two ends of its interval if it has one.
  return panel.series.map((series, i) => ({
    label: runs.length > 1 ? `${runs[table.run]}${panel.series.length > 1 ? `, ${series.label}` : ""}` : series.label,
    colour: colour(runs.length > 1 ? table.run : i),
    dashed: runs.length > 1 && i > 0,
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
