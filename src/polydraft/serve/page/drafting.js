// What speculation did: tokens by source, figures, and the draft tree of every round of the last answer.

import { at, make } from "/page/parts.js";
import { draw } from "/page/tree.js";

const CALM = 500;  // milliseconds between two updates of figures and tree during an answer

const KINDS = {
  target: "the target's own",
  draft: "drafted by the draft model",
  text: "drafted from the text so far, or from stored text",
  prediction: "drafted from the prediction",
  forced: "forced by the grammar",
};
const MODELS = ["model", "head", "dynamic", "mtp", "target-init", "early-exit"];

/** Return the kind of a token's source; the server's own names are more precise, and are shown as titles. */
export const kindOf = source => (source in KINDS ? source : MODELS.includes(source) ? "draft" : "text");

/** Return a function that splits leaves of Markdown at the tokens of a message, and marks those that were drafted. */
export function byToken(tokens) {
  const starts = [];
  tokens.reduce((start, [length]) => (starts.push(start), start + length), 0);
  return leaf => {
    if (leaf.at === undefined) return [leaf];
    let low = 0, high = starts.length;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= leaf.at) low = middle;
      else high = middle;
    }
    const found = [], end = leaf.at + leaf.text.length;
    for (let i = low, from = leaf.at; from < end; i += 1) {
      const to = Math.min(starts[i + 1] ?? end, end), text = leaf.text.slice(from - leaf.at, to - leaf.at);
      const source = tokens[i]?.[1] ?? "target", marked = { class: `token ${kindOf(source)}`, title: source };
      if (text) found.push(source === "target" ? { text } : { tag: "span", attrs: marked, children: [{ text }] });
      from = to;
    }
    return found;
  };
}

const rate = about => (about.later && about.seconds > 0 ? about.later / about.seconds : 0);

/** Return one line of figures about an answer. */
export function summary({ about }) {
  if (!about?.tokens) return "";
  const parts = [`${about.tokens} tokens`];
  if (rate(about)) parts.push(`${rate(about).toFixed(1)} tokens/s`);
  parts.push(`${(about.tokens / about.passes).toFixed(2)} tokens per pass`);
  if (about.end === "length") parts.push("ended at the limit of tokens");
  return parts.join(" · ");
}

/** Add the tokens and the round of a new piece of an answer to its message. */
export function count(message, text, trace, now) {
  const tokens = trace?.tokens ?? [];
  // If the server has cut something from the text, its tokens cannot be found there.
  const fits = tokens.map(token => token.text).join("") === text;
  message.tokens.push(...(fits ? tokens.map(token => [token.text.length, token.source]) : text ? [[text.length, "target"]] : []));
  message.content += text;
  if (!trace) return;
  const about = (message.about ??= { tokens: 0, passes: 0, drafted: 0, later: 0, seconds: 0 });
  about.tokens += tokens.length;
  about.passes += 1;
  about.drafted += tokens.filter(token => token.source !== "target").length;
  about.later += about.passes > 1 ? tokens.length : 0;  // the first round's time includes the prompt
  const rounds = roundsOf(message);
  rounds.first ??= now;
  about.seconds = (now - rounds.first) / 1000;
  rounds.push(trace);
}

const kept = new WeakMap();
function roundsOf(message) {
  if (!kept.has(message)) kept.set(message, []);
  return kept.get(message);
}

let shown = null, chosen = null, timer = 0, last = 0;

/** Show the panel of a message, soon or `now`. */
export function tell(message, now = false) {
  if (message !== shown) [shown, chosen] = [message, null];
  clearTimeout(timer);
  const wait = now ? 0 : Math.max(last + CALM - performance.now(), 0);
  if (wait) timer = setTimeout(panel, wait);
  else panel();
}

function panel() {
  last = performance.now();
  if (at("drafting").hidden) return;
  const about = shown?.about, rounds = shown ? roundsOf(shown) : [];
  const figures = about?.tokens ? [
    [(about.tokens / about.passes).toFixed(2), "tokens per pass"],
    [rate(about) ? rate(about).toFixed(1) : "…", "tokens per second"],
    [`${Math.round((100 * about.drafted) / about.tokens)} %`, "of them drafted"],
  ] : [];
  at("figures").replaceChildren(...figures.map(([value, name]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const present = new Set((shown?.tokens ?? []).map(([, source]) => kindOf(source)));
  const legend = Object.keys(KINDS).filter(kind => present.has(kind));
  at("legend").replaceChildren(...legend.map(kind => make("li", {}, make("span", { class: `token ${kind}` }), KINDS[kind])));
  at("rounds").hidden = !rounds.length;
  at("no-rounds").hidden = rounds.length > 0;
  if (rounds.length) showRound(rounds);
}

function showRound(rounds) {
  const drafted = i => rounds[i].tree.length > 1;
  let i = chosen ?? rounds.findLastIndex((_, one) => drafted(one));
  if (i < 0) i = rounds.length - 1;
  const outcome = drafted(i) ? `${rounds[i].accepted} of ${rounds[i].drafted} accepted` : "no candidates";
  at("round").textContent = `Round ${i + 1} of ${rounds.length}: ${outcome}`;
  at("round-before").disabled = i === 0;
  at("round-after").disabled = i === rounds.length - 1;
  at("tree").replaceChildren(draw(rounds[i]));
  at("tree").dataset.round = i;
}

function step(by) {
  chosen = Number(at("tree").dataset.round) + by;
  panel();
}

at("round-before").addEventListener("click", () => step(-1));
at("round-after").addEventListener("click", () => step(1));
at("tree").addEventListener("keydown", event => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.shiftKey) return;
  event.preventDefault();
  const button = at(by < 0 ? "round-before" : "round-after");
  if (!button.disabled) step(by);
});
