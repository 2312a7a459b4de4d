// The draft tree of one round: words from left to right, every node on the line of its parent or below it. Edges run in the
// gaps between columns, so they never cross a word.

const ROW = 30, GAP = 34, PAD = 8, HEIGHT = 22, LONGEST = 18;
const FONT = "12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
const pen = document.createElement("canvas").getContext("2d");

/** Return a token as a word: without a leading space, and with visible line breaks. */
function word(text) {
  const visible = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const shown = visible.replace(/^ +$/, all => "␣".repeat(all.length)).replace(/^ /, "");
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown || "∅";
}

/** Return the nodes {parent, text, kind} of a round: accepted ones, rejected ones, and the target's own token. */
function nodesOf(trace) {
  const nodes = trace.tree.map(([parent, text], i) => ({ parent, text, kind: i ? "rejected" : "root" }));
  let here = 0;
  for (const token of trace.tokens) {
    if (token.source === "target") {
      nodes.push({ parent: here, text: token.text, kind: "own" });
      break;
    }
    const next = nodes.findIndex(({ parent, text }, i) => i > 0 && parent === here && text === token.text);
    if (next < 0) break;
    nodes[here = next].kind = "accepted";
  }
  return nodes;
}

const make = (name, attributes, text) => {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text !== undefined) one.textContent = text;
  return one;
};

/** Return the picture of a round. */
export function draw(trace) {
  const nodes = nodesOf(trace), widths = [];
  nodes.forEach(node => (node.children = []));
  nodes.forEach((node, i) => i && node.text !== null && nodes[node.parent].children.push(node));
  pen.font = FONT;
  let rows = 0;
  const place = (node, level) => {
    node.label = word(node.text ?? "");
    node.width = Math.ceil(pen.measureText(node.label).width) + 2 * PAD;
    node.level = level;
    node.row = node.children.length ? rows : rows++;
    widths[level] = Math.max(widths[level] ?? 0, node.width);
    node.children.forEach(child => place(child, level + 1));
  };
  place(nodes[0], 0);
  const left = widths.map((_, level) => widths.slice(0, level).reduce((sum, width) => sum + width + GAP, 1));
  const width = left.at(-1) + widths.at(-1) + 1, height = rows * ROW;
  const picture = make("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${trace.accepted} of ${trace.drafted} candidates accepted: ${trace.tokens.map(token => token.text).join("")}`,
  });
  const edges = make("g", {}), words = make("g", {});
  const about = { root: "the text so far", own: "added by the target" };
  const show = (node, parent) => {
    const x = left[node.level], y = node.row * ROW + ROW / 2;
    if (parent) {
      const from = left[parent.level] + parent.width, turn = left[parent.level] + widths[parent.level], above = parent.row * ROW + ROW / 2;
      const middle = (turn + x) / 2;
      edges.append(make("path", { d: `M${from} ${above}H${turn}C${middle} ${above} ${middle} ${y} ${x} ${y}`, class: node.kind }));
    }
    const group = make("g", { class: node.kind });
    group.append(
      make("title", {}, `${JSON.stringify(node.text ?? "")}: ${about[node.kind] ?? node.kind}`),
      make("rect", { x, y: y - HEIGHT / 2, width: node.width, height: HEIGHT, rx: 6 }),
      make("text", { x: x + PAD, y: y + 4 }, node.label),
    );
    words.append(group);
    node.children.forEach(child => show(child, node));
  };
  show(nodes[0], null);
  picture.append(edges, words);
  return picture;
}
