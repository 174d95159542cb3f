// The gateway's API as this page uses it: typed failures, answers as a stream of events, the key.

const KEY = "pdmesh.api-key";

/** The visitor's API key: in this tab's session only. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
};

/** The gateway answered with an error. code: its code, e.g. "queue_full". retryAfterS: when to come
 * again, 0 if it did not say. */
export class ApiError extends Error {
  constructor(status, body, retryAfterS = 0) {
    const error = body?.error ?? {};
    super(error.message ?? `the gateway answered ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.retryAfterS = error.retry_after_s ?? retryAfterS;
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** Nothing answered, or the answer broke off. */
export class Unreachable extends Error {}

async function request(path, options) {
  const headers = { ...options.headers };
  const key = apiKey.get();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new Unreachable("the gateway cannot be reached", { cause: failure });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body, Number(response.headers.get("Retry-After")) || 0);
}

/** The cluster now. Throws ApiError, Unreachable; signal's AbortError or TimeoutError. */
export const cluster = (signal) => asked("cluster", signal);

/** Why one of the last requests went where it went. */
export const explain = (requestId) => asked(`cluster/requests/${encodeURIComponent(requestId)}`);

async function asked(path, signal) {
  const response = await request(path, { signal });
  try {
    return await response.json();
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new Unreachable("the gateway's answer broke off", { cause: failure });
  }
}

/** Ask for a chat answer; yields OpenAI's chunks as they come, ends with the stream. Leaving the
 * loop or aborting the signal cancels the answer everywhere. Throws ApiError, Unreachable. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, include_receipt: true },
    }),
    signal,
  });
  const requestId = response.headers.get("x-request-id") ?? "";
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk);
    yield { ...chunk, requestId };
  }
  throw new Unreachable("the connection broke off in the middle of the answer");
}

/** The data of each server-sent event of a stream. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      let part;
      try {
        part = await reader.read();
      } catch (failure) {
        if (failure.name === "AbortError") throw failure;
        throw new Unreachable("the connection broke off in the middle of the answer", {
          cause: failure,
        });
      }
      if (part.done) return;
      text += part.value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const event of whole) {
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
