// The conversation: asks, shows the answer as it comes, and its receipt when it is over.

import { ApiError, Unreachable, chat } from "./api.js";
import { byId, make } from "./dom.js";
import { plural } from "./format.js";
import { receiptFigure } from "./receipt.js";
import { openSettings, requestFields, systemMessages } from "./settings.js";

const EXAMPLES = [
  "The code of the red door is 4821. The code of the red box is 1111. What is the code of the red door?",
  "What is 17 + 25?",
  "Tell me a story about a fox.",
];

const log = byId("log");
const question = byId("question");
const sendButton = byId("send");
const stopButton = byId("stop");

/** Turns that the model has seen and answered, in the API's form. */
let history = [];
let running = null;

/** Wire the chat. onActivity: called when an answer begins or ends. */
export function startChat(onActivity) {
  const form = byId("composer");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || running) return;
    question.value = "";
    fit();
    void ask(text, onActivity);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  question.addEventListener("input", fit);
  stopButton.addEventListener("click", () => running?.abort());
  byId("reset").addEventListener("click", reset);
  byId("examples").append(
    ...EXAMPLES.map((text) =>
      make(
        "li",
        {},
        make("button", { type: "button", on: { click: () => void ask(text, onActivity) } }, text),
      ),
    ),
  );
  // A finger's first touch should not be met by a keyboard that covers the page.
  if (matchMedia("(hover: hover)").matches) question.focus({ preventScroll: true });
}

function reset() {
  running?.abort();
  history = [];
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  question.focus();
}

/** Let the box grow with its text; its greatest height is in the style sheet. */
function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

async function ask(text, onActivity) {
  if (running) return;
  byId("welcome").hidden = true;
  const shown = make("div", { class: "text" });
  const turn = make(
    "article",
    { class: "turn answer", "aria-label": "Answer", "aria-busy": "true" },
    shown,
  );
  log.append(
    make(
      "article",
      { class: "turn question", "aria-label": "Question" },
      make("div", { class: "text" }, text),
    ),
    turn,
  );
  log.scrollTop = log.scrollHeight;
  const messages = [...history, { role: "user", content: text }];
  const abort = new AbortController();
  setRunning(abort, onActivity);
  const answer = new Answer(shown);
  let isWhole = false;
  try {
    for await (const chunk of chat(
      { ...requestFields(), messages: [...systemMessages(), ...messages] },
      abort.signal,
    )) {
      keepInView(() => answer.take(chunk));
    }
    keepInView(() => turn.append(...answer.closing()));
    isWhole = true;
  } catch (failure) {
    const again = () => {
      if (running) return;
      turn.previousElementSibling.remove();
      turn.remove();
      void ask(text, onActivity);
    };
    keepInView(() => turn.append(failed(failure, answer, abort.signal, again)));
  } finally {
    turn.removeAttribute("aria-busy");
    // The model remembers what was answered or stopped; not what failed, nor what was reset.
    if (answer.text && (isWhole || abort.signal.aborted) && turn.isConnected) {
      history = [...messages, { role: "assistant", content: answer.text }];
    }
    if (running === abort) setRunning(null, onActivity);
  }
}

function setRunning(abort, onActivity) {
  const hadFocus = document.activeElement;
  running = abort;
  sendButton.hidden = abort !== null;
  stopButton.hidden = abort === null;
  if (hadFocus === sendButton || hadFocus === stopButton || hadFocus === document.body)
    question.focus({ preventScroll: true });
  onActivity();
}

/** What has come of one answer. */
class Answer {
  text = "";
  #shown;
  #thought = null;
  #node = document.createTextNode("");
  #usage = null;
  #receipt = null;
  #finish = "";
  #requestId = "";

  constructor(shown) {
    this.#shown = shown;
    shown.append(this.#node);
  }

  take(chunk) {
    this.#requestId = chunk.requestId;
    const choice = chunk.choices?.[0];
    const thought = choice?.delta?.reasoning_content;
    if (thought) this.#think(thought);
    const text = choice?.delta?.content ?? "";
    if (text) {
      if (!this.text && this.#thought) this.#thought.open = false;
      this.text += text;
      this.#node.appendData(text);
    }
    this.#finish = choice?.finish_reason ?? this.#finish;
    this.#usage = chunk.usage ?? this.#usage;
    this.#receipt = chunk.receipt ?? this.#receipt;
  }

  /** Thinking is open until the answer begins. */
  #think(text) {
    if (!this.#thought) {
      this.#thought = make(
        "details",
        { class: "thought", open: "" },
        make("summary", {}, "Thinking"),
        make("p", {}, document.createTextNode("")),
      );
      this.#shown.before(this.#thought);
    }
    this.#thought.lastChild.firstChild.appendData(text);
  }

  closing() {
    const parts = [];
    if (!this.text && !this.#thought)
      parts.push(make("p", { class: "aside" }, "The model answered with nothing."));
    if (this.#finish === "length")
      parts.push(
        make("p", { class: "aside" }, "Cut off: the answer has as many tokens as it may have."),
      );
    if (this.#receipt) parts.push(receiptFigure(this.#receipt, this.#usage, this.#requestId));
    return parts;
  }
}

/** Say what went wrong, and what to do. */
function failed(failure, answer, signal, again) {
  if (signal.aborted) {
    return make(
      "p",
      { class: "aside" },
      answer.text ? "Stopped. The mesh has dropped the rest." : "Stopped before the first token.",
    );
  }
  if (!(failure instanceof ApiError) && !(failure instanceof Unreachable)) console.error(failure);
  const status = failure.status > 200 ? `${failure.status} ` : "";
  const title = failure instanceof ApiError ? `${status}${failure.code}` : "no answer";
  const button = make(
    "button",
    { type: "button", class: "quiet", on: { click: again } },
    "Ask again",
  );
  const box = make(
    "div",
    { class: "alert", role: "alert" },
    make("strong", {}, title),
    " ",
    sentence(failure.message),
    " ",
    button,
  );
  if (failure.needsKey) {
    openSettings(keyReason(failure));
  } else if (failure.retryAfterS > 0) {
    button.before(`Try again in ${plural(Math.ceil(failure.retryAfterS), "second")}. `);
  }
  return box;
}

/** Why a key is asked for, in the gateway's own words. */
export const keyReason = (failure) =>
  sentence(
    failure.code === "invalid_api_key"
      ? "this key is not known to the gateway"
      : "this gateway needs an API key",
  );

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** Change the log; if its end was in view, it stays in view. */
function keepInView(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
