// Answers of the server, or of the exported file, by address. The file has all its answers in one JSON element.

const embedded = document.getElementById("data");
const answers = embedded ? JSON.parse(embedded.textContent) : null;
const known = new Map();

export const exported = answers !== null;

/** No answer: `offline` if the server cannot be reached, else with its words. */
export class LoadError extends Error {
  constructor(message, offline = false) {
    super(message);
    this.offline = offline;
  }
}

/** Return the answer at an address, null if the exported file does not have it. Raises LoadError. */
export async function load(...address) {
  if (answers) return answers[address.join("/")] ?? null;
  const path = `data/${address.map(encodeURIComponent).join("/")}`;
  const before = known.get(path);
  const headers = before ? { "If-None-Match": before.tag } : {};
  const answer = await fetch(path, { headers, cache: "no-store" }).catch((error) => {
    throw new LoadError(error.message, true);
  });
  if (answer.status === 304) return before.value;
  const text = await answer.text();
  if (answer.status === 401) throw new LoadError(text);
  const value = parsed(text, answer.status);
  if (!answer.ok) throw new LoadError(value.error);
  if (known.size > 300) known.clear();
  known.set(path, { tag: answer.headers.get("ETag"), value });
  return value;
}

function parsed(text, status) {
  try {
    return JSON.parse(text);
  } catch {
    throw new LoadError(`the server answered ${status} without data: see its terminal`);
  }
}

/** Sample continuations at the end of a segment; return the tree with them. Raises LoadError. */
export async function growAt(name, step, number, segment, count) {
  const path = `data/${[name, "trees", step, number, "grow"].map(encodeURIComponent).join("/")}`;
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ segment, count }),
  })
    .catch((error) => {
      throw new LoadError(error.message, true);
    });
  const value = parsed(await answer.text(), answer.status);
  if (!answer.ok) throw new LoadError(value.error);
  return value;
}
