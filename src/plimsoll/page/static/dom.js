// Elements, and numbers as text. Texts only become text nodes: what a run wrote is never markup.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function fill(box, ...children) {
  box.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const rounded = Number(value.toPrecision(digits));
  return Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  return value >= 1e9 ? `${number(value / 1e9, 3)} GB` : `${number(value / 1e6, 3)} MB`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (value) => String(value).padStart(2, "0");
  return `${hours}:${two(minutes)}:${two(whole % 60)}`;
}

export function table(name, head, rows) {
  const cell = (tag, { text, numeric, small }) =>
    element(tag, { class: numeric ? "number" : null }, text, small ? element("br") : null,
      small ? element("small", {}, small) : null);
  const body = rows.map((row) =>
    element("tr", { class: row.differs ? "differs" : null }, ...row.cells.map((content) => cell("td", content))));
  return element("div", { class: "wide" },
    element("table", { class: name },
      element("thead", {}, element("tr", {}, ...head.map((content) => cell("th", content)))),
      element("tbody", {}, ...body)));
}
