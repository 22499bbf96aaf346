// Okabe and Ito's colours, which people with colour blindness can tell apart; without yellow and
// black, so that they are visible on light and dark grounds.

const COLOURS = ["#2389CC", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"];

export function colour(place) {
  return COLOURS[place % COLOURS.length];
}

export function faint(hex, share) {
  const part = (start) => parseInt(hex.slice(start, start + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${share})`;
}

export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const given = new Map();

export function colourOf(name) {
  // Return the colour of a name, which is the same on the whole page.
  if (!given.has(name)) given.set(name, colour(given.size));
  return given.get(name);
}
