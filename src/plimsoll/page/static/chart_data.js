// A panel as it is asked for, made into the columns and lines that the charting library takes.

import { number } from "./dom.js";
import { colour } from "./palette.js";

export function smoothed(values, share) {
  // An exponential mean, without its pull to 0 at the beginning (Adam's correction of bias).
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
  // A line for each metric; and behind each that has an interval, its two ends.
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
  // Whole, however small they are, and with as many digits as tell neighbours apart.
  const most = Math.max(...ticks.map(Math.abs));
  const apart = ticks.length > 1 && ticks[1] !== ticks[0] ? Math.ceil(Math.log10(most / Math.abs(ticks[1] - ticks[0]))) + 1 : 3;
  const digits = Math.min(Math.max(apart, 3), 12);
  return ticks.map((tick) => most < 1e-3 || Number.isInteger(tick) ? number(tick, digits) : String(Number(tick.toPrecision(digits))));
}

export function lastAt(column, idx) {
  // Where a column has its last value up to there; -1 where it has none.
  return column.slice(0, idx + 1).findLastIndex((value) => value !== null && value !== undefined);
}

export function columnsOf(panel, runs, smoothing) {
  // data: x and all columns; lines: what is drawn of them; bands: pairs of columns with colour.
  if (panel.stacked) {
    // The highest first: each is painted down to 0, over those before it.
    const [only] = panel.tables;
    const lines = panel.series.map((series, i) => ({ label: series.label, colour: colour(i),
      column: only.y.length - i, run: only.run, values: only.y[i], points: only.x.length }));
    return { data: [only.x, ...stackedUp(only.y).reverse()], lines, bands: [] };
  }
  const [tables, lines, bands] = [[], [], []];
  let place = 1;
  for (const one of panel.tables) {
    const found = linesOf(panel, one, runs, place);
    const own = [...(smoothing ? one.y.map((column) => smoothed(column, smoothing)) : one.y)];
    for (const line of found.filter((candidate) => candidate.ends)) {
      line.interval = [place + own.length, place + own.length + 1];
      bands.push({ columns: line.interval, colour: line.colour });
      own.push(...line.ends);
    }
    lines.push(...found);
    tables.push([one.x, ...own]);
    place += own.length;
  }
  return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], lines, bands };
}
