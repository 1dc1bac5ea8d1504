// The page: opens the run, follows it, and shows one view at a time.

import { About } from "./about.js";
import { h, icon, replace } from "./dom.js";
import { duration, middle } from "./figures.js";
import { Nodes } from "./nodes.js";
import { Overview } from "./overview.js";
import { follow, Run } from "./run.js";
import { Sites } from "./sites.js";
import { Timeline } from "./timeline.js";
import { Validation } from "./validation.js";

const VIEWS = [["overview", "Overview", Overview], ["timeline", "Timeline", Timeline], ["nodes", "Nodes", Nodes], ["sites", "Sites", Sites], ["validation", "Validation", Validation], ["about", "About", About]];
const byId = (id) => document.getElementById(id);
const LONGEST_NAME = 28; // on the page's head
let shown = null;

const named = () => byId("theme").setAttribute("aria-label", `Change to the ${document.documentElement.dataset.theme === "dark" ? "light" : "dark"} theme`);
named();
byId("theme").append(icon("theme"));
byId("theme").addEventListener("click", () => {
  globalThis.toggleTheme();
  named();
});
open();

async function open() {
  const run = new Run();
  try {
    await run.look();
  } catch (error) {
    trouble(`The run cannot be shown: ${error.message}`);
    setTimeout(open, 3000);
    return;
  }
  trouble("");
  const kept = new Map();
  const show = () => {
    const [name, ...rest] = location.hash.slice(1).split("/");
    const views = VIEWS.filter(([id]) => (id === "sites" ? run.overview.sites.length : run.details || id === "overview" || id === "nodes"));
    const [id, , View] = views.find(([one]) => one === name) || views[0];
    replace(byId("views"), views.map(([one, title]) => h("a", { href: `#${one}`, "aria-current": one === id ? "page" : null }, title)));
    shown?.stop();
    if (!kept.has(id)) kept.set(id, new View(run));
    shown = kept.get(id);
    replace(byId("view"), shown.root);
    shown.start(rest);
  };
  addEventListener("hashchange", () => {
    show();
    byId("view").focus({ preventScroll: true });
  });
  head(run.overview);
  show();
  let due = 0;
  follow(run, () => {
    head(run.overview);
    if (due) return; // many steps at once are drawn once
    due = requestAnimationFrame(() => {
      due = 0;
      shown.changed?.();
    });
  }, trouble);
}

function head(overview) {
  document.title = `${overview.name} · Shoal`;
  byId("run").textContent = middle(overview.name, LONGEST_NAME);
  byId("run").title = overview.name;
  const state = byId("state");
  state.textContent = overview.state;
  state.className = `pill ${overview.state}`;
  const share = overview.steps ? (100 * overview.trained) / overview.steps : 0;
  const left = overview.left_s === null ? duration(overview.elapsed_s) : `${duration(overview.left_s)} left`;
  replace(byId("progress"), h("span", {}, `step ${overview.trained} of ${overview.steps}`), h("span", { class: "track", role: "progressbar", "aria-label": "Steps trained", "aria-valuenow": overview.trained, "aria-valuemax": overview.steps }, h("i", { "width%": Math.min(share, 100) })), h("span", { class: "eta" }, left));
}

function trouble(words) {
  byId("trouble").hidden = !words;
  byId("trouble").textContent = words;
}
