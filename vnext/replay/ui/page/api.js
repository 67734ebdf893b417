// Questions to the server. An answer that says why there is none becomes an Error with that sentence; one that says that
// it takes an index, which is being made, is asked for again until it is there, and `waits.tell` is told how far that is.

const AGAIN_MS = 250;
export const waits = { tell: () => {} };

export async function ask(name, values = {}) {
  const answer = await fetch(`api/${name}?${new URLSearchParams(values)}`);
  const found = await answer.json();
  if (found.indexing) {
    waits.tell(...found.indexing);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    return ask(name, values).finally(() => waits.tell(1, 1));
  }
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
