// The token view: draws one sample at a time from the data embedded in the page.
"use strict";
(() => {
  const holder = document.getElementById("token-data");
  if (!holder) return;
  const byId = (name) => document.getElementById("token-" + name);
  const data = JSON.parse(holder.textContent);
  const lastStyle = 5;
  const place = byId("text");
  const detail = byId("detail");
  const hint = detail.textContent;

  const spans = () => Array.from(place.children);
  const passName = (token, last) => (token[2] === undefined ? "pass unknown" : `pass ${token[2] + 1} of ${last + 1}`);

  function visible(text) {
    // A line break or an empty piece would leave nothing to point at.
    if (text === "") return "·";
    return text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
  }

  function show(span) {
    for (const other of spans()) {
      other.tabIndex = other === span ? 0 : -1;
      other.setAttribute("aria-selected", String(other === span));
      other.classList.toggle("same-pass", other.dataset.pass !== undefined && other.dataset.pass === span.dataset.pass);
      other.classList.toggle("current", other === span);
    }
    detail.textContent = span.dataset.detail;
  }

  function draw() {
    const method = byId("method").value;
    const category = byId("category").value;
    const sample = data.samples.find((one) => one.method === method && one.category === category);
    place.replaceChildren();
    detail.textContent = hint;
    byId("prompt").textContent = sample ? sample.prompt : "";
    if (!sample) {
      byId("summary").textContent = "This method has no sample for this prompt.";
      return;
    }
    const passes = sample.tokens.map((token) => token[2]).filter((pass) => pass !== undefined);
    const last = passes.length ? Math.max(...passes) : 0;
    const drafted = sample.tokens.filter((token) => data.sources[token[1]] !== "target").length;
    const share = sample.tokens.length ? Math.round((100 * drafted) / sample.tokens.length) : 0;
    const inPasses = passes.length ? ` in ${new Set(passes).size} passes` : "";
    byId("summary").textContent = `${sample.tokens.length} tokens${inPasses}; ${drafted} of them drafted (${share} %).`;
    sample.tokens.forEach((token, index) => {
      const span = document.createElement("span");
      const source = data.sources[token[1]];
      span.textContent = visible(token[0]);
      span.className = `token source-${Math.min(token[1], lastStyle)}`;
      span.setAttribute("role", "option");
      span.tabIndex = index === 0 ? 0 : -1;
      if (token[2] !== undefined) {
        span.dataset.pass = token[2];
        if (index && sample.tokens[index - 1][2] !== token[2]) span.classList.add("starts-pass");
      }
      span.dataset.detail = `${JSON.stringify(token[0])} · source: ${source} · ${passName(token, last)}`
        + ` · token ${index + 1} of ${sample.tokens.length}`;
      span.title = span.dataset.detail;
      place.append(span);
    });
  }

  for (const kind of ["mouseover", "focusin", "click"]) {
    place.addEventListener(kind, (event) => {
      const span = event.target.closest(".token");
      if (span) show(span);
    });
  }
  place.addEventListener("keydown", (event) => {
    const all = spans();
    const here = all.indexOf(document.activeElement);
    const goals = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: all.length - 1 };
    const goal = all[goals[event.key]];
    if (here < 0 || !goal) return;
    event.preventDefault();
    goal.focus();
  });
  byId("method").addEventListener("change", draw);
  byId("category").addEventListener("change", draw);
  byId("passes").addEventListener("change", (event) => place.classList.toggle("no-passes", !event.target.checked));
  byId("view").hidden = false;
  draw();
})();
