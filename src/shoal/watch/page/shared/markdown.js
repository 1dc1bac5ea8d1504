// Parse Markdown into a tree of plain objects (`parse`), and turn the tree into elements (`render`). HTML stays text.
//
// Blocks: p h code math list quote table hr. Inline: text code math strong em del link br. Nesting is bounded, and time is
// linear in practice. Left out: images (the page contacts no third party), reference links, footnotes, raw HTML.

const MAX_DEPTH = 8;
const SAFE_URL = /^(https?:\/\/|mailto:)[^\s<>"]+$/i;

export function parse(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = /^ {0,3}(```+|~~~+)\s*([^`\s]*)[^`]*$/.exec(line))) {
      const [, fence, lang] = match;
      const body = [];
      at += 1;
      while (at < lines.length && !closesFence(lines[at], fence)) body.push(lines[at++]);
      blocks.push({ kind: "code", lang, text: body.join("\n"), open: at >= lines.length });
      at += 1;
    } else if ((match = /^ {0,3}(\$\$|\\\[)(.*)$/.exec(line)) && lines.slice(at, at + MAX_MATH_LINES).some((other, n) => (n ? other : match[2]).includes(ENDS[match[1]]))) {
      const end = ENDS[match[1]];
      const body = [];
      for (let rest = match[2]; ; rest = lines[at]) {
        at += 1;
        const cut = rest.indexOf(end);
        body.push(cut < 0 ? rest : rest.slice(0, cut));
        if (cut < 0) continue;
        if (rest.slice(cut + 2).trim()) lines[--at] = rest.slice(cut + 2);
        break;
      }
      blocks.push({ kind: "math", display: true, text: body.join("\n").trim() });
    } else if ((match = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line))) {
      blocks.push({ kind: "h", level: match[1].length, inline: inline(match[2]) });
      at += 1;
    } else if (/^ {0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      blocks.push({ kind: "hr" });
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) {
      const body = [];
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) body.push(lines[at++].replace(/^ {0,3}> ?/, ""));
      blocks.push({ kind: "quote", blocks: parse(body.join("\n"), depth + 1) });
    } else if (matchItem(line) && depth < MAX_DEPTH) {
      const [list, next] = listAt(lines, at, depth);
      blocks.push(list);
      at = next;
    } else if (line.includes("|") && at + 1 < lines.length && /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/.test(lines[at + 1])) {
      const head = splitCells(line);
      const rows = [];
      at += 2;
      while (at < lines.length && lines[at].includes("|") && lines[at].trim()) rows.push(splitCells(lines[at++]));
      blocks.push({ kind: "table", head: head.map(inline), rows: rows.map((row) => head.map((_, n) => inline(row[n] ?? ""))) });
    } else {
      const body = [line.trim()];
      at += 1;
      while (at < lines.length && lines[at].trim() && !startsBlock(lines[at])) body.push(lines[at++].replace(/^ +/, ""));
      blocks.push({ kind: "p", inline: inline(body.join("\n")) });
    }
  }
  return blocks;
}

const MAX_MATH_LINES = 60;
const ENDS = { "$$": "$$", "\\[": "\\]" };
const closesFence = (line, fence) => {
  const trimmed = line.trim();
  return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
};
const matchItem = (line) => /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/.exec(line);
const startsBlock = (line) => /^ {0,3}(```|~~~|#{1,6}\s|>|\$\$|\\\[)/.test(line) || matchItem(line);
const splitCells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function listAt(lines, at, depth) {
  const first = matchItem(lines[at]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  while (at < lines.length) {
    const match = matchItem(lines[at]);
    if (!match || match[1].length !== indent || /\d/.test(match[2]) !== ordered) break;
    const inner = indent + match[2].length + 1;
    const body = [match[3]];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const leading = line.length - line.trimStart().length;
      if (line.trim() && (leading > indent || (!startsBlock(line) && lines[at - 1].trim()))) {
        body.push(line.slice(Math.min(leading, inner)));
      } else if (!line.trim() && at + 1 < lines.length && /^ /.test(lines[at + 1]) && lines[at + 1].length - lines[at + 1].trimStart().length > indent) {
        body.push("");
      } else {
        break;
      }
      at += 1;
    }
    items.push(parse(body.join("\n"), depth + 1));
    const next = at + 1 < lines.length ? matchItem(lines[at + 1]) : null;
    if (at < lines.length && !lines[at].trim() && next && next[1].length === indent) at += 1;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items }, at];
}

const TOKENS = [
  ["math", /\\\(([^\n]{1,1000}?)\\\)/y],
  ["math", /\$\$([^$\n]{1,1000})\$\$/y],
  ["math", /\$(?=[^\s$])([^$\n]{0,1000}?[^\s$\\])\$(?![\w$])/y],
  ["escape", /\\([\\`*_{}[\]()#+\-.!|<>~$])/y],
  ["code", /(`+)(?!`)([^\n]*?[^`\n])\1(?!`)/y],
  ["strong", /\*\*(?=\S)([^*]*(?:\*(?!\*)[^*]*)*?\S)\*\*|__(?=\S)([^_]*\S)__(?!\w)/y],
  ["em", /\*(?=[^\s*])([^*]*[^\s*])\*|_(?=[^\s_])([^_]*[^\s_])_(?!\w)/y],
  ["del", /~~(?=\S)([^~]*\S)~~/y],
  ["link", /\[([^\][]{1,500})\]\(([^()\s]{1,2000})\)/y],
  ["auto", /https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?]/y],
  ["br", / {2,}\n|\\\n/y],
];

export function inline(text, depth = 0) {
  const parts = [];
  let plain = "";
  const flush = () => {
    if (plain) parts.push({ kind: "text", text: plain });
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    const hit = "\\`*_~[h $".includes(text[at]) && depth < MAX_DEPTH ? tokenAt(text, at, plain) : null;
    if (!hit) {
      plain += text[at];
      at += 1;
      continue;
    }
    const [kind, match] = hit;
    at += match[0].length;
    if (kind === "escape") {
      plain += match[1];
      continue;
    }
    const inner = match[1] ?? match[2];
    if ((kind === "link" && !SAFE_URL.test(match[2])) || (kind === "auto" && !SAFE_URL.test(match[0]))) {
      plain += match[0];
      continue;
    }
    flush();
    if (kind === "math") parts.push({ kind, text: match[1], display: false });
    else if (kind === "code") parts.push({ kind, text: match[2].replace(/^ (.+) $/, "$1") });
    else if (kind === "link") parts.push({ kind, href: match[2], inline: inline(match[1], MAX_DEPTH) });
    else if (kind === "auto") parts.push({ kind: "link", href: match[0], inline: [{ kind: "text", text: match[0] }] });
    else if (kind === "br") parts.push({ kind });
    else parts.push({ kind, inline: inline(inner, depth + 1) });
  }
  flush();
  return parts;
}

function tokenAt(text, at, before) {
  for (const [kind, pattern] of TOKENS) {
    if (text[at] === "_" && /\w$/.test(before)) return null; // snake_case
    if (kind === "auto" && /\w$/.test(before)) continue;
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) return [kind, match];
  }
  return null;
}

// Split a reply into its thinking and its answer. `open`: the model is still thinking.
export function splitThinking(text) {
  const start = /^\s*<think(?:ing)?>\n?/.exec(text);
  if (!start) return { thinking: null, answer: text, open: false };
  const rest = text.slice(start[0].length);
  const end = /\n?<\/think(?:ing)?>\s*/.exec(rest);
  if (!end) return { thinking: rest, answer: "", open: true };
  return { thinking: rest.slice(0, end.index), answer: rest.slice(end.index + end[0].length), open: false };
}

// `h` is the function in dom.js. `code(lang, text)` makes a code block, and `math(text, display)` makes a formula.
export function render(blocks, h, code, math) {
  const spans = (parts) =>
    parts.map((part) => {
      if (part.kind === "text") return part.text;
      if (part.kind === "br") return h("br");
      if (part.kind === "code") return h("code", {}, part.text);
      if (part.kind === "math") return math(part.text, false);
      if (part.kind === "link") return h("a", { href: part.href, target: "_blank", rel: "noopener noreferrer" }, spans(part.inline));
      return h(part.kind, {}, spans(part.inline));
    });
  return blocks.map((block) => {
    if (block.kind === "p") return h("p", {}, spans(block.inline));
    if (block.kind === "h") return h(`h${Math.min(6, block.level + 2)}`, {}, spans(block.inline));
    if (block.kind === "hr") return h("hr");
    if (block.kind === "code") return code(block.lang, block.text);
    if (block.kind === "math") return math(block.text, true);
    if (block.kind === "quote") return h("blockquote", {}, render(block.blocks, h, code, math));
    if (block.kind === "table") {
      const row = (kind) => (parts) => h(kind, {}, spans(parts));
      return h("div.table", { tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, block.head.map(row("th")))),
        h("tbody", {}, block.rows.map((cells) => h("tr", {}, cells.map(row("td")))))));
    }
    const items = block.items.map((inner) =>
      h("li", {}, inner.length === 1 && inner[0].kind === "p" ? spans(inner[0].inline) : render(inner, h, code, math)));
    return h(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: String(block.start) } : {}, items);
  });
}
