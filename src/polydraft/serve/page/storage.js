// What the browser stores: settings, and conversations, each under its own key, so that two tabs do not overwrite each other's.
// The API key is kept until the tab is closed.

const TALK = "polydraft.talk.";
const SETTINGS = "polydraft.settings";
const KEY = "polydraft.key";

/** Return the value stored under a name; nothing if it is broken, or the browser stores nothing. */
function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

/** Store a value; return whether there was space. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = read(SETTINGS) ?? {};
export const keepSettings = () => write(SETTINGS, settings);

export function apiKey(value) {
  try {
    if (value !== undefined) sessionStorage.setItem(KEY, value);
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return value ?? "";
  }
}

/** Return all conversations, most recently changed first. */
export function talks() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage)) if (name.startsWith(TALK)) found.push(read(name));
  } catch { /* the browser stores nothing */ }
  return found.filter(talk => Array.isArray(talk?.messages)).sort((one, other) => other.changed - one.changed);
}

export function newTalk() {
  const changed = Date.now();
  return { id: `${changed}-${Math.random().toString(36).slice(2, 8)}`, title: "", changed, messages: [] };
}

export const keepTalk = talk => write(TALK + talk.id, talk);

export function forgetTalk(talk) {
  try {
    localStorage.removeItem(TALK + talk.id);
  } catch { /* the browser stores nothing */ }
}

/** Call when another tab has changed a conversation. */
export const whenOthersChange = call => addEventListener("storage", event => event.key?.startsWith(TALK) && call());
