// What would make a plan fit, or be faster: each answer with what it changes and costs.

import { bytes, element, number } from "./dom.js";

export function whatFits(found, base, put) {
  const what = found.fits ? "is faster, and fits too" : "fits";
  const title = element("h2", {}, found.answers.length ? `What ${what}` : `Nothing that was tried ${what}`);
  return [title, ...found.answers.map((one) => answerOf(one, base, put)),
    found.answers.length ? element("p", { class: "quiet" }, "For the settings as they were when this was asked. The time of a step is estimated: good for ranking, not for timing.") : null];
}

function answerOf(one, base, put) {
  const texts = new Map([...base, ...one.changes.map((change) => [change.key, change.after])]);
  const peaks = Object.entries(one.peaks).map(([name, size]) => `${bytes(size)} on a ${name}`).join(", ");
  return element("article", { class: "answer" },
    element("div", { class: "controls" }, element("h3", {}, one.kind), element("span", { class: `verdict ${one.verdict.split(" ")[0]}` }, one.verdict),
      element("span", {}, `at most ${peaks}; ${number(one.seconds, 2)} x the time of a step`),
      element("button", { type: "button", onclick: () => put(texts) }, "try it")),
    element("ul", {}, ...one.changes.map((change) => element("li", {}, element("code", {}, `${change.key}: `), element("s", {}, change.before), ` ${change.after || "not set"}`))),
    element("p", { class: "quiet" }, one.costs.join("; ")));
}
