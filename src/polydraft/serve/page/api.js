// The part of the server's API that the page uses.

/** An answer that failed or broke off. */
export class Failure extends Error {
  /** `status` is 0 without a response; `wait` is the number of seconds before trying again, if that may help. */
  constructor(message, status = 0, wait = null) {
    super(message);
    this.status = status;
    this.wait = wait;
  }
}

const LOST = "The connection was lost before the answer was complete.";

async function call(path, options, key) {
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("The server cannot be reached. Is it running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const wait = [429, 503].includes(answer.status) ? Number(answer.headers.get("retry-after")) || 2 : null;
  throw new Failure(told?.error?.message ?? `The server answered with status ${answer.status}.`, answer.status, wait);
}

/** Return what the server says about its model. */
export const model = async key => (await (await call("/v1/models", {}, key)).json()).data[0];

/** Yield the choices of a streamed answer. */
export async function* choices(body, key, signal) {
  const answer = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal }, key);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      throw error.name === "AbortError" ? error : new Failure(LOST);
    });
    if (done) throw new Failure(LOST);
    const events = (left + value).split("\n\n");
    left = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Failure(chunk.error.message);
      if (chunk.choices[0]) yield chunk.choices[0];
    }
  }
}
