// What would make a plan fit: each answer with what it changes and costs.

import { bytes, element } from "./dom.js";

export function whatFits(found, base, put) {
  if (!found.answers.length) return [element("h2", {}, found.fits ? "It fits as it is: nothing to change" : "Nothing that was tried fits")];
  return [element("h2", {}, "What fits"), ...found.answers.map((answer) => answerOf(answer, base, put)),
    element("p", { class: "quiet" }, "For the settings as they were when this was asked.")];
}

function answerOf(answer, base, put) {
  const texts = new Map([...base, ...answer.changes.map((change) => [change.key, change.after])]);
  const peaks = Object.entries(answer.peaks).map(([name, size]) => `${bytes(size)} on a ${name}`).join(", ");
  return element("article", { class: "answer" },
    element("div", { class: "controls" }, element("h3", {}, answer.kind), element("span", { class: `verdict ${answer.verdict.split(" ")[0]}` }, answer.verdict),
      element("span", {}, `at most ${peaks}`),
      element("button", { type: "button", onclick: () => put(texts) }, "try it")),
    element("ul", {}, ...answer.changes.map((change) => element("li", {}, element("code", {}, `${change.key}: `), element("s", {}, change.before), ` ${change.after || "not set"}`))),
    element("p", { class: "quiet" }, answer.costs.join("; ")));
}
