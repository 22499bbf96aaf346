// The source of data: the page itself if it is frozen, else its server.

const embedded = document.getElementById("data");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

export const live = answers === null;

export async function load(name, query = {}) {
  const words = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = words.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  const request = text ? `${name}?${text}` : name;
  if (!live) return answers[request] ?? null;
  const reply = await fetch(`data/${request}`).catch(() => {
    throw new Error("The server does not answer any more. The page shows its last data.");
  });
  if (!reply.ok) throw new Error((await reply.json()).detail);
  return reply.json();
}
