// A running engine's log: polls twice a second, shows the engine's condition, and follows the newest step if asked to.

import { ask } from "./api.js";

const EVERY_MS = 500;
const QUIET_S = 3;

export class Live {
  constructor(word, more, button, grown) {
    Object.assign(this, { word, more, button, grown, following: true, last: null, at: 0, rate: 0 });
    word.hidden = button.hidden = false;
    this.press(true);
  }

  press(following) {
    this.following = following;
    this.button.setAttribute("aria-pressed", String(following));
  }

  // Runs until the page or its server is closed. After the engine's end there is nothing new, and the page stays as it
  // is.
  async run() {
    for (;;) {
      let about;
      try {
        about = (await ask("logs")).logs[0];
      } catch {
        return this.say("ended", "ended", "This page's own server has ended: start vnext-replay ui again.");
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
    const known = `${live.word}. The page shows the engine up to step ${last}`;
    if (live.condition === "ended") return this.say("ended", "ended", `${known}.`);
    if (live.condition === "silent") return this.say("silent", "no answer", `${known}; it continues when the server answers again.`);
    if (live.behind) return this.say("live", `reading what was written: ${Math.round(this.rate)} steps/s`);
    if (this.rate > 0) return this.say("live", `live, ${Math.round(this.rate)} steps/s`);
    const quiet = live.quiet_s < QUIET_S ? "" : `, nothing new for ${Math.round(live.quiet_s)} s`;
    this.say("live", `live${quiet}: ${live.running} running, ${live.waiting} waiting now`);
  }

  say(condition, words, more = "") {
    this.word.dataset.condition = condition;
    this.word.textContent = words;
    this.more.textContent = more;
    this.more.hidden = !more;
    if (condition === "ended") this.press(false);
    this.button.disabled = condition === "ended";
  }
}
