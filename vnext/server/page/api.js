// The server, asked from the page that it serves: JSON, figures, and an answer as a stream that survives a cut connection.

const TRIES = 8;
const WAIT_MS = 500;
const memory = { key: sessionStorage.getItem("key") || "" };

export function setKey(key) {
  memory.key = key;
  sessionStorage.setItem("key", key);
}

function headers(more = {}) {
  return memory.key ? { ...more, Authorization: `Bearer ${memory.key}` } : more;
}

// The server's own sentence where it refuses.
async function checked(response) {
  if (response.ok) return response;
  const body = await response.text();
  let sentence = body;
  try {
    sentence = JSON.parse(body).error.message;
  } catch { /* no error object: another program answered */ }
  throw new Error(sentence || `the server answers with status ${response.status}`);
}

// An answer of any path, a refusal as an error with its sentence where `asError`.
export async function ask(path, { method = "GET", body } = {}, asError = true) {
  const type = typeof body === "string" ? { "Content-Type": "application/json" } : {};
  const response = await fetch(path, { method, headers: headers(type), body });
  return asError ? checked(response) : response;
}

export async function models() {
  return (await (await ask("v1/models")).json()).data.map((each) => each.id);
}

export async function figures() {
  return (await ask("metrics")).text();
}

// Calls `take` with each chunk. Where the connection breaks, the same request goes on behind the last event that came.
export async function stream(body, signal, take) {
  const place = { id: "", ended: false };
  for (let failed = 0; !place.ended;) {
    const before = place.id;
    try {
      await attempt(body, signal, take, place);
    } catch (error) {
      failed = place.id === before ? failed + 1 : 1;
      if (!(error instanceof TypeError) || !place.id || failed > TRIES) throw error;
      await new Promise((done) => setTimeout(done, WAIT_MS * failed));
      if (signal.aborted) throw new DOMException("stopped", "AbortError");
    }
  }
}

async function attempt(body, signal, take, place) {
  const more = { Accept: "text/event-stream", "Content-Type": "application/json", ...(place.id && { "Last-Event-ID": place.id }) };
  const asked = { method: "POST", headers: headers(more), body: JSON.stringify(body), signal };
  const response = await checked(await fetch("v1/chat/completions", asked));
  if (response.status === 204) place.ended = true; // all of it has come
  if (place.ended) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) read(event, take, place);
    if (place.ended) return;
  }
  throw new TypeError("the connection ended before the answer did");
}

function read(event, take, place) {
  const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]));
  if (fields.data === "[DONE]") place.ended = true;
  else if (fields.data) {
    const chunk = JSON.parse(fields.data);
    if (chunk.error) throw new Error(chunk.error.message);
    take(chunk);
  }
  if (fields.id) place.id = fields.id;
}
