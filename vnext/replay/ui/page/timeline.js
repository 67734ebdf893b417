// The time line: bands over all visible steps, with marks where requests were preempted and the time below, if the log has
// one. A click selects, a drag tells what happened in its steps, the wheel zooms.

import { ask } from "./api.js";
import { FONT, colour, prepare } from "./paint.js";

const AXIS = 16;
const BANDS = [
  { name: "took", title: "step time", unit: " ms", per: 1000, peak: (peaks) => peaks.took },
  { name: "ttft", title: "first token", unit: " ms", per: 1000, peak: (peaks) => peaks.ttft, colour: "waiting" },
  { name: "itl", title: "gap between tokens", unit: " ms", per: 1000, peak: (peaks) => peaks.itl, colour: "memory" },
  { name: "tokens", title: "tokens", peak: (peaks) => peaks.tokens },
  { name: "running", title: "running", peak: (peaks) => peaks.running },
  { name: "waiting", title: "waiting", peak: (peaks) => peaks.waiting },
  { name: "held", title: "blocks", peak: (peaks, about) => about.config.block_count, colour: "memory" },
];

const shown = (band, value) => `${(value / (band.per || 1)).toLocaleString("en", { maximumFractionDigits: 1 })}${band.unit || ""}`;

const DRAG_MIN = 5;
const TIMED = ["took", "ttft", "itl"];

export class Timeline {
  // `part(first, last)` is called when steps have been marked.
  constructor(canvas, number, about, go, part) {
    Object.assign(this, { canvas, number, about, go, part, first: about.first_step, last: about.last_step, step: null, data: null });
    Object.assign(this, { pressed: null, marked: null });
    canvas.addEventListener("pointerdown", (event) => event.button === 0 && this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => this.mark(null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("mousemove", (event) => (canvas.title = this.tell(this.at(event.offsetX))));
  }

  press(event) {
    this.pressed = event.offsetX;
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    if (this.pressed === null || Math.abs(event.offsetX - this.pressed) < DRAG_MIN) return;
    const ends = [this.at(this.pressed), this.at(event.offsetX)];
    this.mark([Math.min(...ends), Math.max(...ends)], true);
  }

  release(event) {
    const pressed = this.pressed;
    this.pressed = null;
    if (pressed === null) return;
    if (Math.abs(event.offsetX - pressed) < DRAG_MIN) this.go(this.at(event.offsetX));
    else this.part(...this.marked);
  }

  // Mark steps [first, last]; null for none.
  mark(steps, dragging = false) {
    if (!dragging) this.pressed = null;
    this.marked = steps;
    this.draw();
  }

  at(x) {
    const part = Math.min(1, Math.max(0, x / this.canvas.clientWidth));
    return Math.min(this.last, this.first + Math.floor(part * (this.last - this.first + 1)));
  }

  tell(step) {
    const place = this.data ? Math.floor((step - this.data.first) / this.data.each) : -1;
    if (!this.data || place < 0 || place >= this.data.tokens.length) return `step ${step}`;
    const figures = this.bands().map((band) => `${shown(band, this.data[band.name][place])} ${band.title}`);
    return [`step ${step}`, this.when(place), ...figures].filter(Boolean).join(", ");
  }

  // The bands that this log has figures for.
  bands() {
    return BANDS.filter((band) => !TIMED.includes(band.name) || this.about.overview.peaks[band.name] > 0);
  }

  // The time of day of a place, UTC; "" where the log has none.
  when(place) {
    const seconds = this.data?.at?.[place];
    return seconds ? new Date(1000 * seconds).toISOString().slice(11, 19) : "";
  }

  wheel(event) {
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 0.5 : 2, this.at(event.offsetX));
  }

  // Around `step`; a factor of 0 shows the whole log.
  zoom(factor, step = this.step) {
    const { first_step: begin, last_step: end } = this.about;
    const span = factor ? Math.max(20, Math.min(end - begin + 1, Math.round((this.last - this.first + 1) * factor))) : end - begin + 1;
    const part = (step - this.first) / Math.max(1, this.last - this.first + 1);
    this.first = Math.max(begin, Math.min(end - span + 1, Math.round(step - part * span)));
    this.last = this.first + span - 1;
    return this.load();
  }

  show(step) {
    this.step = step;
    if (step < this.first || step > this.last) {
      const span = this.last - this.first;
      this.first = Math.max(this.about.first_step, step - Math.floor(span / 2));
      this.last = this.first + span;
      return this.load();
    }
    this.draw();
  }

  // The log has grown: a view that reached its end follows.
  grow(about) {
    const { first_step: begin, last_step: end } = this.about;
    const [whole, atEnd] = [this.first <= begin && this.last >= end, this.last >= end];
    this.about = about;
    if (whole) Object.assign(this, { first: about.first_step, last: about.last_step });
    else if (atEnd) Object.assign(this, { first: this.first + about.last_step - end, last: about.last_step });
    this.first = Math.max(this.first, about.first_step);
    this.last = Math.max(this.last, this.first);
    return this.load();
  }

  async load() {
    const points = Math.max(50, Math.min(2000, this.canvas.clientWidth));
    this.data = await ask("overview", { log: this.number, first: this.first, last: this.last, points });
    this.draw();
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    if (!width) return;
    const steps = Math.max(1, this.last - this.first + 1);
    pen.drawImage(this.picture(width, height, steps), 0, 0, width, height);
    if (this.marked) {
      const [begin, end] = [this.marked[0], this.marked[1] + 1].map((step) => ((step - this.first) / steps) * width);
      pen.fillStyle = colour("tokens");
      pen.globalAlpha = 0.22;
      pen.fillRect(begin, 0, end - begin, height);
      pen.globalAlpha = 1;
    }
    if (this.step === null) return;
    pen.fillStyle = colour("mark");
    pen.fillRect(((this.step + 0.5 - this.first) / steps) * width - 1, 0, 2, height);
  }

  // The bands are redrawn only when their content changes; selecting another step moves only the mark.
  picture(width, height, steps) {
    const { canvas, about, data, first, last } = this;
    const peaks = JSON.stringify(about.overview.peaks);
    const key = [canvas.width, canvas.height, document.documentElement.dataset.theme, first, last, peaks];
    if (this.drawn && this.drawn.data === data && this.drawn.key.every((value, place) => value === key[place])) return this.drawn.picture;
    const picture = new OffscreenCanvas(canvas.width, canvas.height);
    const pen = picture.getContext("2d");
    pen.scale(canvas.width / width, canvas.height / height);
    pen.font = FONT;
    const bands = this.bands();
    const tall = (height - AXIS) / bands.length;
    bands.forEach((band, number) => this.band(pen, band, width, number * tall, tall, steps));
    if (data) this.marks(pen, width, height - AXIS, steps);
    this.axis(pen, width, height);
    this.drawn = { picture, data, key };
    return picture;
  }

  band(pen, band, width, top, tall, steps) {
    const ink = colour(band.colour || band.name);
    const peak = Math.max(1, band.peak(this.about.overview.peaks, this.about));
    if (this.data?.[band.name]) {
      pen.fillStyle = ink;
      const wide = (this.data.each / steps) * width;
      this.data[band.name].forEach((value, place) => {
        const high = (value / peak) * (tall - 4);
        const left = Math.floor(place * wide);
        pen.fillRect(left, top + tall - high, Math.max(1, Math.floor((place + 1) * wide) - left), high);
      });
    }
    pen.fillStyle = colour("line");
    pen.fillRect(0, top + tall - 1, width, 1);
    const label = `${band.title} (of ${shown(band, peak)})`;
    pen.globalAlpha = 0.75;
    pen.fillStyle = colour("back");
    pen.fillRect(3, top + 3, pen.measureText(label).width + 6, 14);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("front");
    pen.fillText(label, 6, top + 14);
  }

  // The time, or the step where the log has no times, at both ends and in the middle.
  axis(pen, width, height) {
    const last = this.data ? this.data.tokens.length - 1 : -1;
    pen.fillStyle = colour("soft");
    for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
      const step = Math.round(this.first + share * (this.last - this.first));
      pen.textAlign = align;
      pen.fillText(this.when(Math.round(share * last)) || `step ${step}`, 4 + share * (width - 8), height - 4);
    }
    pen.textAlign = "left";
  }

  marks(pen, width, height, steps) {
    pen.fillStyle = colour("mark");
    const wide = (this.data.each / steps) * width;
    this.data.preempted.forEach((value, place) => {
      if (value) pen.fillRect(place * wide, height - 5, Math.max(wide, 2), 5);
    });
  }
}
