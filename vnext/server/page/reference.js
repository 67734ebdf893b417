// The API: every path of /openapi.json with the fields of its body, a body to change and send, and the answer as it comes.

import { ask } from "./api.js";
import { element } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const HELLO = [{ role: "user", content: "Hello" }];
const EXAMPLES = {
  "/v1/chat/completions": { messages: HELLO, max_tokens: 60 },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 60 },
  "/v1/messages": { messages: HELLO, max_tokens: 60 },
  "/v1/messages/count_tokens": { messages: HELLO },
  "/v1/responses": { input: "Hello", max_output_tokens: 60 },
  "/v1/responses/input_tokens": { input: "Hello" },
  "/v1/embeddings": { input: "Hello" },
  "/tokenize": { prompt: "Hello" },
  "/detokenize": { tokens: [1, 2, 3] },
  "/api/chat": { messages: HELLO, stream: false },
  "/api/generate": { prompt: "Hello", stream: false },
  "/v1/files": { purpose: "batch" },
};
const FORMS = ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/files"];

export async function list() {
  if (byId("routes").children.length) return;
  const document = await (await ask("openapi.json")).json();
  const sections = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => routeOf({ document, path, method: method.toUpperCase(), operation })),
  );
  byId("routes").replaceChildren(...sections);
  const errors = Object.entries(document.components.responses).map(([status, { description }]) => [status, description]);
  byId("statuses").replaceChildren(...errors.flatMap(([status, text]) => [element("dt", "", status), element("dd", "", text)]));
}

// Its inside is made when it is first opened.
function routeOf(route) {
  const made = element("details", "route");
  const head = element("summary");
  head.append(element("b", route.method.toLowerCase(), route.method), element("code", "", route.path), element("span", "note", route.operation.summary));
  made.append(head);
  made.ontoggle = () => {
    if (made.open && made.children.length === 1) made.append(tryOf(route), ...fieldsOf(route));
  };
  return made;
}

function schemaOf({ document, operation }) {
  return resolved(document, operation.requestBody?.content["application/json"]?.schema);
}

function resolved(document, schema) {
  return schema?.$ref ? document.components.schemas[nameOf(schema)] : schema;
}

function nameOf({ $ref }) {
  return $ref.split("/").pop();
}

// The table of the body, then those of the objects that it holds, each once.
function fieldsOf(route) {
  const body = schemaOf(route);
  const met = new Map(body?.properties ? [["", body]] : []); // grows while its tables are made
  const meet = (ref) => met.set(nameOf(ref), resolved(route.document, ref));
  return Array.from(met, ([name, schema]) => tableOf(schema, shortened(name), meet));
}

function tableOf({ properties = {}, required = [] }, caption, meet) {
  const made = element("table");
  if (caption) made.append(element("caption", "", caption));
  for (const [name, each] of Object.entries(properties)) {
    const row = made.insertRow();
    const kind = element("td", "", `${typeOf(each, meet)} `);
    kind.append(element("span", "note", required.includes(name) ? "required" : usual(each.default)));
    row.append(element("th", "", name), kind, element("td", "", each.description));
  }
  return made;
}

function shortened(name) {
  return name.split(".").pop();
}

function usual(value) {
  return value === undefined || value === null ? "" : `default ${JSON.stringify(value)}`;
}

// A type in words; `meet` gets every object that it names.
function typeOf(schema, meet) {
  if (schema.$ref) {
    meet(schema);
    return shortened(nameOf(schema));
  }
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.anyOf) return schema.anyOf.filter((each) => each.type !== "null").map((each) => typeOf(each, meet)).join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items, meet)}` : "list";
  return [schema.type || "any"].flat().join(" or ");
}

function tryOf(route) {
  const made = element("form", "try");
  const parts = (route.operation.parameters || []).map((each) => labelled(each.name, element("input")));
  const isForm = route.method === "POST" && FORMS.includes(route.path);
  const file = isForm && labelled("File", Object.assign(element("input"), { type: "file" }));
  const schema = schemaOf(route);
  const body = (isForm || schema) && labelled(isForm ? "Fields" : "Body", boxOf(example(route.path, schema || { properties: { model: {} } })));
  const answer = element("pre");
  answer.hidden = true;
  made.append(...[...parts, file, body].filter(Boolean), element("button", "", "Send"), answer);
  made.onsubmit = (event) => {
    event.preventDefault();
    const names = parts.map((each) => [each.firstChild.textContent, each.lastChild.value]);
    const path = names.reduce((found, [name, value]) => found.replace(`{${name}}`, encodeURIComponent(value)), route.path);
    const asked = () => ({ method: route.method, ...(body && { body: file ? formOf(body, file) : body.lastChild.value }) });
    send(answer, path.slice(1), asked);
  };
  return made;
}

function formOf(body, file) {
  const found = new FormData();
  for (const [name, value] of Object.entries(JSON.parse(body.lastChild.value))) found.append(name, value);
  for (const each of file.lastChild.files) found.append("file", each);
  return found;
}

function example(path, { properties = {}, required = [] }) {
  const model = properties.model && byId("model").value ? { model: byId("model").value } : {};
  return { ...model, ...(EXAMPLES[path] || Object.fromEntries(required.map((name) => [name, ""]))) };
}

function boxOf(value) {
  const text = JSON.stringify(value, null, 2);
  return Object.assign(element("textarea"), { value: text, rows: text.split("\n").length, spellcheck: false });
}

function labelled(text, box) {
  const made = element("label");
  made.append(element("span", "", text), box);
  return made;
}

async function send(answer, path, asked) {
  const began = performance.now();
  answer.hidden = false;
  answer.textContent = "";
  try {
    const response = await ask(path, asked(), false);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const head = `${response.status} ${response.statusText}`;
    let text = "";
    for (let step = await reader.read(); !step.done; step = await reader.read()) {
      text += step.value;
      answer.textContent = `${head}, ${Math.round(performance.now() - began)} ms\n\n${indented(text)}`;
    }
    if (!text) answer.textContent = `${head}, ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    answer.textContent = error.message;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // a stream, figures, or a part of an answer
  }
}
