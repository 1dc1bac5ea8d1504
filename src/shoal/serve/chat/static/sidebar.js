// The sidebar: the list of conversations with its controls, the user's name, the theme, and the logout.

import { h, icon } from "./dom.js";
import { byDay } from "./tree.js";

export function sidebar({ me, onnew, onopen, ondelete, onlogout, onclose }) {
  const list = h("nav.list", { "aria-label": "Conversations" });
  let conversations = [], current = null;
  const search = h("input.field", { type: "search", placeholder: "Search", "aria-label": "Search titles", oninput: draw });

  function show(newConversations, newCurrent) {
    [conversations, current] = [newConversations, newCurrent];
    draw();
  }

  function draw() {
    const query = search.value.trim().toLowerCase();
    const matches = conversations.filter(({ title }) => (title || "New chat").toLowerCase().includes(query));
    const row = (conversation) => h("div.conversation", {},
      h("button.open", { onclick: () => onopen(conversation.id), "aria-current": conversation.id === current ? "page" : undefined, title: conversation.title }, conversation.title || "New chat"),
      h("button.quiet.remove", { "aria-label": `Delete “${conversation.title}”`, onclick: () => ondelete(conversation) }, icon("bin")));
    list.replaceChildren(...byDay(matches).map(([day, group]) => h("section", {}, h("h2", {}, day), group.map(row))));
    if (!matches.length) list.append(h("p.empty", {}, query ? "No results." : "Your conversations appear here."));
  }

  const element = h("aside.side", { id: "side", "aria-label": "Sidebar" },
    h("div.brand", {}, h("img", { src: "/static/shoal.svg", alt: "", width: "26", height: "26" }), h("span", {}, "Shoal"),
      h("button.quiet.small-only", { "aria-label": "Close the sidebar", onclick: onclose }, icon("cross"))),
    h("button.new-chat", { onclick: onnew }, icon("plus"), "New chat"),
    h("div.search", {}, icon("search"), search),
    list,
    h("div.footer", {}, h("span.user-name", {}, me.open ? "This machine" : me.name),
      h("button.quiet", { "aria-label": "Switch between light and dark", onclick: () => globalThis.toggleTheme() }, icon("theme")),
      me.open ? null : h("button.quiet", { "aria-label": "Log out", onclick: onlogout }, icon("out"))));
  return { element, show, search };
}
