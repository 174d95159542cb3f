// Why a request went where it went: asked of the gateway when somebody wants to know.

import { ApiError, explain } from "./api.js";
import { make } from "./dom.js";
import { number, time } from "./format.js";

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
    make("ul", {}, ...side(decision, "prefill"), ...side(decision, "decode")),
    make("p", {}, expectation(decision.prediction)),
  ]);
}

function headline(decision) {
  const again = decision.attempt ? `Attempt ${decision.attempt + 1}: ` : "";
  return `${again}policy ${decision.policy}; the lowest score is the best.`;
}

function side(decision, role) {
  const [load, unit] =
    role === "prefill" ? ["pending_tokens", "tokens to read"] : ["reserved_blocks", "blocks taken"];
  return decision[`${role}s`]
    .toSorted((a, b) => a.score - b.score)
    .slice(0, 8)
    .map((worker) => {
      const taken = worker.worker === decision[role];
      const words = `${role} ${worker.address}: ${number(worker[load])} ${unit}`;
      return make("li", { dataset: { taken: String(taken) } }, taken ? `${words} ← taken` : words);
    });
}

function expectation(prediction) {
  if (!prediction) return "Nothing was expected: the prefill worker knew no step times yet.";
  const { queue_s, own_s, prefill_s, handover_s } = prediction;
  return (
    `Expected: queue ${time(queue_s + own_s)} + prefill ${time(prefill_s)} + ` +
    `hand-over ${time(handover_s)}.`
  );
}
