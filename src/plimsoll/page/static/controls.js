// The settings that can be changed: a field for each, in their groups.

import { element } from "./dom.js";

export function makeControls(found, changes, onchange) {
  // changes: texts by key, of the fields that differ from the config.
  const groups = new Map();
  for (const one of found) groups.set(one.group, [...(groups.get(one.group) ?? []), fieldOf(one, changes, onchange)]);
  return [...groups].map(([title, fields]) => element("fieldset", {}, element("legend", {}, title), ...fields));
}

function fieldOf(one, changes, onchange) {
  const text = changes.get(one.key) ?? one.value;
  const input = one.choices.length ? choiceOf(one, text) : element("input", { spellcheck: "false", autocomplete: "off", placeholder: "not set" });
  const row = element("div", { class: "field", title: `${one.key} (${one.kind}): ${one.doc}` });
  const mark = () => row.classList.toggle("changed", changes.has(one.key));
  const put = (value) => {
    input.value = value;
    if (value.trim() === one.value) changes.delete(one.key);
    else changes.set(one.key, value.trim());
    mark();
    onchange();
  };
  input.value = text;
  input.id = one.key;
  input.addEventListener("input", () => put(input.value));
  row.append(element("label", { for: one.key }, ...one.label.split(/(?<=[._])/).flatMap((text) => [text, element("wbr")])), element("span", {}, input, ...(one.choices.length ? [] : helpers(one, input, put))));
  mark();
  return row;
}

function choiceOf(one, text) {
  // What an address has, and is no choice, is shown all the same; the check refuses it.
  return element("select", {}, ...[...new Set([...one.choices, text])].map((name) => element("option", {}, name)));
}

function helpers(one, input, put) {
  const step = (up) => put(stepped(input.value, one.step, up));
  const button = (text, says, up) => element("button", { type: "button", tabindex: -1, "aria-label": `${says} ${one.key}`, onclick: () => step(up) }, text);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    step(event.key === "ArrowUp");
    event.preventDefault();
  });
  const buttons = [button(one.step ? "−" : "÷2", "lower", false), button(one.step ? "+" : "×2", "raise", true)];
  if (one.proposals.length) buttons.push(proposalsOf(one, input, put));
  return buttons;
}

function stepped(text, step, up) {
  if (step) return String(Math.round((Number(text) + (up ? step : -step)) * 100) / 100);
  return text.replace(/^\d+/, (digits) => String(up ? 2 * digits : Math.max(1, Math.floor(digits / 2))));
}

function proposalsOf(one, input, put) {
  // Of cards the kind is taken, and as many as there are.
  const list = element("select", { class: "proposals", "aria-label": `proposals for ${one.key}` },
    element("option", { value: "?", hidden: true }, ""), ...one.proposals.map((text) => element("option", { value: text }, text || "not set")));
  list.addEventListener("change", () => {
    const count = input.value.match(/^\d+(?=x)/);
    put(count ? list.value.replace(/^\d+(?=x)/, count[0]) : list.value);
    list.value = "?";
  });
  return list;
}
