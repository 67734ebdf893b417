// The chat: a conversation that is kept for this tab, its messages on the page, and the answer that is coming.

import { stream } from "./api.js";
import { element, markdown } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = "conversation";
const chat = { messages: JSON.parse(sessionStorage.getItem(KEPT) || "[]"), images: [], stopping: null, fail: null };

export function begin(fail) {
  chat.fail = fail;
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    const text = byId("text").value;
    if (!(text.trim() || chat.images.length) || chat.stopping) return;
    byId("text").value = "";
    say({ role: "user", content: text, ...(chat.images.length && { images: chat.images }) });
    show([]);
  };
  byId("composer").ondragover = (event) => event.preventDefault();
  byId("composer").ondrop = (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
  byId("text").onpaste = (event) => attach(event.clipboardData.files);
  byId("text").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  };
  byId("stop").onclick = () => chat.stopping.abort();
  byId("new").onclick = () => change([]);
  byId("again").onclick = () => {
    const last = chat.messages.findLastIndex((each) => each.role !== "assistant");
    change(chat.messages.slice(0, last + 1));
    answer();
  };
  byId("settings").onsubmit = (event) => event.preventDefault();
  draw();
}

// Images that were dropped or pasted, for the next message.
function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => show([...chat.images, reader.result]);
    reader.readAsDataURL(file);
  }
}

function show(images) {
  chat.images = images;
  byId("images").replaceChildren(...images.map((url) => button("Leave it out", () => show(chat.images.filter((each) => each !== url)), url)));
}

function change(messages) {
  if (chat.stopping) chat.stopping.abort();
  chat.messages = messages;
  draw();
}

function say(message) {
  change([...chat.messages, message]);
  answer();
}

// The body of the next request. Throws a sentence where a box holds no JSON.
function body() {
  const found = { model: byId("model").value, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (byId(name).value !== "") found[name] = Number(byId(name).value);
  if (byId("probabilities").checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  const tools = boxed("tools", "Tools");
  const schema = boxed("schema", "Schema of the answer");
  if (tools) found.tools = tools;
  if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  const system = byId("system").value.trim();
  found.messages = [...(system ? [{ role: "system", content: system }] : []), ...chat.messages.map(sent)];
  return found;
}

function boxed(id, label) {
  const text = byId(id).value.trim();
  try {
    return text ? JSON.parse(text) : null;
  } catch (error) {
    throw new Error(`${label}: this is no JSON (${error.message})`);
  }
}

// What the server gets of a message: not the page's own notes.
function sent({ role, content: text, images, tool_calls, tool_call_id }) {
  const parts = (images || []).map((url) => ({ type: "image_url", image_url: { url } }));
  const content = parts.length ? [...parts, ...(text.trim() ? [{ type: "text", text }] : [])] : text;
  return { role, content, ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id }) };
}

async function answer() {
  chat.fail(null);
  const stopping = new AbortController();
  const message = { role: "assistant", content: "", reasoning: "", tokens: [], note: "" };
  try {
    const asked = body();
    chat.messages.push(message);
    chat.stopping = stopping;
    draw();
    const began = performance.now();
    await stream(asked, stopping.signal, (chunk) => take(message, chunk, began));
  } catch (error) {
    if (error.name === "AbortError") message.note ||= "stopped";
    else chat.fail(error);
  }
  if (!message.content && !message.reasoning && !message.tool_calls) chat.messages = chat.messages.filter((each) => each !== message);
  if (chat.stopping === stopping) chat.stopping = null;
  draw();
}

function take(message, chunk, began) {
  const { delta = {}, logprobs } = chunk.choices?.[0] || {};
  if (delta.content || delta.reasoning_content || delta.tool_calls) message.first ??= performance.now() - began;
  message.content += delta.content || "";
  message.reasoning += delta.reasoning_content || "";
  for (const call of delta.tool_calls || []) called(message, call);
  for (const token of logprobs?.content || []) message.tokens.push(token);
  if (chunk.usage) message.note = noteOf(chunk.usage, message.first, performance.now() - began);
  drawOne(message);
}

function called(message, { index, id, function: what }) {
  const calls = (message.tool_calls ??= []);
  calls[index] ??= { id, type: "function", function: { name: what.name, arguments: "" } };
  calls[index].function.arguments += what.arguments || "";
}

function noteOf(usage, first, all) {
  const kept = usage.prompt_tokens_details?.cached_tokens || 0;
  const rate = all > first && usage.completion_tokens > 1 ? `, ${Math.round(((usage.completion_tokens - 1) * 1000) / (all - first))} tokens/s` : "";
  const begun = first === undefined ? "" : `, the first after ${Math.round(first)} ms`;
  return `${usage.prompt_tokens} tokens in (${kept} from the cache), ${usage.completion_tokens} out${begun}${rate}`;
}

function draw() {
  keep();
  byId("messages").replaceChildren(...chat.messages.map(shown));
  const busy = chat.stopping !== null;
  byId("stop").hidden = !busy;
  byId("send").hidden = busy;
  byId("again").disabled = busy || !chat.messages.length;
  byId("messages").setAttribute("aria-busy", busy);
  follow();
}

// For a reload. What is longer than a browser keeps lasts as long as the page.
function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(chat.messages));
  } catch {
    sessionStorage.removeItem(KEPT);
  }
}

// A chunk changes the last message only.
function drawOne(message) {
  if (chat.messages.at(-1) !== message) return;
  const near = isNearEnd();
  byId("messages").lastElementChild.replaceWith(shown(message));
  if (near) follow();
}

function isNearEnd() {
  const box = byId("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function follow() {
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

function shown(message) {
  const made = element("article", message.role);
  made.append(element("h2", "", { user: "You", assistant: "Model", tool: "Result of the tool" }[message.role]));
  if (message.reasoning) made.append(folded(message.reasoning));
  if (message.tokens?.length && message.role === "assistant") made.append(probabilities(message.tokens));
  else if (message.role === "assistant") made.append(markdown(message.content));
  else made.append(...(message.images || []).map(picture), element("p", "plain", message.content));
  for (const call of message.tool_calls || []) made.append(callOf(call));
  if (message.note) made.append(element("p", "note", message.note));
  if (message.role === "user") made.append(button("Edit", () => edit(made, message)));
  return made;
}

function folded(text) {
  const made = element("details", "reasoning");
  made.append(element("summary", "", "Reasoning"), element("p", "plain", text));
  return made;
}

// Each token on a ground that is the stronger the less sure the model was; the likeliest ones as its hint.
function probabilities(tokens) {
  const made = element("p", "plain tokens");
  for (const token of tokens) {
    const share = Math.exp(token.logprob);
    const one = element("span", `sure-${Math.min(4, Math.floor(share * 5))}`, token.token);
    one.title = token.top_logprobs.map((each) => `${(100 * Math.exp(each.logprob)).toFixed(1)} %  ${JSON.stringify(each.token)}`).join("\n");
    made.append(one);
  }
  return made;
}

function callOf(call) {
  const made = element("form", "call");
  made.append(element("code", "", `${call.function.name}(${call.function.arguments})`));
  if (chat.stopping || chat.messages.some((each) => each.tool_call_id === call.id)) return made;
  const result = element("input");
  result.setAttribute("aria-label", `Result of ${call.function.name}`);
  result.placeholder = "its result";
  made.append(result, element("button", "", "Send the result"));
  made.onsubmit = (event) => {
    event.preventDefault();
    say({ role: "tool", tool_call_id: call.id, content: result.value });
  };
  return made;
}

function picture(url) {
  const made = element("img");
  made.src = url;
  made.alt = "An image that you show";
  return made;
}

function button(text, work, url) {
  const made = element("button", "quiet", text);
  if (url) made.prepend(picture(url));
  made.type = "button";
  made.onclick = work;
  return made;
}

function edit(article, message) {
  const box = element("textarea");
  box.value = message.content;
  box.setAttribute("aria-label", "Your message, changed");
  const send = () => {
    change(chat.messages.slice(0, chat.messages.indexOf(message)));
    say({ ...message, content: box.value });
  };
  article.replaceChildren(box, button("Send", send), button("Cancel", draw));
  box.focus();
}
