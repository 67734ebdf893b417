// An answer's text as elements: fenced code, tables, headings, lists, paragraphs; code, strong and slanted words and links inside a
// line. Everything becomes text nodes, never markup, so what a model writes cannot act.

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const ITEM = /^\s*(?:([-*])|\d+[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function markdown(text) {
  const made = document.createDocumentFragment();
  const parts = text.split(/^```/m);
  parts.forEach((part, index) => {
    if (index % 2) made.append(code(part));
    else for (const block of part.split(/\n{2,}/)) if (block.trim()) made.append(...blockOf(block.replace(/^\n+|\n+$/g, "")));
  });
  return made;
}

function code(part) {
  const end = part.indexOf("\n");
  const made = element("pre");
  const text = element("code", "", end < 0 ? part : part.slice(end + 1));
  if (navigator.clipboard) made.append(copying(text)); // browsers have it for https and for this machine
  made.append(text);
  return made;
}

function copying(text) {
  const made = element("button", "quiet", "Copy");
  made.type = "button";
  made.onclick = () => navigator.clipboard.writeText(text.textContent).then(() => (made.textContent = "Copied"));
  return made;
}

// Neighbouring lines of one kind make an element.
const KINDS = [
  ["table", (line) => /^\s*\|.*\|\s*$/.test(line), table],
  ["heading", (line) => HEADING.test(line), (lines) => lines.map(heading)],
  ["list", (line) => ITEM.test(line), list],
  ["paragraph", () => true, (lines) => [inline(element("p"), lines.join("\n"))]],
];

function blockOf(block) {
  const runs = [];
  for (const line of block.split("\n")) {
    const [name, , make] = KINDS.find(([, is]) => is(line));
    if (runs.at(-1)?.name !== name) runs.push({ name, make, lines: [] });
    runs.at(-1).lines.push(line);
  }
  return runs.flatMap(({ make, lines }) => make(lines));
}

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  return inline(element(`h${Math.min(6, marks.length + 2)}`), text);
}

function list(lines) {
  const made = element(ITEM.exec(lines[0])[1] ? "ul" : "ol");
  made.append(...lines.map((line) => inline(element("li"), ITEM.exec(line)[2])));
  if (made.tagName === "OL") made.start = parseInt(lines[0], 10);
  return [made];
}

function table(lines) {
  const made = element("table");
  const rows = lines.map((line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim()));
  const isHeaded = rows.length > 1 && rows[1].every((cell) => /^:?-+:?$/.test(cell));
  rows.forEach((cells, index) => {
    if (isHeaded && index === 1) return;
    made.insertRow().append(...cells.map((cell) => inline(element(isHeaded && !index ? "th" : "td"), cell)));
  });
  return [made];
}

function inline(parent, text) {
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(from, found.index));
    const [whole, plain, strong, slanted, label, address] = found;
    const made = element(plain ? "code" : strong ? "strong" : slanted ? "em" : "a", "", plain || strong || slanted || label);
    if (address) Object.assign(made, { href: address, rel: "noreferrer", target: "_blank" });
    parent.append(made);
    from = found.index + whole.length;
  }
  parent.append(text.slice(from));
  return parent;
}
