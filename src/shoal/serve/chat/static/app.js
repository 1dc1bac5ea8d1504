// The chat page: the session, the open conversation, and the reply being written.

import { get, post, remove, request, RequestError, setCsrfToken } from "./api.js";
import { composer } from "./composer.js";
import { h, icon } from "./dom.js";
import { entry } from "./entry.js";
import { prose, replyMessage, save, userMessage, versionName } from "./message.js";
import { sidebar } from "./sidebar.js";
import { readEvents } from "./stream.js";
import { alternatives, newestBelow, pathTo } from "./tree.js";

const page = document.getElementById("page");
const announce = (text) => { document.getElementById("announcement").textContent = text; };
const NEW = { id: null, title: "", leaf: null, messages: [] };
const FOLLOW_PX = 80; // within this distance of the end, the view follows new text
const MODELS_EVERY_MS = 10_000;
const SAVE_TRIES = 20, SAVE_EVERY_MS = 150;

let conversation = NEW; // the open conversation
let models, side, field, thread, title, exportButton;
let writing = null; // { abort, lanes: [{ text, element }] }

async function start() {
  const me = await get("me");
  setCsrfToken(me.csrf);
  if (!me.name) {
    page.replaceChildren(entry({ registration: me.registration, first: me.first, onenter: (entered) => { setCsrfToken(entered.csrf); enter(entered); } }));
    document.getElementById("name").focus();
    return;
  }
  await enter(me);
}

async function enter(me) {
  models = await get("models");
  side = sidebar({
    me, onnew: () => open(null), onopen: open, ondelete: removeConversation, onlogout: logOut, onclose: () => showSidebar(false),
  });
  field = composer({ models, onsend: (content) => write({ content, parent: conversation.leaf }), onstop: stop });
  thread = h("div.thread", { id: "thread" });
  title = h("h1", {}, "New chat");
  exportButton = h("button.quiet", { "aria-label": "Export this conversation", hidden: true, onclick: exportConversation }, icon("down"), h("span.wide-only", {}, "Export"));
  page.replaceChildren(h("div.shell", {},
    side.element,
    h("div.backdrop", { onclick: () => showSidebar(false) }),
    h("main", {},
      h("header.top", {}, h("button.quiet.small-only", { "aria-label": "Open the sidebar", "aria-controls": "side", onclick: () => showSidebar(true) }, icon("menu")), title, exportButton),
      h("div.scroll", { id: "scroll", tabindex: "-1" }, thread),
      field.element)));
  await list();
  await open(location.hash.slice(1) || null);
  setInterval(async () => { if (!document.hidden && !writing) field.fill(models = await get("models").catch(() => models)); }, MODELS_EVERY_MS);
}

const showSidebar = (shown) => document.querySelector(".shell").classList.toggle("sidebar-open", shown);

async function list() {
  side.show(await get("conversations"), conversation.id);
}

async function open(id) {
  stop();
  showSidebar(false);
  conversation = NEW;
  if (id) {
    try {
      conversation = await get(`conversations/${encodeURIComponent(id)}`);
    } catch (error) {
      if (!(error instanceof RequestError) || error.status !== 404) throw error;
    }
  }
  history.replaceState(null, "", conversation.id ? `#${conversation.id}` : location.pathname);
  draw();
  scrollToEnd(true);
  list();
  if (matchMedia("(min-width: 821px)").matches) field.text.focus();
}

function draw() {
  title.textContent = conversation.title || "New chat";
  document.title = conversation.title ? `${conversation.title} · Shoal` : "Shoal";
  exportButton.hidden = !conversation.id;
  if (!conversation.messages.length && !writing) {
    const hint = models.versions.length > 1 ? "Ask the newest version, or compare it with the model before training. Every reply can be recomputed from its seed." : "Every reply can be recomputed from its weights, prompt and seed.";
    thread.replaceChildren(h("div.welcome", {}, h("img", { src: "/static/shoal.svg", alt: "", width: "52", height: "52" }), h("h2", {}, `Talk to ${models.name}`), h("p", {}, hint)));
    return;
  }
  thread.replaceChildren(...pathTo(conversation.messages, conversation.leaf).map(element));
}

function element(message) {
  const groups = alternatives(conversation.messages, message);
  const onbranch = ({ id }) => showBranch(newestBelow(conversation.messages, id));
  if (message.role === "user") {
    return userMessage(message, { alternatives: groups, onbranch, onedit: (content) => write({ content, parent: message.parent }) });
  }
  const replies = groups.find((group) => group.some(({ id }) => id === message.id)) ?? [message];
  const lane = (reply) => replyMessage(reply, {
    path: `conversations/${conversation.id}/messages/${reply.id}`,
    alternatives: reply === replies[0] ? groups : null, onbranch,
    onregenerate: reply === replies.at(-1) ? () => write({ parent: message.parent, models: replies.map(({ facts }) => facts.model), target: message.facts.target }) : null,
    onpick: replies.length > 1 ? () => { onbranch(reply); field.text.focus(); } : null,
  });
  return replies.length > 1 ? h("div.lanes", {}, replies.map(lane)) : lane(message);
}

async function showBranch(leaf) {
  conversation.leaf = leaf;
  draw();
  await post(`conversations/${conversation.id}`, { leaf });
}

// Send a message and show the replies as they are written. Without `content`, request another reply to `parent`.
async function write(params) {
  if (writing) return;
  const body = { ...field.options(), ...params };
  const own = { abort: new AbortController(), lanes: [] };
  writing = own;
  field.setBusy(true);
  announce("The model is writing");
  try {
    if (!conversation.id) {
      const { id } = await post("conversations");
      conversation = { ...NEW, id, messages: [] };
      history.replaceState(null, "", `#${id}`);
    }
    const { id } = conversation;
    thread.replaceChildren(...pathTo(conversation.messages, params.parent ?? null).map(element));
    if (params.content !== undefined) thread.append(h("article.user", {}, h("div.bubble", {}, params.content)));
    const several = body.models.length > 1;
    own.lanes = body.models.map((model) => ({ text: "", element: h("article.reply.writing", {}, several ? h("header", {}, nameOf(model)) : null, h("div.body", {}, h("p.typing", {}, h("span"), h("span"), h("span")))) }));
    const elements = own.lanes.map((lane) => lane.element);
    thread.append(several ? h("div.lanes", {}, elements) : elements[0]);
    scrollToEnd(true);
    const response = await request(`conversations/${id}/replies`, { method: "POST", body, signal: own.abort.signal });
    for await (const event of readEvents(response)) {
      if (event.event === "text") {
        own.lanes[event.lane].text += event.text;
        paint(own.lanes[event.lane]);
      } else if (event.event === "failed") {
        throw new Error(event.error);
      }
    }
    announce("The reply is complete");
  } catch (error) {
    if (error.name !== "AbortError") return showFailure(error, params);
    announce("Stopped");
  } finally {
    if (writing === own) writing = null;
    field.setBusy(false);
  }
  await showSaved();
}

const nameOf = (id) => versionName(models.versions.find((version) => version.id === (id === models.name ? models.newest : id))?.version, id);

// Show the saved conversation. The server saves a stopped reply a moment after it was stopped.
async function showSaved() {
  const { id } = conversation;
  for (let tries = 0; tries < SAVE_TRIES && id; tries += 1) {
    const saved = await get(`conversations/${id}`);
    if (conversation.id !== id || writing) return;
    conversation = saved;
    if (saved.messages.find((message) => message.id === saved.leaf)?.role === "assistant") break;
    await new Promise((resolve) => setTimeout(resolve, SAVE_EVERY_MS));
  }
  draw();
  scrollToEnd();
  list();
}

async function showFailure(error, params) {
  announce(error.message);
  if (error instanceof RequestError && error.status === 401) return location.reload();
  if (conversation.id) conversation = await get(`conversations/${conversation.id}`).catch(() => conversation);
  draw();
  thread.append(h("div.failure", { role: "alert" }, h("p", {}, error.message),
    h("button.quiet", { onclick: () => write({ ...params, content: undefined, parent: conversation.leaf }) }, icon("again"), "Try again")));
  scrollToEnd(true);
}

function paint(lane) {
  if (lane.painting) return;
  lane.painting = requestAnimationFrame(() => {
    lane.painting = 0;
    const follow = isNearEnd();
    lane.element.querySelector(".body").replaceChildren(...prose(lane.text, { writing: true }));
    if (follow) scrollToEnd(true);
  });
}

const scroller = () => document.getElementById("scroll");
const isNearEnd = () => scroller().scrollHeight - scroller().scrollTop - scroller().clientHeight < FOLLOW_PX;
const scrollToEnd = (always = false) => { if (always || isNearEnd()) scroller().scrollTop = scroller().scrollHeight; };

function stop() {
  writing?.abort.abort();
}

async function removeConversation({ id, title: name }) {
  if (!confirm(`Delete “${name || "New chat"}”? This cannot be undone.`)) return;
  await remove(`conversations/${id}`);
  if (id === conversation.id) await open(null);
  else await list();
}

async function exportConversation() {
  save(await (await request(`conversations/${conversation.id}`)).blob(), `conversation-${conversation.id}.json`);
}

async function logOut() {
  await post("logout");
  location.assign("/");
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); if (side) showSidebar(false); }
  if (event.key === "k" && (event.ctrlKey || event.metaKey) && side) { event.preventDefault(); showSidebar(true); side.search.focus(); }
});

start().catch((error) => page.replaceChildren(h("main.entry", {}, h("div.card", {}, h("h1", {}, "The server is not available"), h("p", { role: "alert" }, error.message),
  h("button.primary", { onclick: () => location.reload() }, "Try again")))));
