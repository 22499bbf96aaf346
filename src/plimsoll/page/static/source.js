// Where answers come from: the page itself where it is frozen, else its server.

const embedded = document.getElementById("data");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

export const live = answers === null;

export async function load(name, query = {}) {
  const words = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = words.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  const asked = text ? `${name}?${text}` : name;
  if (!live) return answers[asked] ?? null;
  const reply = await fetch(`data/${asked}`).catch(() => {
    throw new Error("The server does not answer any more: what is shown is of before.");
  });
  if (!reply.ok) throw new Error((await reply.json()).detail);
  return reply.json();
}
