// The chat page: who is here, which conversation is open, and what is being written.

import { ask, get, post, Refused, remove, trust } from "./api.js";
import { composer } from "./composer.js";
import { h, icon } from "./dom.js";
import { entry } from "./entry.js";
import { prose, reply, said, save, versionName } from "./message.js";
import { sidebar } from "./sidebar.js";
import { read } from "./stream.js";
import { alternatives, newestBelow, pathTo } from "./tree.js";

const page = document.getElementById("page");
const announce = (text) => { document.getElementById("said").textContent = text; };
const EMPTY = { id: null, title: "", leaf: null, messages: [] };
const FOLLOW_PX = 80; // how near the end a reader must be to be taken along

let open = EMPTY; // the conversation
let models, side, field, thread, title, more;
let writing = null; // { abort, lanes: [{ model, text, element }] }

async function start() {
  const me = await get("me");
  trust(me.csrf);
  if (!me.name) {
    page.replaceChildren(entry({ registration: me.registration, first: me.first, onenter: (entered) => { trust(entered.csrf); enter(entered); } }));
    document.getElementById("name").focus();
    return;
  }
  await enter(me);
}

async function enter(me) {
  models = await get("models");
  side = sidebar({
    me, onnew: () => openOne(null), onopen: openOne, ondelete: removeOne, onlogout: leave, onclose: () => drawer(false),
  });
  field = composer({ models, onsend: send, onstop: stop });
  thread = h("div.thread", { id: "thread" });
  title = h("h1", {}, "New chat");
  more = h("button.quiet", { "aria-label": "Export this conversation", hidden: true, onclick: exportOne }, icon("down"), h("span.wide", {}, "Export"));
  page.replaceChildren(h("div.shell", {},
    side.element,
    h("div.veil", { onclick: () => drawer(false) }),
    h("main", {},
      h("header.top", {}, h("button.quiet.only-small", { "aria-label": "Open the sidebar", "aria-controls": "side", onclick: () => drawer(true) }, icon("menu")), title, more),
      h("div.scroll", { id: "scroll", tabindex: "-1" }, thread),
      field.element)));
  await list();
  await openOne(location.hash.slice(1) || null);
  setInterval(async () => { if (!document.hidden && !writing) field.fill(models = await get("models").catch(() => models)); }, 10_000);
}

const drawer = (is) => document.querySelector(".shell").classList.toggle("drawn", is);

async function list() {
  side.show(await get("conversations"), open.id);
}

async function openOne(id) {
  stop();
  drawer(false);
  open = EMPTY;
  if (id) {
    try {
      open = await get(`conversations/${encodeURIComponent(id)}`);
    } catch (refused) {
      if (!(refused instanceof Refused) || refused.status !== 404) throw refused;
    }
  }
  history.replaceState(null, "", open.id ? `#${open.id}` : location.pathname);
  show();
  toEnd(true);
  list();
  if (matchMedia("(min-width: 821px)").matches) field.text.focus();
}

function show() {
  title.textContent = open.title || "New chat";
  document.title = open.title ? `${open.title} · Shoal` : "Shoal";
  more.hidden = !open.id;
  if (!open.messages.length && !writing) {
    thread.replaceChildren(h("div.hello", {}, h("img", { src: "/static/shoal.svg", alt: "", width: "52", height: "52" }), h("h2", {}, `Talk to ${models.name}`),
      h("p", {}, models.versions.length > 1 ? "Ask the newest version, or compare it with the model before training. Every reply can be recomputed from its seed." : "Every reply can be recomputed from its weights, prompt and seed.")));
    return;
  }
  const path = pathTo(open.messages, open.leaf);
  thread.replaceChildren(...path.map(element));
}

function element(message) {
  const groups = alternatives(open.messages, message);
  const onbranch = (one) => branch(newestBelow(open.messages, one.id));
  if (message.role === "user") {
    return said(message, { alternatives: groups, onbranch, onedit: (content) => write({ content, parent: message.parent }) });
  }
  const own = groups.find((group) => group.some((one) => one.id === message.id)) ?? [message];
  const one = (each) => reply(each, {
    at: `conversations/${open.id}/messages/${each.id}`,
    alternatives: each === own[0] ? groups : null, onbranch,
    onagain: each === own.at(-1) ? () => write({ parent: message.parent, models: own.map((lane) => lane.facts.model), target: message.facts.target }) : null,
    onpick: own.length > 1 ? () => { branch(newestBelow(open.messages, each.id)); field.text.focus(); } : null,
  });
  return own.length > 1 ? h("div.lanes", {}, own.map(one)) : one(message);
}

async function branch(leaf) {
  open.leaf = leaf;
  show();
  await post(`conversations/${open.id}`, { leaf });
}

const send = (content) => write({ content, parent: open.leaf });

async function write(wanted) {
  if (writing) return;
  const asked = { ...field.asked(), ...wanted };
  const own = { abort: new AbortController(), lanes: [] };
  writing = own;
  field.busy(true);
  announce("The model is writing");
  const before = open.leaf;
  try {
    if (!open.id) {
      const { id } = await post("conversations");
      open = { ...EMPTY, id, messages: [] };
      history.replaceState(null, "", `#${id}`);
    }
    const id = open.id;
    const path = wanted.content === undefined ? pathTo(open.messages, wanted.parent) : pathTo(open.messages, wanted.parent ?? null);
    thread.replaceChildren(...path.map(element));
    if (wanted.content !== undefined) thread.append(h("article.said", {}, h("div.bubble", {}, wanted.content)));
    own.lanes = asked.models.map((model) => ({ text: "", model, element: h("article.reply.writing", {}, asked.models.length > 1 ? h("header", {}, nameOf(model)) : null, h("div.body", {}, h("p.wait", {}, h("span"), h("span"), h("span")))) }));
    thread.append(asked.models.length > 1 ? h("div.lanes", {}, own.lanes.map((lane) => lane.element)) : own.lanes[0].element);
    toEnd(true);
    const response = await ask(`conversations/${id}/replies`, { method: "POST", body: asked, signal: own.abort.signal });
    for await (const event of read(response)) {
      const lane = own.lanes[event.lane];
      if (event.event === "text") {
        lane.text += event.text;
        paint(lane);
      } else if (event.event === "failed") {
        throw new Error(event.error);
      }
    }
    announce("The reply is complete");
  } catch (error) {
    if (error.name !== "AbortError") return failed(error, before, wanted);
    announce("Stopped");
  } finally {
    if (writing === own) writing = null;
    field.busy(false);
  }
  await saved();
}

const nameOf = (id) => versionName(models.versions.find((one) => one.id === (id === models.name ? models.newest : id))?.version, id);

// What the server saved, once it has: a stopped reply is saved a moment after it was stopped.
async function saved() {
  const id = open.id;
  for (let tries = 0; tries < 20 && id; tries += 1) {
    const found = await get(`conversations/${id}`);
    if (open.id !== id || writing) return;
    open = found;
    if (found.messages.find((message) => message.id === found.leaf)?.role === "assistant") break;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  show();
  toEnd();
  list();
}

async function failed(error, before, wanted) {
  announce(error.message);
  if (error instanceof Refused && error.status === 401) return location.reload();
  if (open.id) open = await get(`conversations/${open.id}`).catch(() => open);
  show();
  thread.append(h("div.failed", { role: "alert" }, h("p", {}, error.message),
    h("button.quiet", { onclick: () => write({ ...wanted, content: undefined, parent: open.leaf }) }, icon("again"), "Try again")));
  toEnd(true);
}

function paint(lane) {
  if (lane.painting) return;
  lane.painting = requestAnimationFrame(() => {
    lane.painting = 0;
    const near = isNear();
    lane.element.querySelector(".body").replaceChildren(...prose(lane.text, { writing: true }));
    if (near) toEnd(true);
  });
}

const scroller = () => document.getElementById("scroll");
const isNear = () => scroller().scrollHeight - scroller().scrollTop - scroller().clientHeight < FOLLOW_PX;
const toEnd = (always = false) => { if (always || isNear()) scroller().scrollTop = scroller().scrollHeight; };

function stop() {
  writing?.abort.abort();
}

async function removeOne(one) {
  if (!confirm(`Delete “${one.title || "New chat"}”? This cannot be undone.`)) return;
  await remove(`conversations/${one.id}`);
  if (one.id === open.id) await openOne(null);
  else await list();
}

async function exportOne() {
  save(await (await ask(`conversations/${open.id}`)).blob(), `conversation-${open.id}.json`);
}

async function leave() {
  await post("logout");
  location.assign("/");
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); if (side) drawer(false); }
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && side) { event.preventDefault(); drawer(true); side.search.focus(); }
});

start().catch((error) => page.replaceChildren(h("main.entry", {}, h("div.card", {}, h("h1", {}, "Not now"), h("p", { role: "alert" }, error.message),
  h("button.primary", { onclick: () => location.reload() }, "Try again")))));
