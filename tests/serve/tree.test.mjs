import assert from "node:assert/strict";
import test from "node:test";
import { EventParser } from "../../src/shoal/serve/chat/static/stream.js";
import { alternatives, byDay, newestBelow, pathTo } from "../../src/shoal/serve/chat/static/tree.js";

const question = (id, parent) => ({ id, parent, role: "user", facts: {} });
const reply = (id, parent, pair = null) => ({ id, parent, role: "assistant", facts: { pair } });
const MESSAGES = [question("q", null), reply("a", "q"), reply("b1", "q", "p"), reply("b2", "q", "p"), question("r", "a"), question("edited", null)];
const ids = (messages) => messages.map((message) => message.id);

test("a path runs from the first message to the leaf", () => {
  assert.deepEqual(ids(pathTo(MESSAGES, "r")), ["q", "a", "r"]);
  assert.deepEqual(pathTo(MESSAGES, null), []);
});

test("replies side by side are one alternative", () => {
  assert.deepEqual(alternatives(MESSAGES, MESSAGES[1]).map(ids), [["a"], ["b1", "b2"]]);
  assert.deepEqual(alternatives(MESSAGES, MESSAGES[0]).map(ids), [["q"], ["edited"]]);
});

test("a branch ends at its newest message", () => {
  assert.equal(newestBelow(MESSAGES, "q"), "b2");
  assert.equal(newestBelow(MESSAGES, "a"), "r");
});

test("conversations are grouped by day", () => {
  const now = new Date(2026, 4, 5, 12);
  const at = (days) => ({ changed_s: now.getTime() / 1000 - days * 86400 });
  assert.deepEqual(byDay([at(0), at(1), at(9)], now).map(([day, group]) => [day, group.length]), [["Today", 1], ["Yesterday", 1], ["Earlier", 1]]);
});

test("events are parsed wherever the chunks are cut", () => {
  const stream = 'data: {"a":"x\\n\\ny"}\n\ndata: {"b":1}\n\n';
  for (let cut = 1; cut < stream.length; cut += 1) {
    const parser = new EventParser();
    assert.deepEqual([...parser.feed(stream.slice(0, cut)), ...parser.feed(stream.slice(cut))], [{ a: "x\n\ny" }, { b: 1 }]);
  }
});
