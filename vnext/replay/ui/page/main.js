// The page: which step is shown, chosen by keys, buttons, the time line or the address. The address holds the step, so
// it can be shared.

import { ask, waits } from "./api.js";
import { Live } from "./live.js";
import { Panel } from "./panel.js";

const page = { step: 0, panels: [], first: 0, last: 0, live: null, begin: null, byTime: false };
const byId = (id) => document.getElementById(id);

function fail(error) {
  byId("error").hidden = !error;
  byId("error").textContent = error ? error.message : "";
}

const safely = (work) => (...values) => Promise.resolve().then(() => work(...values)).catch(fail);

// `along`: go to the newest step, whatever its number, instead of this one.
const go = safely(async (step, along = false) => {
  fail(null);
  if (page.live) page.live.press(along);
  page.step = Math.max(page.first, Math.min(page.last, step));
  where();
  if (page.last < page.first) return;
  history.replaceState(null, "", along ? "#live" : `#step=${page.step}`);
  const steps = page.byTime ? (await ask("aligned", { step: page.step })).steps : page.panels.map(() => page.step);
  await Promise.all(page.panels.map((panel, number) => panel.show(steps[number])));
  if (page.panels.length === 2) compare();
});

// The first look into a part of a log builds its index. The progress is shown, and the page stays usable.
waits.tell = (done, total) => {
  byId("indexing").hidden = done >= total;
  byId("indexing").textContent = `indexing this part of the log, once: ${Math.floor((100 * done) / Math.max(1, total))} %`;
};

function where() {
  byId("where").textContent = page.last < page.first ? "no step yet" : `step ${page.step} of ${page.last}`;
}

function compare() {
  const [one, other] = page.panels.map((panel) => panel.found && panel.found.digest);
  for (const panel of page.panels) panel.section.classList.toggle("different", !page.byTime && one !== other);
}

async function find(values) {
  const found = await ask("find", { log: 0, ...values });
  if (found.step === null) throw new Error("there is none in this direction");
  return go(found.step);
}

const jump = safely(async (text) => {
  const found = /^\s*(step|event|request|req)?\s*(\d+)\s*$/.exec(text);
  if (!found) return called(text);
  const [, kind, number] = found;
  if (!kind || kind === "step") return visit(Number(number));
  return find({ [kind === "event" ? "event" : "request"]: number });
});

// A time of day, or a request by its name or a part of it, or by its client.
async function called(text) {
  if (!page.panels[0].found) await go(page.first);
  const found = await ask("find", { log: 0, text });
  if (found.step === null) throw new Error(`"${text}" is no place: ${found.why}`);
  return go(found.step);
}

// A step that the user named. It may not exist; then a message says so beside the step shown instead.
async function visit(step) {
  await go(step);
  if (page.last < page.first || (page.first <= step && step <= page.last)) return;
  fail(new Error(`step ${step} is not in this log, which has steps ${page.first} to ${page.last}: step ${page.step} is shown`));
}

// Show only requests whose number is the text, or whose name or client has it.
function filter(text) {
  const wanted = text.trim().toLowerCase();
  const has = (each) => each.name.toLowerCase().includes(wanted) || each.client.startsWith(wanted) || String(each.id) === wanted;
  for (const panel of page.panels) panel.filter(wanted ? has : () => true);
}

// The keyboard's way to mark steps.
function begin() {
  page.begin = page.step;
  for (const panel of page.panels) panel.timeline.mark([page.step, page.step]);
}

const end = safely(() => {
  const ends = [page.begin ?? page.first, page.step];
  return Promise.all(page.panels.map((panel) => panel.tell(Math.min(...ends), Math.max(...ends))));
});

const difference = safely(async () => {
  if (page.panels.length < 2) throw new Error("only one log is open: open a second one to compare");
  const found = await ask("difference");
  if (found.step === null) throw new Error("the two logs do not differ");
  return go(found.step);
});

// Two logs at the same time since their beginning, or at the same step.
function align() {
  if (page.panels.length < 2) return fail(new Error("only one log is open: open a second one to compare"));
  page.byTime = !page.byTime;
  byId("align").setAttribute("aria-pressed", page.byTime);
  return go(page.step);
}

const zoom = safely((factor) => Promise.all(page.panels.map((panel) => panel.timeline.zoom(factor))));

function theme(name) {
  document.documentElement.dataset.theme = name;
  for (const panel of page.panels) panel.redraw();
}

const otherTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

const KEYS = {
  ArrowLeft: (event) => go(page.step - (event.shiftKey ? 10 : 1)),
  ArrowRight: (event) => go(page.step + (event.shiftKey ? 10 : 1)),
  Home: () => go(page.first),
  End: () => go(page.last, page.live !== null && !page.live.button.disabled),
  f: () => page.live && !page.live.button.disabled && go(page.live.following ? page.step : page.last, !page.live.following),
  n: safely(() => find({ column: "preempted", step: page.step })),
  p: safely(() => find({ column: "preempted", step: page.step, back: 1 })),
  d: difference,
  a: align,
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  0: () => zoom(0),
  t: otherTheme,
  "/": () => byId("to").select(),
  "[": begin,
  "]": end,
  o: () => byId("filter").select(),
  "?": () => byId("keys").showModal(),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    const work = KEYS[event.key];
    if (!work || event.target.tagName === "INPUT" || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    work(event);
  });
  byId("first").onclick = KEYS.Home;
  byId("last").onclick = KEYS.End;
  byId("back").onclick = KEYS.ArrowLeft;
  byId("on").onclick = KEYS.ArrowRight;
  byId("follow").onclick = KEYS.f;
  byId("align").hidden = page.panels.length < 2;
  byId("align").onclick = align;
  byId("theme").onclick = otherTheme;
  byId("help").onclick = KEYS["?"];
  byId("jump").onsubmit = (event) => {
    event.preventDefault();
    byId("to").blur();
    jump(byId("to").value);
  };
  byId("filter").oninput = () => filter(byId("filter").value);
  byId("filtering").onsubmit = (event) => {
    event.preventDefault();
    byId("filter").blur();
  };
  window.addEventListener("resize", () => page.panels.forEach((panel) => panel.redraw()));
  window.addEventListener("hashchange", () => location.hash !== "#live" && jump(place()));
}

// The target in the address: #step=12, #event=40 or #request=3.
const place = () => decodeURIComponent(location.hash.slice(1)).replace("=", " ") || `step ${page.first}`;

// Without a place in the address the page opens at the slowest step, unless the user has gone elsewhere meanwhile.
async function worst(lists) {
  await go(page.first);
  const [{ steps }] = await Promise.all(lists.slice(0, 1));
  if (steps.length && page.step === page.first) return go(steps[0].step);
}

// A log that is opened for the first time is indexed first.
async function opened() {
  const found = await ask("logs");
  if (found.logs) return found.logs;
  const [done, total] = found.opening;
  byId("about").textContent = `indexing the log, once: ${Math.floor((100 * done) / Math.max(1, total))} %`;
  await new Promise((resolve) => setTimeout(resolve, 200));
  return opened();
}

// Take what a running engine's log has gained.
async function grown(about) {
  [page.first, page.last] = [about.first_step, about.last_step];
  summary([about]);
  await Promise.all(page.panels.map((panel) => panel.extend(about)));
  if (page.live.following && (page.last > page.step || !page.panels[0].found)) return go(page.last, true);
  if (page.step < page.first) return go(page.first);
  where();
}

function summary(logs) {
  const counts = logs.map((log) => `${log.last_request + 1} requests, ${log.last_event + 1} events`);
  byId("about").textContent = counts.join(" | ");
  byId("about").title = logs.map((log, number) => `${log.name}: ${counts[number]}`).join("\n");
}

async function start() {
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const logs = await opened();
  page.first = Math.min(...logs.map((log) => log.first_step));
  page.last = Math.max(...logs.map((log) => log.last_step));
  summary(logs);
  page.panels = logs.map((about, number) => new Panel(number, about, go, safely));
  if (logs[0].live) page.live = new Live(byId("live"), byId("more"), byId("follow"), safely(grown));
  listen();
  const growing = Promise.all(page.panels.map((panel) => panel.start()));
  const along = page.live !== null && ["", "#live"].includes(location.hash);
  const lists = page.panels.map((panel) => panel.slowest());
  await (along ? go(page.last, true) : location.hash ? jump(place()) : worst(lists));
  await growing;
  if (page.live) await page.live.run();
}

safely(start)();
