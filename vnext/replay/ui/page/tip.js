// A description of what lies under the pointer, shown beside it and inside the window, because a canvas may be longer
// than the window.

const AWAY = 14;
const EDGE = 4;

export function tip(hint, event, words) {
  hint.textContent = words;
  hint.hidden = !words;
  if (!words) return;
  const { offsetWidth: wide, offsetHeight: high } = hint;
  const left = Math.min(event.clientX + AWAY, window.innerWidth - wide - EDGE);
  const below = event.clientY + AWAY;
  const top = below + high + EDGE <= window.innerHeight ? below : event.clientY - high - AWAY;
  hint.style.left = `${Math.max(EDGE, left)}px`;
  hint.style.top = `${Math.max(EDGE, top)}px`;
}
