// The engine as it runs: /metrics once a second, as the parts of the machine with what each does now, and the times of answers.

import { figures } from "./api.js";
import { element } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const PERIOD_MS = 1000;
const POINTS = 120;
const engine = { before: null, lines: new Map(), timer: 0 };
const whole = (value) => Math.round(value).toLocaleString("en");
const share = (part, all) => (all ? `${((100 * part) / all).toFixed(1)} %` : "none yet");
const each = (value, unit, scale) => (Number.isFinite(value) ? `${(value * scale).toPrecision(3)} ${unit}` : "none yet");

// A part: its name, what its line draws, its figures from the totals `now` and the changes a second `rate`, and without which it is none.
const PARTS = [
  ["API server", ({ rate }) => rate.http_requests_total, ({ now, rate }) => [["requests/s", rate.http_requests_total.toFixed(1)], ["answered", whole(now.http_requests_total)]]],
  ["Queue", ({ now }) => now.num_requests_waiting, ({ now }) => [["waiting", whole(now.num_requests_waiting)], ["arrived", whole(now.requests_arrived_total)]]],
  ["Scheduler", ({ rate }) => rate.steps_total, ({ now, rate }) => [["steps/s", whole(rate.steps_total)], ["planning a step", each(rate.plan_seconds_total / rate.steps_total, "µs", 1e6)], ["preempted", whole(now.num_preemptions_total)]]],
  ["Batch", ({ now }) => now.num_requests_running, ({ now, rate }) => [["running", whole(now.num_requests_running)], ["tokens a step", each(rate.generation_tokens_total / rate.steps_total, "", 1)]]],
  ["Prefix cache", ({ rate }) => rate.prefix_cache_hits_total, ({ now }) => [["hits", share(now.prefix_cache_hits_total, now.prefix_cache_queries_total)], ["blocks kept", whole(now.blocks_kept)], ["pinned", whole(now.kv_pinned_blocks || 0)]]],
  ["Key-value blocks", ({ now }) => now.blocks_held, ({ now }) => [["held", `${whole(now.blocks_held)} of ${whole(now.blocks)}`], ["in use", share(now.blocks_held, now.blocks)]]],
  ["Recurrent states", ({ now }) => now.state_pages_held || 0, ({ now }) => [["held", `${whole(now.state_pages_held)} of ${whole(now.state_pages)}`], ["snapshots", whole(now.state_snapshots)]], "state_pages"],
  ["Ranks", ({ rate }) => rate.step_seconds_total / rate.steps_total || 0, ({ now, rate }) => [["a step", each(rate.step_seconds_total / rate.steps_total, "ms", 1e3)], ["digests equal", whole(now.digest_checks_total)], ["ring full", whole(now.ring_stalls_total)]]],
  ["Sampling", ({ rate }) => rate.generation_tokens_total, ({ now, rate }) => [["tokens/s", whole(rate.generation_tokens_total)], ["drafts kept", share(now.spec_decode_num_accepted_tokens_total, now.spec_decode_num_draft_tokens_total)]]],
  ["Log", ({ rate }) => rate.log_bytes, ({ now }) => [["size", now.log_bytes < 1e6 ? each(now.log_bytes, "kB", 1e-3) : each(now.log_bytes, "MB", 1e-6)], ["recoveries", whole(now.recoveries_total)], ["frames lost", whole(now.log_frames_lost_total)]]],
];
const TIMES = [["time_to_first_token_seconds", "Time to the first token"], ["inter_token_latency_seconds", "Time between tokens"], ["e2e_request_latency_seconds", "Time of a whole answer"]];

export function watch(isOn) {
  clearTimeout(engine.timer);
  if (isOn) look();
}

async function look() {
  const began = performance.now();
  try {
    const found = read(await figures());
    const isEngine = "steps_total" in found.now;
    if (isEngine) draw(found, began / 1000);
    say(isEngine ? "" : "A router answers here: each server behind it shows its own engine.");
  } catch (error) {
    say(`The server does not answer (${error.message}); these are its last figures.`);
  }
  engine.timer = setTimeout(look, PERIOD_MS);
}

function say(sentence) {
  byId("silent").hidden = !sentence;
  byId("silent").textContent = sentence;
}

// Prometheus' text form -> sums over labels, and the buckets of histograms.
export function read(text) {
  const now = {};
  const buckets = {};
  for (const line of text.split("\n")) {
    const found = /^vnext_(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const [, name, labels = "", value] = found;
    const edge = /(?:^|,)le="([^"]+)"/.exec(labels);
    const place = edge ? (buckets[name] ??= {}) : now;
    const key = edge ? edge[1] : name;
    place[key] = (place[key] || 0) + Number(value);
  }
  return { now, buckets };
}

function draw({ now, buckets }, at) {
  const { before } = engine;
  const seconds = before ? Math.max(0.1, at - before.at) : 1;
  const rate = Object.fromEntries(Object.entries(now).map(([name, value]) => [name, before ? (value - (before.now[name] ?? value)) / seconds : 0]));
  engine.before = { now, at };
  byId("parts").replaceChildren(...PARTS.filter(([, , , needs]) => !needs || needs in now).map((part) => shown(part, { now, rate })));
  byId("times").replaceChildren(...TIMES.map(([name, title]) => histogram(title, buckets[`${name}_bucket`] || {}, now[`${name}_sum`] / now[`${name}_count`])));
}

function shown([name, drawn, said], figures) {
  const points = engine.lines.get(name) || [];
  engine.lines.set(name, [...points, drawn(figures) || 0].slice(-POINTS));
  const made = element("section");
  const facts = element("dl");
  for (const [label, value] of said(figures)) facts.append(element("dt", "", label), element("dd", "", value));
  made.append(element("h2", "", name), line(name, engine.lines.get(name)), facts);
  return made;
}

function svg(name, values) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  return made;
}

function line(name, points) {
  const most = Math.max(...points) || 1;
  const along = points.map((value, index) => `${POINTS - points.length + index},${30 - (28 * value) / most}`);
  const made = svg("svg", { viewBox: `0 0 ${POINTS} 31`, preserveAspectRatio: "none", role: "img", "aria-label": `${name} over the last two minutes` });
  made.append(svg("polyline", { points: along.join(" ") }));
  return made;
}

function histogram(title, buckets, mean) {
  const edges = Object.keys(buckets).sort((one, other) => Number(one.replace("+Inf", "Infinity")) - Number(other.replace("+Inf", "Infinity")));
  const counts = edges.map((edge, index) => buckets[edge] - (index ? buckets[edges[index - 1]] : 0));
  const most = Math.max(...counts, 1);
  const made = element("section");
  const bars = svg("svg", { viewBox: `0 0 ${edges.length * 10} 60`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  counts.forEach((count, index) => {
    const bar = svg("rect", { x: index * 10 + 1, width: 8, y: 60 - (58 * count) / most, height: (58 * count) / most });
    const hint = svg("title", {});
    hint.textContent = `${whole(count)} up to ${edges[index]} s`;
    bar.append(hint);
    bars.append(bar);
  });
  made.append(element("h2", "", title), bars, element("p", "note", `mean ${each(mean, "ms", 1e3)}; buckets up to ${edges[0] || "?"} s ... ${edges.at(-2) || "?"} s and beyond`));
  return made;
}
