// A request's life: why it waited, what became of its inputs and what happened, each a way to its step.

import { ask } from "./api.js";

const byId = (id) => document.getElementById(id);
const whole = (value) => value.toLocaleString("en");

function lines(place, entries, words, go) {
  place.replaceChildren(
    ...entries.map((each) => {
      const line = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = each.step < 0 ? "before step 0" : each.last > each.step ? `steps ${each.step} to ${each.last}` : `step ${each.step}`;
      button.onclick = () => {
        byId("request").close();
        go(Math.max(0, each.step));
      };
      line.append(button, ` ${words(each)}`);
      return line;
    }),
  );
}

export async function show(number, id, go) {
  const found = await ask("request", { log: number, id });
  const facts = Object.entries(found.facts).map(([name, value]) => `${whole(value)} ${name}`);
  const waits = Object.entries(found.reasons).filter(([, ms]) => ms >= 0.5);
  const causes = waits.map(([why, ms]) => `${whole(Math.round(ms))} ms ${why}`);
  byId("request-title").textContent = `request ${found.id}${found.name ? ` · ${found.name}` : ""}`;
  byId("request-line").textContent = found.line || "the log has no times";
  byId("request-facts").textContent = [...facts, `end: ${found.end || "it lives"}`].join(", ");
  byId("request-causes").textContent = causes.length ? `it waited: ${causes.join(", ")}` : "";
  lines(byId("request-waits"), found.waits, (each) => each.words, go);
  lines(byId("request-moments"), found.moments, (each) => each.words, go);
  lines(byId("request-inputs"), found.inputs, (each) => each.words, go);
  byId("request-inputs-title").hidden = !found.inputs.length;
  byId("request-waits-title").hidden = !found.waits.length;
  byId("request").showModal();
  byId("request").scrollTop = 0;
}
