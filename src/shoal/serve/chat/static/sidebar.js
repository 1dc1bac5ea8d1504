// The list of conversations: new, search, open, delete; who is logged in, theme, log out.

import { h, icon } from "./dom.js";
import { byDay } from "./tree.js";

export function sidebar({ me, onnew, onopen, ondelete, onlogout, onclose }) {
  const list = h("nav.list", { "aria-label": "Conversations" });
  let all = [], at = null;
  const search = h("input.field", { type: "search", placeholder: "Search", "aria-label": "Search titles", oninput: () => show(all, at) });

  function show(conversations, current) {
    [all, at] = [conversations, current];
    const wanted = search.value.trim().toLowerCase();
    conversations = all.filter((one) => (one.title || "New chat").toLowerCase().includes(wanted));
    const entry = (one) => h("div.entry-row", {},
      h("button.open", { onclick: () => onopen(one.id), "aria-current": one.id === current ? "page" : undefined, title: one.title }, one.title || "New chat"),
      h("button.quiet.remove", { "aria-label": `Delete “${one.title}”`, onclick: () => ondelete(one) }, icon("bin")));
    list.replaceChildren(...byDay(conversations).map(([day, own]) => h("section", {}, h("h2", {}, day), own.map(entry))));
    if (!conversations.length) list.append(h("p.none", {}, search.value ? "Nothing found." : "Your conversations appear here."));
  }

  const element = h("aside.side", { id: "side", "aria-label": "Sidebar" },
    h("div.brand", {}, h("img", { src: "/static/shoal.svg", alt: "", width: "26", height: "26" }), h("span", {}, "Shoal"),
      h("button.quiet.only-small", { "aria-label": "Close the sidebar", onclick: onclose }, icon("cross"))),
    h("button.new", { onclick: onnew }, icon("plus"), "New chat"),
    h("div.search", {}, icon("search"), search),
    list,
    h("div.foot", {}, h("span.who", {}, me.open ? "This machine" : me.name),
      h("button.quiet", { "aria-label": "Switch between light and dark", onclick: () => globalThis.toggleTheme() }, icon("theme")),
      me.open ? null : h("button.quiet", { "aria-label": "Log out", onclick: onlogout }, icon("out"))));
  return { element, show, search };
}
