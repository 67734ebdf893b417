// One log on the page: its time line, lanes, blocks and tables, all at one step.

import { ask } from "./api.js";
import { Blocks, ITEMS } from "./blocks.js";
import { Lanes } from "./lanes.js";
import * as life from "./life.js";
import { cell, head, hue, legend, paintLegend, reason } from "./paint.js";
import * as part from "./part.js";
import { list, summary } from "./slowest.js";
import { Timeline } from "./timeline.js";

export class Panel {
  // `safely` wraps what may fail.
  constructor(number, about, go, safely) {
    this.number = number;
    this.about = about;
    this.section = document.getElementById("log").content.firstElementChild.cloneNode(true);
    document.getElementById("logs").append(this.section);
    this.part("h2").textContent = `${about.name} · ${about.model}`;
    legend(this.part(".block-legend"), ITEMS);
    this.timeline = new Timeline(this.part("canvas.line"), number, about, go, safely((first, last) => this.tell(first, last)));
    this.lanes = new Lanes(this.part("canvas.lanes"), this.part(".lane-hint"), this.part(".lane-legend"), number, about, go);
    this.blocks = new Blocks(this.part("canvas.blocks"), this.part(".block-hint"));
    this.life = this.lanes.life = safely((id) => life.show(number, id, go));
    this.wants = () => true;
    this.found = null;
    this.asked = 0;
    this.go = go;
    this.part(".slowest").hidden = about.live !== null;
  }

  part(selector) {
    return this.section.querySelector(selector);
  }

  async start() {
    await this.timeline.load();
    await this.grow();
  }

  // What happened in these steps.
  tell(first, last) {
    this.timeline.mark([first, last]);
    const place = this.part(".part");
    return part.tell(place, this.number, first, last, () => {
      place.hidden = true;
      this.timeline.mark(null);
    });
  }

  // Show only requests that are wanted, by their number, name or client.
  filter(wants) {
    this.wants = wants;
    this.lanes.filter(wants);
    if (!this.found) return;
    this.rows();
    this.queue();
  }

  // What was slowest in this log, each a way to its step.
  async slowest() {
    const found = await ask("slow", { log: this.number });
    this.part(".slowest summary").textContent = summary(found);
    this.part(".slowest .columns").replaceChildren(...list(found, this.go));
    return found;
  }

  // The overview is made in the background when a log is opened for the first time.
  async grow() {
    const { overview, ended, first_step: first, last_step: last } = this.about;
    if (this.about.live) return;
    const progress = this.part(".progress");
    progress.hidden = overview.done && !overview.broken && ended === "complete";
    progress.classList.toggle("damaged", overview.done);
    progress.textContent = `reading the log: ${overview.steps} of ${last - first + 1} steps`;
    if (overview.done) progress.textContent = ended === "complete" ? overview.broken : `ended: ${ended}`;
    if (overview.done) return;
    await new Promise((resolve) => setTimeout(resolve, 400));
    this.about.overview = (await ask("logs")).logs[this.number].overview;
    await this.timeline.load();
    return this.grow();
  }

  // A running engine's log has more steps now, and may have dropped old ones.
  async extend(about) {
    const news = about.last_step !== this.about.last_step || about.first_step !== this.about.first_step;
    this.about = this.lanes.about = about;
    if (news) await this.timeline.grow(about);
  }

  async show(step) {
    const latest = ++this.asked;
    const here = Math.max(this.about.first_step, Math.min(this.about.last_step, step));
    this.timeline.show(here);
    const found = await ask("step", { log: this.number, step: here });
    if (latest !== this.asked) return;
    this.found = found;
    this.wanted = step;
    this.facts();
    this.rows();
    this.queue();
    this.since();
    this.blocks.show(found.blocks);
    this.section.dataset.step = here;
    await this.lanes.show(here);
  }

  facts() {
    const { found, about } = this;
    const facts = [
      [`${found.tokens}`, `tokens of ${found.budget}`],
      [`${found.rows.length}`, "running in this step"],
      [`${found.queue.length}`, "waiting in this step"],
      [`${found.in_flight}`, "steps in flight"],
      [`${found.counters.prefix_hit_tokens}`, `of ${found.counters.prefix_queried_tokens} tokens found in the cache`],
      [`${found.counters.preempted}`, "preempted so far"],
      [`event ${found.event}`, `digest ${found.digest}`],
    ];
    const place = this.part(".facts");
    place.replaceChildren(
      ...facts.map(([value, name]) => {
        const fact = document.createElement("div");
        const bold = document.createElement("b");
        const soft = document.createElement("span");
        bold.textContent = value;
        soft.textContent = ` ${name}`;
        fact.append(bold, soft);
        return fact;
      }),
    );
    if (found.preempted.length) this.alarm(`preempted in this step: request ${found.preempted.join(", ")}`);
    if (this.wanted !== found.step) this.alarm(`this log has no step ${this.wanted}: the nearest step is shown`);
    this.part("h2").textContent = `${about.name} · ${about.model} · step ${found.step}`;
  }

  alarm(words) {
    const alarm = document.createElement("div");
    alarm.className = "alarm";
    alarm.textContent = words;
    this.part(".facts").append(alarm);
  }

  rows() {
    const body = head(this.part("table.rows"), ["request", "prompt", "known", "computes", "blocks", "limit", ""]);
    const rows = this.found.rows.filter(this.wants);
    if (!rows.length) cell(body.insertRow(), "none").colSpan = 7;
    for (const row of rows) {
      const line = body.insertRow();
      const name = this.request(line, row.id);
      const box = document.createElement("i");
      box.style.setProperty("background", hue(row.id));
      name.prepend(box);
      named(name, row.name);
      cell(line, row.prompt);
      cell(line, row.known);
      cell(line, row.count ? `${row.start} to ${row.start + row.count - 1}${row.samples ? " +" : ""}` : "-");
      cell(line, row.blocks);
      cell(line, row.limit);
      cell(line, reason(row.wait));
    }
  }

  // A cell with a request's number, which leads to its life.
  request(line, id) {
    const made = line.insertCell();
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = id;
    button.title = `the life of request ${id}`;
    button.onclick = () => this.life(id);
    made.append(button);
    return made;
  }

  queue() {
    const body = head(this.part("table.queue"), ["request", "tokens", "priority", "why it waits"]);
    const queue = this.found.queue.filter(this.wants);
    if (!queue.length) cell(body.insertRow(), "none").colSpan = 4;
    for (const entry of queue) {
      const line = body.insertRow();
      named(this.request(line, entry.id), entry.name);
      cell(line, entry.known);
      cell(line, entry.weight > 1 ? `${entry.priority}, weight ${entry.weight}` : entry.priority);
      cell(line, reason(entry.wait) || "it arrived after this step was decided");
    }
  }

  since() {
    this.part(".since").replaceChildren(
      ...this.found.since.map((event) => {
        const line = document.createElement("li");
        line.textContent = `${event.event}: ${event.line}`;
        return line;
      }),
    );
  }

  redraw() {
    this.timeline.draw();
    this.lanes.draw();
    this.blocks.draw();
    for (const place of this.section.querySelectorAll(".legend")) paintLegend(place);
    if (this.found) this.rows();
  }
}

function named(place, name) {
  const small = document.createElement("small");
  small.textContent = small.title = name;
  place.append(small);
}
