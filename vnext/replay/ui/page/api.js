// Questions to the server. An answer that says why there is none becomes an Error with that sentence.

export async function ask(name, values = {}) {
  const answer = await fetch(`api/${name}?${new URLSearchParams(values)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
