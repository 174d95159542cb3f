// Why a request went where it went: asked of the gateway when somebody wants to know.

import { ApiError, explain } from "./api.js";
import { make } from "./dom.js";
import { number, plural, time } from "./format.js";

/** Make a button that is replaced by the reasons. */
export function whyButton(requestId) {
  const place = make("span", { class: "why" });
  const button = make("button", { type: "button", class: "quiet", on: { click: show } }, "why there?");
  place.append(button);

  async function show() {
    button.disabled = true;
    try {
      place.replaceChildren(...reasons(await explain(requestId)));
    } catch (failure) {
      const known = failure instanceof ApiError && failure.code === "no_request";
      const text = known ? "the gateway does not remember it any more" : failure.message;
      place.replaceChildren(text);
    }
  }
  return place;
}

function reasons(told) {
  return told.decisions.flatMap((decision) => [
    make("p", {}, headline(decision)),
    candidates(decision, "prefill"),
    candidates(decision, "decode"),
    make("p", {}, expectation(decision.prediction)),
  ]);
}

function headline(decision) {
  const again = decision.attempt ? `Attempt ${decision.attempt + 1}: ` : "";
  return `${again}policy ${decision.policy}; the lowest score is the best.`;
}

function candidates(decision, role) {
  const [load, unit] =
    role === "prefill" ? ["pending_tokens", "tokens to read"] : ["reserved_blocks", "blocks taken"];
  const best = decision[`${role}s`].toSorted((a, b) => a.score - b.score);
  const shown = best.filter((worker, at) => at < 8 || worker.worker === decision[role]);
  const row = (cell, cells) => cells.map((text) => make(cell, {}, text));
  return make(
    "table",
    {},
    make("tr", {}, ...row("th", [role, unit, "score", "made of"])),
    ...shown.map((worker) => {
      const taken = worker.worker === decision[role];
      const name = taken ? `${worker.address} ← taken` : worker.address;
      const score = worker.score.toPrecision(3);
      const cells = row("td", [name, number(worker[load]), score, sum(worker.terms)]);
      return make("tr", { dataset: { taken: String(taken) } }, ...cells);
    }),
  );
}

/** What a score is the sum of; "" = it is none. */
function sum(terms) {
  if (!terms) return "";
  const say = (name, value) =>
    `${name}\u00a0${terms.is_s === false ? plural(value, "token") : time(value)}`;
  const there = (name, value) => (value ? [say(name, value)] : []);
  const how = terms.by_load ? ", by its load alone" : "";
  if (terms.step !== undefined) {
    const more = [...there("hand-over", terms.hand_over), ...there("no room", terms.no_room)];
    return [say("step", terms.step), ...more].join(" + ") + how;
  }
  const beside = [...there("fetch", terms.fetch), ...there("load", terms.load)];
  const waits = [say("wait", terms.wait), ...beside].join(" or ");
  return `${beside.length ? `the longest of ${waits}` : waits} + ${say("compute", terms.compute)}${how}`;
}

function expectation(prediction) {
  if (!prediction) return "Nothing was expected: the prefill worker knew no step times yet.";
  const { queue_s, own_s, prefill_s, handover_s } = prediction;
  return (
    `Expected: queue ${time(queue_s + own_s)} + prefill ${time(prefill_s)} + ` +
    `hand-over ${time(handover_s)}.`
  );
}
