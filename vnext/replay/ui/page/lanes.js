// Request lanes: one line per request, one cell per step, and below it what the step does with images, sounds and videos of the
// prompt. The pointer shows a cell's meaning, and beside a name where they lie.

import { ask } from "./api.js";
import { colour, hue, legend, prepare, reason } from "./paint.js";
import { tip } from "./tip.js";

const TALL = 15;
const LABEL = 58;
const LANES_MAX = 40;
const SPAN = 90;
const INPUTS_TOLD = 5;
// What a step does with an input: [ink, words, shape, height]. The last ones are drawn above the others.
const HOWS = {
  computed: ["soft", "computed", "thin", 2],
  hit: ["tokens", "in the cache", "", 5],
  found: ["waiting", "found in files", "", 5],
  encoded: ["front", "encoded", "", 5],
};

export class Lanes {
  constructor(canvas, hint, key, number, about, go) {
    legend(key, Object.values(HOWS));
    Object.assign(this, { canvas, hint, key, number, about, go, every: [], lanes: [], first: 0, step: 0, asked: 0 });
    this.wants = () => true;
    canvas.addEventListener("mousemove", (event) => this.tell(event));
    canvas.addEventListener("mouseleave", (event) => tip(hint, event, ""));
    canvas.addEventListener("click", (event) => this.click(event));
  }

  // A name leads to the request's life, a cell to its step.
  click(event) {
    const lane = this.lanes[Math.floor((event.offsetY - 2) / TALL)];
    if (event.offsetX > LABEL) this.go(this.at(event.offsetX));
    else if (lane) this.life(lane.id);
  }

  // Show only requests that are wanted.
  filter(wants) {
    this.wants = wants;
    this.lanes = this.choose(this.every.filter(wants));
    this.draw();
  }

  at(x) {
    const part = (x - LABEL) / (this.canvas.clientWidth - LABEL);
    return Math.min(this.about.last_step, this.first + Math.floor(part * SPAN));
  }

  async show(step) {
    this.step = step;
    const latest = ++this.asked;
    const first = Math.max(this.about.first_step, Math.min(step - Math.floor(SPAN / 2), this.about.last_step - SPAN + 1));
    const found = await ask("lanes", { log: this.number, first, last: first + SPAN - 1 });
    if (latest !== this.asked) return;
    this.first = first;
    this.every = found.lanes;
    this.filter(this.wants);
  }

  // If there are too many, requests that do something in this very step come first.
  choose(lanes) {
    if (lanes.length <= LANES_MAX) return lanes;
    const here = lanes.filter((lane) => lane.runs.some(([first, last]) => first <= this.step && this.step <= last));
    return here.concat(lanes.filter((lane) => !here.includes(lane))).slice(0, LANES_MAX).sort((one, other) => one.id - other.id);
  }

  draw() {
    const { pen, width } = prepare(this.canvas, Math.max(1, this.lanes.length) * TALL + 4);
    const wide = (width - LABEL) / SPAN;
    this.key.hidden = !this.lanes.some((lane) => lane.inputs.length);
    this.lanes.forEach((lane, number) => {
      const top = number * TALL + 2;
      pen.fillStyle = colour("soft");
      pen.fillText(`req ${lane.id}`, 4, top + 11);
      for (const [first, last, kind] of lane.runs) {
        const left = LABEL + (first - this.first) * wide;
        const size = (last - first + 1) * wide;
        if (kind === "wait") {
          pen.fillStyle = colour("waiting");
          pen.fillRect(left, top + TALL / 2 - 1.5, size, 2);
        } else {
          pen.fillStyle = hue(lane.id);
          pen.globalAlpha = kind === "prompt" ? 1 : 0.6;
          pen.fillRect(left, top + (kind === "prompt" ? 1 : 3), size, kind === "prompt" ? TALL - 3 : TALL - 7);
          pen.globalAlpha = 1;
        }
      }
      this.drawInputs(pen, lane, top + TALL - 2, wide);
    });
    pen.strokeStyle = colour("mark");
    pen.strokeRect(LABEL + (this.step - this.first) * wide, 1, Math.max(2, wide), this.lanes.length * TALL + 1);
  }

  drawInputs(pen, lane, bottom, wide) {
    for (const [how, [ink, , , high]] of Object.entries(HOWS)) {
      for (const [first, last] of lane.inputs.flatMap(({ runs }) => runs).filter((run) => run[2] === how)) {
        const left = LABEL + (first - this.first) * wide;
        const size = (last - first + 1) * wide;
        pen.fillStyle = colour("panel");
        pen.fillRect(left, bottom - 6, size, 6);
        pen.fillStyle = colour(ink);
        pen.fillRect(left, bottom - high, size, high);
      }
    }
  }

  tell(event) {
    const lane = this.lanes[Math.floor((event.offsetY - 2) / TALL)];
    const step = this.at(event.offsetX);
    if (lane && event.offsetX <= LABEL) return tip(this.hint, event, listed(`request ${lane.id}`, lane.inputs.map(named)));
    const run = lane && lane.runs.find(([first, last]) => first <= step && step <= last);
    if (!run) return tip(this.hint, event, "");
    const does = lane.inputs.flatMap((input) =>
      input.runs.filter(([first, last]) => first <= step && step <= last).map(([, , how]) => `${named(input)} ${HOWS[how][1]}`),
    );
    const inputs = does.length ? ` · ${listed(`step ${step}`, does)}` : "";
    tip(this.hint, event, `request ${lane.id}, steps ${run[0]} to ${run[1]}: ${this.words(run)}${inputs}`);
  }

  words([, , kind, why]) {
    if (kind === "wait") return `waits: ${reason(why)}`;
    return kind === "prompt" ? "computes known tokens" : "one token per step";
  }
}

function named({ kind, digest, first, last }) {
  return `${kind} ${digest} (tokens ${first} to ${last})`;
}

// The first of these words; "" for none.
function listed(title, all) {
  if (!all.length) return "";
  const more = all.length > INPUTS_TOLD ? ` and ${all.length - INPUTS_TOLD} more` : "";
  return `${title}: ${all.slice(0, INPUTS_TOLD).join(", ")}${more}`;
}
