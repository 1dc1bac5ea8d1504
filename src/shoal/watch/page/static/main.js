// The page: open the run, follow it, and show one view at a time.

import { About } from "./about.js";
import { h, icon, replace } from "./dom.js";
import { duration, ellipsize } from "./figures.js";
import { Nodes } from "./nodes.js";
import { Overview } from "./overview.js";
import { follow, Run } from "./run.js";
import { Sites } from "./sites.js";
import { Timeline } from "./timeline.js";
import { Validation } from "./validation.js";

const VIEWS = [["overview", "Overview", Overview], ["timeline", "Timeline", Timeline], ["nodes", "Nodes", Nodes], ["sites", "Sites", Sites], ["validation", "Validation", Validation], ["about", "About", About]];
const RETRY_MS = 3000;
const MAX_NAME = 28; // characters of the run's name in the header
const byId = (id) => document.getElementById(id);
let current = null; // the view that is shown

const labelThemeButton = () => byId("theme").setAttribute("aria-label", `Change to the ${document.documentElement.dataset.theme === "dark" ? "light" : "dark"} theme`);
labelThemeButton();
byId("theme").append(icon("theme"));
byId("theme").addEventListener("click", () => {
  globalThis.toggleTheme();
  labelThemeButton();
});
start();

async function start() {
  const run = new Run();
  try {
    await run.refresh();
  } catch (error) {
    showNotice(`The run cannot be shown: ${error.message}`);
    setTimeout(start, RETRY_MS);
    return;
  }
  showNotice("");
  const views = new Map(); // by id, once shown
  const available = (id) => (id === "sites" ? run.overview.sites.length : run.details || id === "overview" || id === "nodes");
  const show = () => {
    const [name] = location.hash.slice(1).split("/");
    const choices = VIEWS.filter(([id]) => available(id));
    const [id, , View] = choices.find((choice) => choice[0] === name) || choices[0];
    replace(byId("views"), choices.map(([other, title]) => h("a", { href: `#${other}`, "aria-current": other === id ? "page" : null }, title)));
    current?.stop();
    if (!views.has(id)) views.set(id, new View(run));
    current = views.get(id);
    replace(byId("view"), current.root);
    current.start();
  };
  addEventListener("hashchange", () => {
    show();
    byId("view").focus({ preventScroll: true });
  });
  drawHeader(run.overview);
  show();
  let frame = 0;
  follow(run, () => {
    drawHeader(run.overview);
    if (frame) return; // a redraw is due already
    frame = requestAnimationFrame(() => {
      frame = 0;
      current.changed?.();
    });
  }, showNotice);
}

function drawHeader(overview) {
  document.title = `${overview.name} · Shoal`;
  byId("run").textContent = ellipsize(overview.name, MAX_NAME);
  byId("run").title = overview.name;
  const state = byId("state");
  state.textContent = overview.state;
  state.className = `pill ${overview.state}`;
  const share = overview.steps ? (100 * overview.trained) / overview.steps : 0;
  const time = overview.left_s === null ? duration(overview.elapsed_s) : `${duration(overview.left_s)} left`;
  replace(byId("progress"), h("span", {}, `${overview.trained} of ${overview.steps} steps`), h("span", { class: "track", role: "progressbar", "aria-label": "Steps trained", "aria-valuenow": overview.trained, "aria-valuemax": overview.steps }, h("i", { "width%": Math.min(share, 100) })), h("span", { class: "eta" }, time));
}

function showNotice(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text;
}
