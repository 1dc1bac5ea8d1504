import assert from "node:assert/strict";
import test from "node:test";
import { inline, parse, render, splitThinking } from "../../../src/shoal/watch/page/shared/markdown.js";

const h = (kind, attributes = {}, ...children) => ({ kind, attributes, children: children.flat(9).filter(Boolean) });
const code = (lang, text) => ({ kind: "code", lang, text });
const kinds = (text) => parse(text).map((block) => block.kind);
const flat = (parts) => parts.map((part) => part.text ?? `${part.kind}(${part.inline ? flat(part.inline) : ""})`).join("");

test("every kind of block is parsed", () => {
  const text = "# Title\n\nwords\nmore\n\n- a\n- b\n\n1. c\n\n> quoted\n\n```py\nx = 1\n```\n\n---\n\n| a | b |\n|---|---|\n| 1 | 2 |";
  assert.deepEqual(kinds(text), ["h", "p", "list", "list", "quote", "code", "hr", "table"]);
});

test("HTML stays text", () => {
  const [block] = render(parse("<img src=x onerror=alert(1)> <script>alert(2)</script>"), h, code);
  assert.equal(block.kind, "p");
  assert.deepEqual(block.children, ["<img src=x onerror=alert(1)> <script>alert(2)</script>"]);
});

test("only web and mail addresses become links", () => {
  for (const unsafe of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "//evil", "\u0001javascript:x", "file:///etc/passwd"]) {
    assert.ok(!inline(`[x](${unsafe})`).some((part) => part.kind === "link"), unsafe);
  }
  assert.equal(inline("[x](https://a.example/b)")[0].href, "https://a.example/b");
  assert.equal(inline("see https://a.example/b.")[1].href, "https://a.example/b");
});

test("emphasis requires delimiters next to its text", () => {
  assert.equal(flat(inline("**a** *b* ~~c~~ snake_case_name 2 * 3 * 4")), "strong(a) em(b) del(c) snake_case_name 2 * 3 * 4");
  assert.equal(flat(inline("\\*no\\*")), "*no*");
  assert.deepEqual(inline("`a*b*`"), [{ kind: "code", text: "a*b*" }]);
});

test("an unclosed fence is code", () => {
  assert.deepEqual(parse("```js\nlet a"), [{ kind: "code", lang: "js", text: "let a", open: true }]);
  assert.equal(parse("```\n``\n```")[0].text, "``");
});

test("lists nest and keep their numbers", () => {
  const [list] = parse("3. one\n   - inner\n   - more\n4. two");
  assert.deepEqual([list.ordered, list.start, list.items.length], [true, 3, 2]);
  assert.deepEqual(list.items[0].map((block) => block.kind), ["p", "list"]);
  assert.equal(parse("- a\n\n- b").length, 1);
});

test("formulas are recognized; prices and shell variables stay text", () => {
  assert.deepEqual(inline("so \\(a_1 * b_2\\) and $x^2$.").filter((part) => part.kind === "math").map((part) => part.text), ["a_1 * b_2", "x^2"]);
  for (const plain of ["it costs $5 and $6", "$HOME", "a $ b $ c", "\\$5", "\\( open"]) assert.ok(!inline(plain).some((part) => part.kind === "math"), plain);
  assert.deepEqual(parse("so\n$$\na\n+b\n$$\nthen"), [
    { kind: "p", inline: [{ kind: "text", text: "so" }] }, { kind: "math", display: true, text: "a\n+b" }, { kind: "p", inline: [{ kind: "text", text: "then" }] }]);
  assert.deepEqual(kinds("\\[ x \\]"), ["math"]);
  assert.deepEqual(kinds("$$ never ends"), ["p"]);
});

test("a short row of a table is filled, a long one is cut", () => {
  const [table] = parse("a|b\n-|-\n1\n");
  assert.equal(table.kind, "table");
  assert.equal(parse("a|b\n-|-\n1|2|3")[0].rows[0].length, 2);
});

test("hostile text is parsed in linear time", () => {
  const start = process.cpuUsage().user;
  for (const text of ["*a ".repeat(4000), "_".repeat(8000), "[".repeat(8000), "`".repeat(8000), "> ".repeat(4000) + "x", "- ".repeat(3000), "**".repeat(6000), "~~a".repeat(4000), "http://".repeat(2000)]) parse(text);
  assert.ok(process.cpuUsage().user - start < 20e6);
});

test("thinking is separate from the answer", () => {
  assert.deepEqual(splitThinking("plain"), { thinking: null, answer: "plain", open: false });
  assert.deepEqual(splitThinking("<think>\na\nb\n</think>\n\nc"), { thinking: "a\nb", answer: "c", open: false });
  assert.deepEqual(splitThinking("<think>a"), { thinking: "a", answer: "", open: true });
});
