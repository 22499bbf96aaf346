// A response in full: its turns, and its tokens coloured by their advantages.

import { element, number } from "./dom.js";

export function largestAdvantage(found) {
  const all = found.responses.flatMap((one) => one.branches.flat().flatMap((turn) => turn.pieces.map((piece) => Math.abs(piece[1] ?? 0))));
  return all.reduce((most, value) => Math.max(most, value), 1e-9);
}

export function responseOf(one, most) {
  const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${number(value)}`);
  const said = [parts.length > 1 ? parts.join(", ") : "", one.advantage === null ? "" : `advantage ${number(one.advantage, 3)}`,
    `${number(one.tokens)} tokens${one.cutOff ? ", cut off" : ""}`, one.version === null ? "" : `weights ${one.version}`];
  const branches = one.branches.flatMap((turns, i) => [
    one.branches.length > 1 ? element("h4", {}, `branch ${i + 1} of ${one.branches.length}`) : null,
    ...turns.map((turn) => turnOf(turn, most, turns.length > 1))]);
  return element("article", { class: "response" },
    element("h3", {}, `[${one.sample}] reward ${number(one.reward)}`),
    element("div", { class: "quiet" }, said.filter(Boolean).join("; ")),
    ...branches);
}

function turnOf(turn, most, several) {
  const said = [several ? turn.role : "", turn.reward ? `reward ${number(turn.reward)}` : "", turn.problem ? `wrong: ${turn.problem}` : ""];
  return element("div", { class: `turn ${turn.role === "assistant" ? "assistant" : ""}` },
    element("small", {}, said.filter(Boolean).join("; ")),
    element("pre", {}, ...turn.pieces.map((piece) => pieceOf(piece, most))));
}

function pieceOf([text, advantage], most) {
  if (advantage === null || advantage === 0) return text;
  const made = element("span", { title: `advantage ${number(advantage, 3)}` }, text);
  const share = (0.08 + 0.4 * Math.abs(advantage) / most).toFixed(3);
  made.style.backgroundColor = `rgba(var(${advantage > 0 ? "--good" : "--bad"}), ${share})`;
  return made;
}
