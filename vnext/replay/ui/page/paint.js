// Canvases and colours: sharp on every screen; one colour per request everywhere.

export const FONT = "11px system-ui, sans-serif";

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Neighbouring numbers get hues far apart (golden angle).
export function hue(id, light) {
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${(id * 137.508) % 360} 62% ${light ?? (dark ? 62 : 46)}%)`;
}

export function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = FONT;
  return { pen, width, height: tall };
}

export function cell(row, text) {
  const made = row.insertCell();
  made.textContent = text;
  return made;
}

export function head(table, names) {
  table.replaceChildren();
  const row = table.createTHead().insertRow();
  for (const name of names) {
    const made = document.createElement("th");
    made.textContent = name;
    row.append(made);
  }
  return table.createTBody();
}

// Boxes with words: [ink, words, shape].
export function legend(place, items) {
  for (const [ink, text, shape] of items) {
    const box = document.createElement("i");
    box.className = shape || "";
    if (ink) box.dataset.ink = ink;
    const item = document.createElement("span");
    item.append(box, text);
    place.append(item, " ");
  }
  paintLegend(place);
}

export function paintLegend(place) {
  for (const box of place.querySelectorAll("i[data-ink]")) box.style.setProperty("background", colour(box.dataset.ink));
}

const REASONS = {
  budget: (why) => `the step's tokens are used up: needs ${why.need}, ${why.have} left`,
  blocks: (why) => `too few free blocks: needs ${why.need}, ${why.have} free`,
  sequences: (why) => `the batch is full: ${why.have} requests run`,
  adapter: () => "no slot holds its adapter yet",
  caution: () => "behind fatal steps, requests are admitted one at a time",
  inputs: () => "as many images and sounds as a step may encode came before",
  disk: () => "its blocks, or vectors of its images and sounds, are being read",
  pause: () => "the engine was paused",
  microbatch: () => "its token is in flight, or it is the turn of others",
  states: (why) => `too few free state pages: needs ${why.need}, ${why.have} free`,
  order: (why) => `request ${why.behind} comes first and is waiting too`,
  preempted: (why) => `preempted: ${why.need} blocks are needed, ${why.have} free`,
  room: (why) => `others are preempted in this step: ${why.need} blocks are needed, ${why.have} free`,
};

export function reason(why) {
  return why ? REASONS[why.why](why) : "";
}
