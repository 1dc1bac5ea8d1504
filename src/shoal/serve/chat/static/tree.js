// A conversation's messages as a tree: pure functions on [{id, parent, role, facts}], oldest first.

export function pathTo(messages, leaf) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = byId.get(leaf); at; at = byId.get(at.parent)) path.push(at);
  return path.reverse();
}

// The alternatives to a message: groups of one message, or of replies that are shown side by side.
export function alternatives(messages, message) {
  const groups = [];
  for (const sibling of messages) {
    if (sibling.parent !== message.parent || sibling.role !== message.role) continue;
    const last = groups.at(-1);
    if (last && sibling.facts?.pair && last[0].facts?.pair === sibling.facts.pair) last.push(sibling);
    else groups.push([sibling]);
  }
  return groups;
}

// The newest message below this one.
export function newestBelow(messages, id) {
  for (;;) {
    const child = messages.findLast((message) => message.parent === id);
    if (!child) return id;
    id = child.id;
  }
}

// Group a list that is sorted by `changed_s`, newest first, into "Today", "Yesterday" and "Earlier".
export function byDay(conversations, now = new Date()) {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime() / 1000;
  const days = [["Today", midnight, Infinity], ["Yesterday", midnight - 86400, midnight], ["Earlier", -Infinity, midnight - 86400]];
  const within = (from, to) => conversations.filter((conversation) => conversation.changed_s >= from && conversation.changed_s < to);
  return days.map(([day, from, to]) => [day, within(from, to)]).filter(([, group]) => group.length);
}
