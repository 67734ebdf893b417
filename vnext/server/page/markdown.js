// An answer's text as elements: fenced code, headings, lists, paragraphs; code, strong words and links inside a line. Everything
// becomes text nodes, never markup, so what a model writes cannot act.

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const ITEM = /^\s*(?:([-*])|\d+[.)])\s+(.*)$/;

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
  made.append(element("code", "", end < 0 ? part : part.slice(end + 1)));
  return made;
}

function blockOf(block) {
  const heading = /^(#{1,4})\s+(.*)$/.exec(block);
  if (heading) return [inline(element(`h${Math.min(6, heading[1].length + 2)}`), heading[2])];
  const lines = block.split("\n");
  if (!lines.every((line) => ITEM.test(line))) return [inline(element("p"), block)];
  const list = element(ITEM.exec(lines[0])[1] ? "ul" : "ol");
  list.append(...lines.map((line) => inline(element("li"), ITEM.exec(line)[2])));
  return [list];
}

function inline(parent, text) {
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(from, found.index));
    const [whole, plain, strong, label, address] = found;
    const made = element(plain ? "code" : strong ? "strong" : "a", "", plain || strong || label);
    if (address) Object.assign(made, { href: address, rel: "noreferrer", target: "_blank" });
    parent.append(made);
    from = found.index + whole.length;
  }
  parent.append(text.slice(from));
  return parent;
}
