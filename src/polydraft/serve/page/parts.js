// Elements that several parts of the page create or use.

export const at = id => document.getElementById(id);

/** Announce a text to screen readers. */
export const say = text => (at("said").textContent = text);

/** Return a new element. */
export function make(tag, attributes = {}, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else one.setAttribute(name, value);
  }
  one.append(...children);
  return one;
}

export function icon(name) {
  const [svg, use] = ["svg", "use"].map(tag => document.createElementNS("http://www.w3.org/2000/svg", tag));
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

/** Return a button with an icon. */
export const button = (name, label, onclick) =>
  make("button", { class: "icon", type: "button", title: label, "aria-label": label, onclick }, icon(name));

/** Show a one-line notice with an optional action; hide it if the text is empty. */
export function notice(text, { act = "", call = null, error = true } = {}) {
  at("notice").hidden = !text;
  at("notice").classList.toggle("error", error);
  at("notice").firstElementChild.textContent = text;
  at("notice-act").hidden = !act;
  at("notice-act").textContent = act;
  at("notice-act").onclick = () => {
    notice("");
    call();
  };
}

/** Copy a text, and say so in the button that was clicked. */
export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers deny the clipboard to pages that come from other machines without TLS
    const box = make("textarea");
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const before = [...from.childNodes];
  from.disabled = true;
  from.replaceChildren(from.classList.contains("icon") ? icon("check") : "Copied");
  setTimeout(() => [(from.disabled = false), from.replaceChildren(...before)], 1200);
  say("Copied");
}
