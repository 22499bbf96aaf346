// A response in full: its turns, with tokens coloured by their advantages.

import { element, number } from "./dom.js";

export function largestAdvantage(group) {
  const all = group.responses.flatMap((response) => response.branches.flat().flatMap((turn) => turn.pieces.map((piece) => Math.abs(piece[1] ?? 0))));
  return all.reduce((most, value) => Math.max(most, value), 1e-9);
}

export function responseOf(response, most) {
  const parts = Object.entries(response.parts).map(([name, value]) => `${name} ${number(value)}`);
  const texts = [parts.length > 1 ? parts.join(", ") : "", response.advantage === null ? "" : `advantage ${number(response.advantage, 3)}`,
    `${number(response.tokens)} tokens${response.cutOff ? ", cut off" : ""}`, response.version === null ? "" : `weights ${response.version}`];
  const branches = response.branches.flatMap((turns, i) => [
    response.branches.length > 1 ? element("h4", {}, `branch ${i + 1} of ${response.branches.length}`) : null,
    ...turns.map((turn) => turnOf(turn, most, turns.length > 1))]);
  return element("article", { class: "response" },
    element("h3", {}, `[${response.sample}] reward ${number(response.reward)}`),
    element("div", { class: "quiet" }, texts.filter(Boolean).join("; ")),
    ...branches);
}

function turnOf(turn, most, several) {
  const texts = [several ? turn.role : "", turn.reward ? `reward ${number(turn.reward)}` : "", turn.problem ? `wrong: ${turn.problem}` : ""];
  return element("div", { class: `turn ${turn.role === "assistant" ? "assistant" : ""}` },
    element("small", {}, texts.filter(Boolean).join("; ")),
    element("pre", {}, ...turn.pieces.map((piece) => pieceOf(piece, most))));
}

function pieceOf([text, advantage], most) {
  if (advantage === null || advantage === 0) return text;
  const span = element("span", { title: `advantage ${number(advantage, 3)}` }, text);
  const share = (0.08 + 0.4 * Math.abs(advantage) / most).toFixed(3);
  span.style.backgroundColor = `rgba(var(${advantage > 0 ? "--good" : "--bad"}), ${share})`;
  return span;
}
