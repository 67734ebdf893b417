// The page: two views, the model, the key and the theme.

import { models, setKey } from "./api.js";
import { begin } from "./chat.js";
import { watch } from "./engine.js";
import { list as listRoutes } from "./reference.js";

const byId = (id) => document.getElementById(id);
const VIEWS = ["chat", "engine", "api"];

function fail(error) {
  byId("error").hidden = !error;
  byId("error").textContent = error ? error.message : "";
}

function view(name) {
  for (const each of VIEWS) {
    byId(each).hidden = each !== name;
    byId(`to-${each}`).setAttribute("aria-pressed", each === name);
  }
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  watch(name === "engine");
  if (name === "api") listRoutes().catch(fail);
}

async function list() {
  try {
    byId("model").replaceChildren(...(await models()).map((name) => new Option(name.startsWith("/") ? name.split("/").pop() : name, name)));
    fail(null);
  } catch (error) {
    fail(error);
  }
}

// The system's, also when that changes, until the button is pressed.
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = localStorage.getItem("theme");
function theme() {
  const name = chosen || (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = name;
  return name;
}

theme();
dark.onchange = theme;
byId("theme").onclick = () => {
  chosen = theme() === "dark" ? "light" : "dark";
  theme();
  localStorage.setItem("theme", chosen);
};
for (const each of VIEWS) byId(`to-${each}`).onclick = () => view(each);
byId("key").value = sessionStorage.getItem("key") || "";
byId("key").onchange = () => {
  setKey(byId("key").value.trim());
  list();
};
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  byId("key").blur();
};
byId("replay").textContent = `vnext-replay ui --live ${location.origin}`;
if (matchMedia("(max-width: 800px)").matches) byId("settings-fold").open = false;
begin(fail);
list();
view(VIEWS.find((each) => location.hash === `#${each}`) || (location.pathname.endsWith("/docs") ? "api" : "chat"));
