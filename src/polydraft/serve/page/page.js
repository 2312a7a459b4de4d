// The chat page: conversations, the answer in progress, and the buttons around them.

import { choices, Failure, model } from "/page/api.js";
import { byToken, count, summary, tell } from "/page/drafting.js";
import { parse, show } from "/page/markdown.js";
import { at, button, copy, make, notice, say } from "/page/parts.js";
import { apiKey, forgetTalk, keepSettings, keepTalk, newTalk, settings, talks, whenOthersChange } from "/page/storage.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "system", "speculative"];
const NEAR_END = 40;  // pixels from the end that count as the end
const FRAME = 60;  // milliseconds between two updates of an answer
const MOST_ATTEMPTS = 6, LONGEST_TITLE = 60;
const IDEAS = ["Explain why the sky is blue", "Write a Python function that finds prime numbers", "Compare tea and coffee in a table"];

let talk = newTalk();
let running = null;  // {message, abort} of the answer in progress
let following = true;  // whether to keep scrolling to the end

const narrow = matchMedia("(max-width: 56rem)");

// ---- The conversation

function fill(box, message) {
  const body = box.querySelector(".body"), written = running?.message === message;
  if (message.role === "user") body.textContent = message.content;
  else {
    show(body, parse(message.content, written), settings.colours ? byToken(message.tokens ?? []) : undefined);
    box.querySelector(".about").textContent = written ? "" : summary(message);
    box.querySelector(".thought").hidden = !message.thought;
    box.querySelector(".thought span").textContent = message.thought ?? "";
  }
  body.classList.toggle("waiting", written && !message.content);
  box.querySelector(".acts").style.visibility = written ? "hidden" : "visible";
}

function turn(message) {
  const box = make("article", { class: `turn ${message.role}`, "aria-label": message.role === "user" ? "You" : "Answer" });
  const acts = make("div", { class: "acts" }, button("copy", "Copy", event => copy(message.content, event.currentTarget)));
  if (message.role === "user") acts.append(button("pen", "Edit", () => edit(message, box)));
  else {
    acts.append(button("again", "Another answer", () => again(message)), make("span", { class: "about" }));
    box.append(make("details", { class: "thought" }, make("summary", {}, "Thoughts"), make("span")));
  }
  box.append(make("div", { class: "body" }), acts);
  fill(box, message);
  return box;
}

function showTalk() {
  at("talk").replaceChildren(...talk.messages.map(turn));
  at("title").textContent = talk.title || "New conversation";
  document.title = talk.title ? `${talk.title} · polydraft` : "polydraft";
  at("welcome").hidden = talk.messages.length > 0;
  for (const id of ["export-markdown", "export-json"]) at(id).disabled = !talk.messages.length;
  tell(talk.messages.findLast(one => one.role === "assistant") ?? null, true);
  showList();
  following = true;
  keepEnd();
}

function keepEnd() {
  const main = at("scroll");
  if (following) main.scrollTop = main.scrollHeight;
  at("to-end").hidden = following;
}

function edit(message, box) {
  const words = make("textarea", { rows: Math.min(message.content.split("\n").length + 1, 12), "aria-label": "Edit the message" });
  const send = () => {
    const text = words.value.trim();
    if (!text) return;
    halt();
    talk.messages.splice(talk.messages.indexOf(message));
    ask(text);
  };
  words.value = message.content;
  words.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) [event.preventDefault(), send()];
    if (event.key === "Escape") [event.stopPropagation(), showTalk(), at("text").focus()];
  });
  const actions = [make("button", { onclick: showTalk }, "Cancel"), make("button", { class: "main", onclick: send }, "Send")];
  box.replaceChildren(make("div", { class: "edit" }, words, ...actions));
  words.focus();
}

function again(message) {
  halt();
  const i = talk.messages.indexOf(message);
  talk.messages.splice(message.role === "assistant" ? i : i + 1);
  showTalk();
  answer();
}

// ---- Asking and answering

/** Send the message in the input field. */
function ask(text) {
  halt();
  const words = text.replace(/\s+/g, " ");
  talk.title ||= words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE - 1)}…` : words;
  talk.messages.push({ role: "user", content: text });
  showTalk();
  answer();
}

/** Return the body of a request: the settings, and the conversation without unanswered questions. */
function request() {
  const { messages } = talk, system = (settings.system ?? "").trim();
  const said = messages.filter((one, i) => one.content && !(one.role === "user" && messages[i + 1]?.role === "user"));
  const body = { messages: said.map(({ role, content }) => ({ role, content })), speculative: { trace: true } };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (settings.speculative === "off") body.speculative.tree = "none";
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  return body;
}

/** Get the answer to the last message; wait and ask again while the server is too busy. */
async function answer() {
  notice("");
  const own = talk, message = { role: "assistant", content: "", tokens: [] }, abort = new AbortController(), body = request();
  const mine = (running = { message, abort });
  own.messages.push(message);
  store(own);
  const box = turn(message);
  at("talk").append(box);
  busy(true);
  keepEnd();
  if (!narrow.matches) at("text").focus();  // on a phone, that would open the keyboard
  let drawn = 0;
  const redraw = () => {
    drawn = 0;
    fill(box, message);
    if (running === mine) tell(message);
    keepEnd();
  };
  let failure = null;
  try {
    for await (const choice of patiently(body, abort.signal)) {
      message.thought = (message.thought ?? "") + (choice.delta.reasoning_content ?? "") || undefined;
      count(message, choice.delta.content ?? "", choice.trace, performance.now());
      if (choice.finish_reason && message.about) message.about.end = choice.finish_reason;
      drawn ||= setTimeout(redraw, FRAME);
    }
  } catch (error) {
    if (error.name !== "AbortError") failure = error;
  }
  clearTimeout(drawn);
  if (!message.content && !message.thought) {
    own.messages.splice(own.messages.indexOf(message), 1);
    box.remove();
  }
  if (own.messages.length) store(own);
  if (running !== mine) return;  // another answer has begun
  running = null;
  busy(false);
  fill(box, message);
  tell(message, true);
  keepEnd();
  if (failure) explain(failure, () => (message.content ? again(message) : answer()));
  say(failure ? "" : abort.signal.aborted ? "Stopped" : "The answer is complete");
}

async function* patiently(body, signal) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      yield* choices(body, apiKey(), signal);
      return;
    } catch (error) {
      if (!error.wait || attempt === MOST_ATTEMPTS) throw error;
      await pause(error, Math.min(error.wait * attempt, 60), signal);
    }
  }
}

/** Wait for some seconds, or until the user wants to try at once. */
function pause({ status }, seconds, signal) {
  return new Promise((resolve, reject) => {
    const finish = call => [clearTimeout(timer), notice(""), call()];
    const timer = setTimeout(() => finish(resolve), 1000 * seconds);
    const why = status === 429 ? "The server is busy." : "The server cannot answer now.";
    notice(`${why} Trying again in ${seconds} s.`, { act: "Try now", call: () => finish(resolve) });
    signal.addEventListener("abort", () => finish(() => reject(signal.reason)), { once: true });
  });
}

function explain(error, retry) {
  const needsKey = error.status === 401;
  notice(needsKey ? "This server needs an API key." : error instanceof Failure ? error.message : `The page failed: ${error.message}`, {
    act: needsKey ? "Enter it" : "Try again",
    call: needsKey ? () => openSettings("key") : retry,
  });
}

function halt() {
  running?.abort.abort();
  running = null;
  busy(false);
}

function busy(is) {
  at("talk").setAttribute("aria-busy", is);
  at("stop").hidden = !is;
  at("send").hidden = is;
  if (is) say("The answer is being written");
}

function sendText() {
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  grow();
  ask(text);
}

// ---- The list of conversations

function store(one) {
  one.changed = Date.now();
  if (!keepTalk(one)) notice("This browser has no room for the conversation; delete others, or export it.", { error: true });
  showList();
}

function open(one) {
  halt();
  notice("");
  talk = one;
  if (narrow.matches) toggle("side", false);
  showTalk();
  at("text").focus();
}

function showList() {
  const items = talks().map(one => {
    const current = one.id === talk.id, item = make("li", current ? { class: "current" } : {});
    const name = make("button", { class: "name", onclick: () => current || open(one) }, one.title || "New conversation");
    if (current) name.setAttribute("aria-current", "true");
    item.append(name, button("pen", "Rename", () => rename(one, item)), button("bin", "Delete", () => remove(one)));
    return item;
  });
  at("talks").replaceChildren(...items);
}

function rename(one, item) {
  const own = one.id === talk.id ? talk : one, field = make("input", { "aria-label": "Name", value: one.title });
  const finish = () => {
    own.title = field.value.trim() || own.title;
    keepTalk(own);
    own === talk && !running ? showTalk() : showList();
  };
  field.addEventListener("blur", finish, { once: true });
  field.addEventListener("keydown", event => {
    if (event.key === "Escape") field.value = "";
    if (["Enter", "Escape"].includes(event.key)) [event.stopPropagation(), field.blur()];
  });
  item.replaceChildren(field);
  field.select();
}

function remove(one) {
  const own = one.id === talk.id ? talk : one;
  if (own === talk) open(newTalk());
  forgetTalk(own);
  showList();
  notice(`Deleted “${own.title}”.`, { error: false, act: "Undo", call: () => [keepTalk(own), open(own)] });
}

/** Offer the conversation as a file. */
function save(kind) {
  const { title, messages } = talk, name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
  const spoken = messages.map(one => `**${one.role === "user" ? "You" : at("model").textContent || "Answer"}**\n\n${one.content}\n`);
  const plain = { title, messages: messages.map(({ role, content }) => ({ role, content })) };
  const text = kind === "md" ? `# ${title}\n\n${spoken.join("\n")}` : JSON.stringify(plain, null, 2);
  const address = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
  make("a", { href: address, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// ---- Settings and panels

function openSettings(field) {
  at("settings").showModal();
  at(field).focus();
}

async function meetModel() {
  try {
    at("model").textContent = (await model(apiKey())).id;
    for (const one of document.querySelectorAll(".model")) one.textContent = at("model").textContent;
  } catch (error) {
    explain(error, meetModel);
  }
}

function toggle(id, open = at(id).hidden) {
  at(id).hidden = !open;
  at(`${id}-toggle`).setAttribute("aria-expanded", open);
  if (!narrow.matches) [(settings[id] = open), keepSettings()];
  if (id === "drafting") tell(talk.messages.findLast(one => one.role === "assistant") ?? null, true);
}

/** Open the panels that were open last time; none on narrow screens. */
function arrange() {
  toggle("side", !narrow.matches && (settings.side ?? true));
  toggle("drafting", !narrow.matches && (settings.drafting ?? innerWidth > 1250));
}

function grow() {
  at("text").style.height = "auto";
  at("text").style.height = `${at("text").scrollHeight}px`;
}

function paint() {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
}

for (const name of [...FIELDS, "theme"]) {
  at(name).value = settings[name] ?? at(name).value;
  at(name).addEventListener("input", () => {
    settings[name] = at(name).validity.valid ? at(name).value : "";
    keepSettings();
    paint();
  });
}
at("colours").checked = settings.colours ?? false;
at("colours").addEventListener("change", event => {
  settings.colours = event.target.checked;
  keepSettings();
  talk.messages.forEach((message, i) => fill(at("talk").children[i], message));
});
at("key").value = apiKey();
at("key").addEventListener("change", event => {
  apiKey(event.target.value.trim());
  notice("");
  meetModel();
});
for (const id of ["side-toggle", "side-close", "drafting-toggle", "drafting-close"]) {
  at(id).addEventListener("click", () => toggle(id.split("-")[0]));
}
narrow.addEventListener("change", arrange);
at("settings-open").addEventListener("click", () => openSettings("system"));
at("settings-close").addEventListener("click", () => at("settings").close());
at("settings").addEventListener("click", event => event.target === at("settings") && at("settings").close());
at("notice-close").addEventListener("click", () => notice(""));
at("fresh").addEventListener("click", () => open(newTalk()));
at("export-markdown").addEventListener("click", () => save("md"));
at("export-json").addEventListener("click", () => save("json"));
at("send").addEventListener("click", sendText);
at("stop").addEventListener("click", () => running?.abort.abort());
at("text").addEventListener("input", grow);
at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) [event.preventDefault(), sendText()];
  const mine = [...document.querySelectorAll(".turn.user")].at(-1);
  if (event.key === "ArrowUp" && !at("text").value && mine && !running) {
    event.preventDefault();
    edit(talk.messages.findLast(one => one.role === "user"), mine);
  }
});
addEventListener("keydown", event => {
  if (event.key === "Escape" && !at("settings").open) running?.abort.abort();
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") [event.preventDefault(), open(newTalk())];
});
at("talk").addEventListener("click", event => {
  const from = event.target.closest(".copy-code");
  if (from) copy(from.closest(".code").querySelector("code").textContent, from);
});
at("scroll").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = at("scroll");
  following = scrollHeight - scrollTop - clientHeight < NEAR_END;
  at("to-end").hidden = following;
});
at("to-end").addEventListener("click", () => [(following = true), keepEnd()]);
addEventListener("resize", keepEnd);
addEventListener("pagehide", () => talk.messages.length && keepTalk(talk));
whenOthersChange(showList);
at("ideas").append(...IDEAS.map(idea => make("button", { onclick: () => ask(idea) }, idea)));
paint();
arrange();
showTalk();
meetModel();
