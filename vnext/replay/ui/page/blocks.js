// The block map: one square per block. Held blocks have their request's colour, shared ones a corner; kept ones are
// dimmed.

import { bytes } from "./api.js";
import { colour, hue, prepare } from "./paint.js";
import { tip } from "./tip.js";

const FREE = 0, KEPT = 1, HELD = 2, SHARED = 3;
const NAMES = ["free", "kept for reuse", "held", "shared"];
const AREA = 90_000;
export const ITEMS = [["free", "free"], ["kept", "kept for reuse"], ["tokens", "held, by request"], ["", "shared", "shared"]];

export class Blocks {
  constructor(canvas, hint) {
    Object.assign(this, { canvas, hint, kinds: null, owners: null, size: 8, across: 1 });
    canvas.addEventListener("mousemove", (event) => this.tell(event));
    canvas.addEventListener("mouseleave", (event) => tip(hint, event, ""));
  }

  show(map) {
    this.kinds = bytes(map.kinds);
    this.owners = new Int32Array(bytes(map.owners).buffer);
    this.draw();
  }

  draw() {
    if (!this.kinds) return;
    const count = this.kinds.length;
    this.size = Math.max(2, Math.min(14, Math.floor(Math.sqrt(AREA / count))));
    this.across = Math.max(1, Math.floor((this.canvas.clientWidth - 4) / this.size));
    const { pen } = prepare(this.canvas, Math.ceil(count / this.across) * this.size + 4);
    const gap = this.size > 4 ? 1 : 0;
    const inks = { [FREE]: colour("free"), [KEPT]: colour("kept") };
    const front = colour("front");
    for (let block = 0; block < count; block++) {
      const left = 2 + (block % this.across) * this.size;
      const top = 2 + Math.floor(block / this.across) * this.size;
      const kind = this.kinds[block];
      pen.fillStyle = inks[kind] || hue(this.owners[block]);
      pen.fillRect(left, top, this.size - gap, this.size - gap);
      if (kind === SHARED) {
        pen.fillStyle = front;
        pen.fillRect(left, top, Math.ceil(this.size / 2.5), Math.ceil(this.size / 2.5));
      }
    }
  }

  tell(event) {
    if (!this.kinds) return;
    const column = Math.floor((event.offsetX - 2) / this.size);
    const block = Math.floor((event.offsetY - 2) / this.size) * this.across + column;
    if (column < 0 || column >= this.across || block >= this.kinds.length) return tip(this.hint, event, "");
    const kind = this.kinds[block];
    const whose = kind >= HELD ? `, request ${this.owners[block]}${kind === SHARED ? " and others" : ""}` : "";
    tip(this.hint, event, `block ${block}: ${NAMES[kind]}${whose}`);
  }
}
