// What happened in the steps that were marked on a time line.

import { ask } from "./api.js";

const whole = (value) => value.toLocaleString("en");
const ms = (value) => `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 })} ms`;
const pair = ([middle, late]) => `${ms(middle)}, ${ms(late)}`;

// [value, name] of each figure.
function figures(found) {
  const steps = found.last - found.first + 1;
  const lines = [[whole(steps), steps === 1 ? "step" : "steps"], [whole(found.tokens), "tokens computed"]];
  if (found.window) {
    const seconds = (found.window[1] - found.window[0]) / 1e6;
    lines.push([`${seconds.toLocaleString("en", { maximumFractionDigits: 2 })} s`, "in all"]);
    lines.push([whole(Math.round(found.tokens / Math.max(seconds, 1e-6))), "tokens/s"]);
  }
  lines.push([whole(found.running), "ran at most"], [whole(found.waiting), "waited at most"], [whole(found.held), "blocks held at most"]);
  lines.push([whole(found.admitted), "admitted"], [whole(found.ended), "ended"], [whole(found.preempted), "preempted"]);
  if (found.took) lines.push([pair(found.took.map((us) => us / 1e3)), "a step (50 %, 99 %)"]);
  if (found.firsts?.length) lines.push([pair(found.firsts), "to first tokens (50 %, 99 %)"]);
  if (found.gaps?.length) lines.push([pair(found.gaps), "between tokens (50 %, 99 %)"]);
  if (found.window && !found.gaps) lines.push(["mark fewer steps", "for times of requests"]);
  return lines;
}

// Show it in `place`, which is hidden again by its button.
export async function tell(place, number, first, last, close) {
  const found = await ask("part", { log: number, first, last });
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "close";
  button.onclick = close;
  const title = document.createElement("b");
  title.textContent = `steps ${found.first} to ${found.last}`;
  place.replaceChildren(
    title,
    ...figures(found).map(([value, name]) => {
      const figure = document.createElement("span");
      const bold = document.createElement("b");
      bold.textContent = value;
      figure.append(bold, ` ${name}`);
      return figure;
    }),
    button,
  );
  place.hidden = false;
}
