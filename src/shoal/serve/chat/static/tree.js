// A conversation's messages as a tree: pure functions on [{id, parent, role, facts}], oldest first.

export function pathTo(messages, leaf) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = byId.get(leaf); at; at = byId.get(at.parent)) path.push(at);
  return path.reverse();
}

// The alternatives at one place of the tree. Replies that stand side by side are one alternative.
export function alternatives(messages, message) {
  const groups = [];
  for (const one of messages) {
    if (one.parent !== message.parent || one.role !== message.role) continue;
    const last = groups.at(-1);
    if (last && one.facts?.pair && last[0].facts?.pair === one.facts.pair) last.push(one);
    else groups.push([one]);
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

// "Today", "Yesterday", "Earlier" for a list that is sorted by `changed_s`, newest first.
export function byDay(conversations, now = new Date()) {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime() / 1000;
  const names = [["Today", midnight], ["Yesterday", midnight - 86400], ["Earlier", -Infinity]];
  return names.map(([name, from], n) => [name, conversations.filter((one) =>
    one.changed_s >= from && (n === 0 || one.changed_s < names[n - 1][1]))]).filter(([, own]) => own.length);
}
