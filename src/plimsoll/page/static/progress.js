// The progress of each run, and its health warnings.

import { duration, element, fill, number, table } from "./dom.js";

const FEW = 4; // from so many runs on, a table comes before the runs

export function drawProgress(box, runs) {
  if (runs.length < FEW) return fill(box, ...runs.map(card));
  const open = box.querySelector("details")?.open ?? false;
  fill(box, overview(runs), element("details", { open }, element("summary", {}, "each run"), ...runs.map(card)));
}

function overview(runs) {
  // Return a table with a line for each run: its state, step, last reward (or first figure) and age.
  const rows = runs.map((run) => {
    const [name, value] = Object.entries(run.headline)[0] ?? ["", ""];
    const age = run.writtenAgo === null ? "" : `${duration(run.writtenAgo)} ago`;
    return { cells: [{ text: run.name }, { text: run.state }, { text: number(run.step), small: run.steps ? `of ${number(run.steps)}` : "", numeric: true },
      { text: value, small: name, numeric: true }, { text: age, numeric: true }] };
  });
  return table("runs", ["run", "state", "step", "last", "written"].map((text, i) => ({ text, numeric: i > 1 })), rows);
}

function card(run) {
  const about = [run.job ? `plimsoll ${run.job}` : "config.yaml is not there or does not name its job", run.model ? `of ${run.model}` : ""];
  return element("section", { class: "run", "aria-label": run.name },
    element("h1", {}, run.name, element("span", { class: `state ${run.state.split(/[ :]/)[0]}` }, run.state)),
    element("div", { class: "quiet" }, about.filter(Boolean).join(" ")),
    run.problem ? element("p", { class: "problem", role: "alert" }, run.problem) : null,
    run.goOn ? element("p", { class: "quiet" }, run.goOn) : null,
    element("progress", { max: run.steps || 1, value: Math.min(run.step, run.steps || 1), "aria-label": "steps done" }),
    element("div", { class: "figures" }, ...when(run).map(figure)),
    element("div", { class: "figures" }, ...Object.entries(run.headline).map(figure)),
    run.heldOut ? element("div", { class: "figures" }, element("span", { class: "quiet" }, `held out, step ${number(run.heldOut.step)}:`), ...Object.entries(run.heldOut.figures).map(figure)) : null,
    ...run.warnings.map(warning));
}

function when(run) {
  const entries = [["step", run.steps ? `${number(run.step)} of ${number(run.steps)}` : number(run.step)]];
  if (run.secondsLeft !== null) entries.push(["left", duration(run.secondsLeft)]);
  if (run.phase) entries.push(["now", `${run.phase}, ${duration(run.phaseSeconds)}`]);
  if (run.secondsPerStep !== null) entries.push(["a step", `${number(run.secondsPerStep, 3)} s`]);
  entries.push(...speed(run.speed));
  entries.push(["so far", duration(run.seconds)]);
  if (run.state === "running" && run.writtenAgo !== null) entries.push(["last step", `${duration(run.writtenAgo)} ago`]);
  if (run.unread > 0) entries.push(["still to read", `${number(run.unread / 1e6, 3)} MB`]);
  return entries;
}

function speed({ tokens_per_second: tokens, mfu, gpu_busy: busy }) {
  // Means of the last steps: speed, share of the cards' peak, and share of time that cards are busy.
  const percent = (share) => `${number(100 * share, 2)} %`;
  return [["tokens/s", tokens === null ? null : number(Math.round(tokens))], ["of the cards' peak (MFU)", mfu === null ? null : percent(mfu)],
    ["cards busy", busy === null ? null : percent(busy)]].filter(([, text]) => text !== null);
}

function figure([name, value]) {
  return element("span", {}, `${name} `, element("b", {}, value));
}

function warning(item) {
  return element("details", { class: "warning" },
    element("summary", {}, item.text),
    element("p", {}, item.means), element("p", {}, `Try: ${item.attempt}`));
}
