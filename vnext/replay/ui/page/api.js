// Questions to the server. An error answer becomes an Error with its sentence. If the answer needs an index that is
// being built, the question is repeated until it is there, and `waits.tell` gets the progress.

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
