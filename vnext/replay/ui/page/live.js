// A running engine's log: asks twice a second what is new, says how it goes with the engine, and goes along if it is to.

import { ask } from "./api.js";

const EVERY_MS = 500;
const QUIET_S = 3;

export class Live {
  constructor(word, button, grown) {
    Object.assign(this, { word, button, grown, following: true, last: null, at: 0, rate: 0 });
    word.hidden = button.hidden = false;
    this.press(true);
  }

  press(following) {
    this.following = following;
    this.button.setAttribute("aria-pressed", String(following));
  }

  // Until the page or its server is closed; after the engine's end there is nothing new, and the page stays as it is.
  async run() {
    for (;;) {
      let about;
      try {
        about = (await ask("logs")).logs[0];
      } catch {
        return this.say("ended", "this page's own server has ended: start vnext-replay ui again");
      }
      this.tell(about);
      await this.grown(about);
      if (about.live.condition === "ended") return;
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  tell({ live, last_step: last }) {
    const now = performance.now();
    if (this.last !== null) this.rate = (1000 * (last - this.last)) / (now - this.at);
    Object.assign(this, { last, at: now });
    if (live.condition === "ended") return this.say("ended", `ended: ${live.word}`);
    if (live.condition === "silent") return this.say("silent", live.word);
    if (live.behind) return this.say("live", `reading what was written: ${Math.round(this.rate)} steps/s`);
    const quiet = live.quiet_s < QUIET_S ? "live" : `live, nothing new for ${Math.round(live.quiet_s)} s`;
    this.say("live", this.rate > 0 ? `live, ${Math.round(this.rate)} steps/s` : quiet);
  }

  say(condition, words) {
    this.word.dataset.condition = condition;
    this.word.textContent = words;
    if (condition === "ended") this.press(false);
    this.button.disabled = condition === "ended";
  }
}
