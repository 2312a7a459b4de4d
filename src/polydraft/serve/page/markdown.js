// Markdown as DOM nodes. Texts come from a model, so nothing is parsed as HTML: `parse` returns plain objects whose tags
// and attributes are chosen in this file, and `show` makes nodes of them. All other text is shown literally, tags included.
//
// A node is {tag, attrs, children}, or a leaf {text, at}: `at` is where it begins in the source, so that parts of the source,
// such as tokens, can be found again in what is shown.

const FENCE = /^( {0,3})(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const SPECIAL = /[\\`*_~[!<h\n]/g;
const DEEPEST = 12;

const element = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** Return the blocks of a text. With `open`, more text will follow, and bold and code are shown as such once they begin. */
export function parse(text, open = false) {
  let at = 0;
  const lines = text.split("\n").map(line => ({ text: line, at: (at += line.length + 1) - line.length - 1 }));
  return blocks(lines, open, 0);
}

function blocks(lines, open, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) i += 1;
    else {
      const reader = depth < DEEPEST && [fence, heading, rule, quote, list, table].find(one => one.starts(lines, i));
      const [block, next] = (reader || paragraph).read(lines, i, open, depth);
      found.push(block);
      i = next;
    }
  }
  return found;
}

const isBlank = line => line.text.trim() === "";
const cut = (line, count) => ({ text: line.text.slice(count), at: line.at + count });
const indent = line => line.text.length - line.text.trimStart().length;

const fence = {
  starts: (lines, i) => FENCE.test(lines[i].text),
  read(lines, i) {
    const [, space, mark, language] = FENCE.exec(lines[i].text);
    const end = new RegExp(`^ {0,3}${mark[0] === "~" ? "~" : "`"}{${mark.length},} *$`);
    const close = lines.findIndex((line, j) => j > i && end.test(line.text));
    const inside = lines.slice(i + 1, close < 0 ? lines.length : close);
    const leaves = inside.map((line, j) => {
      const rest = cut(line, Math.min(indent(line), space.length));
      return { text: rest.text + (j + 1 < inside.length ? "\n" : ""), at: rest.at };
    });
    const copy = element("button", [{ text: "Copy" }], { type: "button", class: "copy-code" });
    const bar = element("div", [element("span", [{ text: language || "text" }]), copy], { class: "code-bar" });
    return [element("div", [bar, element("pre", [element("code", leaves)], { tabindex: "0" })], { class: "code" }),
      close < 0 ? lines.length : close + 1];
  },
};

const heading = {
  starts: (lines, i) => HEADING.test(lines[i].text),
  read(lines, i, open) {
    const [, marks, words] = HEADING.exec(lines[i].text);
    const line = cut(lines[i], lines[i].text.indexOf(words, lines[i].text.indexOf(marks) + marks.length));
    return [element(`h${marks.length}`, inline([{ text: words, at: line.at }], open)), i + 1];
  },
};

const rule = {
  starts: (lines, i) => RULE.test(lines[i].text),
  read: (lines, i) => [element("hr", []), i + 1],
};

const quote = {
  starts: (lines, i) => QUOTE.test(lines[i].text),
  read(lines, i, open, depth) {
    const inside = [];
    for (; i < lines.length && QUOTE.test(lines[i].text); i += 1) inside.push(cut(lines[i], QUOTE.exec(lines[i].text)[0].length));
    return [element("blockquote", blocks(inside, open, depth + 1)), i];
  },
};

const list = {
  starts: (lines, i) => ITEM.test(lines[i].text),
  read(lines, i, open, depth) {
    const [, , first] = ITEM.exec(lines[i].text), items = [];
    const kind = mark => (/\d/.test(mark) ? mark.slice(-1) : mark);
    for (let own = 0; i < lines.length; i += 1) {
      const line = lines[i], item = ITEM.exec(line.text);
      if (items.length && (isBlank(line) || indent(line) >= own)) items.at(-1).push(cut(line, Math.min(indent(line), own)));
      else if (item && kind(item[2]) === kind(first) && !RULE.test(line.text)) {
        own = item[0].length + (item[3] ? 0 : 1);
        if (item[3].length > 4) own -= item[3].length - 1;  // this much space belongs to the item itself
        items.push([cut(line, Math.min(own, line.text.length))]);
      } else if (!isBlank(lines[i - 1]) && !startsBlock(lines, i)) items.at(-1).push(line);
      else break;
    }
    const children = items.map(inside => element("li", tight(blocks(inside, open, depth + 1))));
    const ordered = /\d/.test(first);
    return [element(ordered ? "ol" : "ul", children, ordered ? { start: String(parseInt(first, 10)) } : {}), i];
  },
};

/** Return an item's blocks without a paragraph around its first words. */
const tight = found => (found[0]?.tag === "p" ? [...found[0].children, ...found.slice(1)] : found);

const table = {
  starts: (lines, i) => lines[i].text.includes("|") && i + 1 < lines.length && lines[i + 1].text.includes("-") &&
    COLUMNS.test(lines[i + 1].text) && cells(lines[i]).length === cells(lines[i + 1]).length,
  read(lines, i, open) {
    const sides = cells(lines[i + 1]).map(({ text }) => (/^:.*:$/.test(text) ? "center" : text.endsWith(":") ? "right" : ""));
    const row = (line, tag) => {
      const found = cells(line);
      return element("tr", sides.map((side, k) => element(tag, found[k] ? inline([found[k]], open) : [], side ? { class: side } : {})));
    };
    const head = element("thead", [row(lines[i], "th")]), rows = [];
    for (i += 2; i < lines.length && !isBlank(lines[i]) && lines[i].text.includes("|"); i += 1) rows.push(row(lines[i], "td"));
    return [element("div", [element("table", [head, element("tbody", rows)])], { class: "table", tabindex: "0" }), i];
  },
};

function cells(line) {
  const { text } = line, found = [];
  let from = text.search(/[^ ]/) + (text.trimStart().startsWith("|") ? 1 : 0);
  for (let i = from; i <= text.length; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (i === text.length ? text.slice(from).trim() : text[i] === "|") {
      const inside = text.slice(from, i), space = inside.length - inside.trimStart().length;
      found.push({ text: inside.trim(), at: line.at + from + space });
      from = i + 1;
    }
  }
  return found;
}

const paragraph = {
  read(lines, i, open, depth) {
    const own = [];
    do own.push(cut(lines[i], indent(lines[i])));
    while (++i < lines.length && !isBlank(lines[i]) && (depth >= DEEPEST || !startsBlock(lines, i)));
    return [element("p", inline(own, open)), i];
  },
};

const startsBlock = (lines, i) => [fence, heading, rule, quote, list, table].some(one => one.starts(lines, i));

/** Return the leaves and elements of some lines of a paragraph. */
function inline(lines, open) {
  const text = lines.map(line => line.text).join("\n"), starts = [];
  lines.reduce((start, line) => (starts.push(start), start + line.text.length + 1), 0);
  let line = 0;
  const place = i => {
    while (starts[line] > i) line -= 1;
    while (starts[line + 1] <= i) line += 1;
    return lines[line].at + i - starts[line];
  };
  return spans({ text, place, open }, 0, text.length, 0);
}

function spans(whole, from, to, depth) {
  const { text, place, open } = whole, found = [], unclosed = new Set();
  let plain = from;
  const flush = end => {
    if (plain < end) found.push({ text: text.slice(plain, end), at: place(plain) });
  };
  const add = (node, start, next) => {
    flush(start);
    if (node) found.push(node);
    plain = next;
    return next;
  };
  /** Look for the end of what a mark began; if there is none, there is none further on, either. */
  const closing = (mark, start) => {
    if (unclosed.has(mark)) return -1;
    const end = mark[0] === "`" ? codeEnd(text, mark, start, to) : emphasisEnd(text, mark, start, to);
    if (end < 0) unclosed.add(mark);
    return end < 0 && open && to === text.length && (mark.length === 2 || mark === "`") ? to : end;
  };
  for (let i = from; i < to; ) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text)?.index ?? to;
    if (next >= to) break;
    i = next;
    const one = text[i];
    if (one === "\n") i = add(element("br", []), i, i + 1);
    else if (one === "\\" && i + 1 < to && PUNCTUATION.test(text[i + 1])) {
      add(null, i, i + 1);
      i += 2;
    } else if (one === "`") {
      const mark = /^`+/.exec(text.slice(i, to))[0], start = i + mark.length, end = closing(mark, start);
      if (end < 0) i = start;
      else {
        const padded = end - start > 2 && text[start] === " " && text[end - 1] === " " ? 1 : 0;
        i = add(element("code", leaves(whole, start + padded, end - padded)), i, Math.min(end + mark.length, to));
      }
    } else if (depth < DEEPEST && (one === "*" || one === "_" || text.startsWith("~~", i))) {
      let length = 1;
      while (length < 3 && text[i + length] === one) length += 1;
      if (one === "~") length = 2;
      const mark = one.repeat(length), start = i + length;
      const begins = start < to && !/\s/.test(text[start]) && (one !== "_" || !/\w/.test(text[i - 1] ?? ""));
      const end = begins ? closing(mark, start) : -1;
      if (end < 0) i = start;
      else {
        const inside = spans(whole, start, end, depth + 1);
        const tag = one === "~" ? "del" : length === 1 ? "em" : "strong";
        i = add(element(tag, length === 3 ? [element("em", inside)] : inside), i, Math.min(end + length, to));
      }
    } else if (depth < DEEPEST && (one === "[" || text.startsWith("![", i)) && !unclosed.has("]")) {
      const link = linkAt(text, one === "!" ? i + 1 : i, to);
      if (!link) i += 1;
      else if (!link.address) i = link.end ? link.end : (unclosed.add("]"), i + 1);
      else {
        const words = spans(whole, link.from, link.to, depth + 1);
        i = add(anchor(link.address, words.length ? words : [{ text: link.address }]), i, link.end);
      }
    } else if (one === "<" || one === "h") {
      ADDRESS.lastIndex = one === "<" ? i + 1 : i;
      const address = ADDRESS.exec(text.slice(0, to))?.[0].replace(/[.,;:!?'*_)\]]+$/, "");
      const start = one === "<" ? i + 1 : i, end = start + (address?.length ?? 0), wrapped = one === "<";
      const fits = safe(address) && (wrapped ? text[end] === ">" : !/\w/.test(text[i - 1] ?? ""));
      i = fits ? add(anchor(address, leaves(whole, start, end)), i, end + (wrapped ? 1 : 0)) : i + 1;
    } else i += 1;
  }
  flush(to);
  return found;
}

/** Return a part of a paragraph as leaves, one per line. */
function leaves({ text, place }, from, to) {
  const found = [];
  for (let i = from; i < to; ) {
    const end = text.indexOf("\n", i), stop = end < 0 || end >= to ? to : end + 1;
    found.push({ text: text.slice(i, stop).replace("\n", " "), at: place(i) });
    i = stop;
  }
  return found;
}

function codeEnd(text, mark, from, to) {
  for (let i = text.indexOf(mark, from); i >= 0 && i + mark.length <= to; ) {
    let end = i;
    while (text[end] === "`") end += 1;
    if (end - i === mark.length) return i;
    i = text.indexOf(mark, end);
  }
  return -1;
}

function emphasisEnd(text, mark, from, to) {
  for (let i = from; i < to; ) {
    if (text[i] === "\\") i += 2;
    else if (text[i] === mark[0]) {
      let end = i;
      while (end < to && text[end] === mark[0]) end += 1;
      const closes = !/\s/.test(text[i - 1]) && (mark[0] !== "_" || !/\w/.test(text[end] ?? ""));
      if (closes && (end - i === mark.length || (end - i === 3 && mark.length < 3 && i > from))) return end - mark.length;
      i = end;
    } else i += 1;
  }
  return -1;
}

/** Return where a link's words and the link itself end, and its address, if there is a safe one. */
function linkAt(text, open, to) {
  let depth = 0, close = open;
  for (; close < to; close += 1) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") depth += 1;
    else if (text[close] === "]" && --depth === 0) break;
  }
  if (close >= to) return {};
  const rest = /^\(<?((?:[^\s<>()]|\([^\s<>()]*\))*)>?(?: +(?:"[^"\n]*"|'[^'\n]*'))?\)/.exec(text.slice(close + 1, Math.min(to, close + 2050)));
  if (!rest || !safe(rest[1])) return null;
  return { address: rest[1], from: open + 1, to: close, end: close + 1 + rest[0].length };
}

/** Whether an address may be opened: it must be absolute, and a web or mail address. */
export function safe(address) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

const anchor = (address, words) => element("a", words, { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });

/**
 * Show nodes in an element. Existing nodes are changed as little as possible, so that selections, focus and scroll positions
 * survive while a text grows.
 *
 * `leaf` may split a leaf into several nodes, to mark parts of the source.
 */
export function show(parent, nodes, leaf = one => [one]) {
  const wanted = nodes.flatMap(node => (node.tag ? [node] : leaf(node)));
  wanted.forEach((node, i) => {
    const old = parent.childNodes[i];
    const kept = old && (node.tag ? old.nodeName.toLowerCase() === node.tag : old.nodeType === Node.TEXT_NODE);
    const made = kept ? old : node.tag ? document.createElement(node.tag) : document.createTextNode(node.text);
    if (!kept) old ? old.replaceWith(made) : parent.append(made);
    if (!node.tag) {
      if (made.data !== node.text) made.data = node.text;
      return;
    }
    for (const { name } of [...made.attributes]) if (!(name in node.attrs)) made.removeAttribute(name);
    for (const [name, value] of Object.entries(node.attrs)) if (made.getAttribute(name) !== value) made.setAttribute(name, value);
    show(made, node.children, node.attrs.class === "token" ? undefined : leaf);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}
