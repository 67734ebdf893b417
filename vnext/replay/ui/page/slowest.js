// The slowest of a log: steps, first tokens and gaps between tokens, each a button that leads to its step.

const ms = (value) => `${value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 })} ms`;

const KINDS = [
  ["steps", "Slowest steps", (each) => `${ms(each.ms)}: step ${each.step}, ${each.tokens} tokens of ${each.requests} requests`],
  ["firsts", "Latest first tokens", (each) => `${ms(each.ms)}: request ${each.id}, ${each.prompt} tokens of prompt`],
  ["gaps", "Longest gaps between tokens", (each) => `${ms(each.ms)}: request ${each.id}, steps ${each.last_step} to ${each.step}`],
];

export function summary(found) {
  const [step, first] = [found.steps[0], found.firsts[0]];
  if (!step) return "slowest: no step";
  const words = `slowest: step ${step.step} with ${ms(step.ms)}`;
  return first ? `${words}, first token of request ${first.id} after ${ms(first.ms)}` : words;
}

export function list(found, go) {
  return KINDS.map(([kind, title, words]) => {
    const part = document.createElement("div");
    const head = document.createElement("h3");
    const lines = document.createElement("ol");
    head.textContent = title;
    for (const each of found[kind]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = words(each);
      button.onclick = () => go(each.step);
      const line = document.createElement("li");
      line.append(button);
      lines.append(line);
    }
    part.append(head, lines);
    return part;
  });
}
