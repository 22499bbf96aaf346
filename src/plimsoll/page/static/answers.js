// What would make a plan fit, or faster: each answer with its changes and costs.

import { bytes, element, number } from "./dom.js";

export function whatFits(advice, base, put) {
  const what = advice.fits ? "is faster, and fits too" : "fits";
  const title = element("h2", {}, advice.answers.length ? `What ${what}` : `Nothing that was tried ${what}`);
  return [title, ...advice.answers.map((answer) => answerOf(answer, base, put)),
    advice.answers.length ? element("p", { class: "quiet" }, "For the settings as they were when this was asked. The time of a step is estimated: good for ranking, not for timing.") : null];
}

function answerOf(answer, base, put) {
  const texts = new Map([...base, ...answer.changes.map((change) => [change.key, change.after])]);
  const peaks = Object.entries(answer.peaks).map(([name, size]) => `${bytes(size)} on a ${name}`).join(", ");
  return element("article", { class: "answer" },
    element("div", { class: "controls" }, element("h3", {}, answer.kind), element("span", { class: `verdict ${answer.verdict.split(" ")[0]}` }, answer.verdict),
      element("span", {}, `at most ${peaks}; ${number(answer.seconds, 2)} x the time of a step`),
      element("button", { type: "button", onclick: () => put(texts) }, "try it")),
    element("ul", {}, ...answer.changes.map((change) => element("li", {}, element("code", {}, `${change.key}: `), element("s", {}, change.before), ` ${change.after || "not set"}`))),
    element("p", { class: "quiet" }, answer.costs.join("; ")));
}
