// A receipt as a picture: the phases up to the first token, the KV transfer beside them, and the
// whole answer; each with its number, and in words for who points at it or tabs to it.

import { make, say } from "./dom.js";
import { number, plural, rate, shortId, size, time } from "./format.js";
import { whyButton } from "./why.js";

/** In order of time; they add up to the time to first token. */
const PHASES = [
  ["queue", "queue_s", "queue", "waited for a place in the gateway"],
  ["route", "route_s", "route", "chose a pair of workers"],
  ["retry", "retry_s", "retry", "lost to attempts that failed"],
  ["wait", "prefill_queue_s", "prefill queue", "waited on the prefill worker"],
  ["prefill", "prefill_s", "prefill", "read the prompt and computed token 1"],
  ["handover", "handover_s", "hand-over", "messages and streams"],
];

/** Make the figure of one receipt. usage: the answer's token counts, or null. */
export function receiptFigure(receipt, usage, requestId) {
  if (receipt.ttft_s === undefined)
    return make("div", { class: "receipt" }, facts(receipt, usage, requestId));
  const phases = PHASES.map(([kind, field, name, text]) => ({
    kind,
    name,
    text,
    seconds: receipt[field],
  })).filter((phase) => phase.seconds > 0);
  const answer = answerSegments(receipt);
  const transfer = placedTransfer(receipt);
  const scale = Math.max(receipt.ttft_s, transfer?.end ?? 0);
  const readout = make("p", { class: "readout", "aria-hidden": "true" });
  const rest = summary(receipt);
  say(readout, rest);
  const rows = [
    row("first token", receipt.ttft_s, bar(phases, receipt.ttft_s, scale), "ttft"),
    transfer &&
      row(
        "KV transfer",
        receipt.transfer_s,
        bar([transfer.segment], null, scale, transfer.start),
        "transfer",
      ),
    answer.length > 1 &&
      row("whole answer", receipt.e2e_s, bar(answer, receipt.e2e_s, receipt.e2e_s), "answer"),
  ].filter(Boolean);
  const chart = make(
    "div",
    {
      class: "chart",
      role: "group",
      "aria-label": "Receipt: where the time went. Arrow keys walk through the phases",
    },
    ...rows,
  );
  walkable(chart, readout, rest);
  return make(
    "div",
    { class: "receipt" },
    chart,
    readout,
    make(
      "div",
      { class: "legend" },
      make("ul", { "aria-label": "Phases up to the first token" }, ...phases.map(legendEntry)),
      make("ul", { "aria-label": "After the first token" }, ...answer.slice(1).map(legendEntry)),
    ),
    facts(receipt, usage, requestId),
  );
}

function answerSegments(receipt) {
  const first = {
    kind: "first",
    name: "first token",
    text: "everything above",
    seconds: receipt.ttft_s,
  };
  if (!receipt.e2e_s || receipt.e2e_s <= receipt.ttft_s) return [first];
  const step = Math.min(receipt.first_step_s ?? 0, receipt.e2e_s - receipt.ttft_s);
  const rest = receipt.e2e_s - receipt.ttft_s - step;
  const steps = receipt.output_tokens - 2;
  return [
    first,
    {
      kind: "step",
      name: "first decode step",
      text: "token 1 to token 2, with what was left of the transfer",
      seconds: step,
    },
    {
      kind: "decode",
      name: "decode",
      text: steps > 0 ? `${plural(steps, "more token")} and the end` : "the end",
      seconds: rest,
    },
  ].filter((segment) => segment.seconds > 0);
}

/** Where the transfer stood on the axis of the first row: it ended `exposed` after token 1 was
 * computed. With a retry the axis is of another attempt, so it has no place. */
function placedTransfer(receipt) {
  if (!receipt.transfer_bytes || receipt.attempts > 1) return null;
  const computed = receipt.ttft_s - receipt.handover_s;
  const end = computed + receipt.transfer_exposed_s;
  const start = Math.max(0, end - receipt.transfer_s);
  const text = `${size(receipt.transfer_bytes)} of KV, prefill → decode, at ${rate(receipt.gb_per_s)} over ${receipt.lane}; done ${time(receipt.transfer_exposed_s)} after token 1 was computed`;
  return {
    start,
    end,
    segment: {
      kind: "transfer",
      name: "KV transfer",
      text,
      seconds: receipt.transfer_s,
      drawn: end - start,
    },
  };
}

function row(name, seconds, track, kind) {
  return make(
    "div",
    { class: "row", dataset: { row: kind } },
    make("span", { class: "row-name" }, name),
    track,
    make("span", { class: "row-time" }, time(seconds)),
  );
}

function bar(segments, whole, scale, start = 0) {
  const track = make("div", { class: "track" });
  if (start > 0) track.style.paddingInlineStart = `${(start / scale) * 100}%`;
  for (const segment of segments) {
    const share = whole ? `, ${((segment.seconds / whole) * 100).toFixed(0)}\u00a0%` : "";
    const words = `${segment.name}: ${time(segment.seconds)}${share} – ${segment.text}`;
    const part = make("span", {
      class: "segment",
      role: "img",
      tabindex: "-1",
      "aria-label": words,
      dataset: { kind: segment.kind, seconds: segment.seconds, words },
    });
    part.style.flexBasis = `${((segment.drawn ?? segment.seconds) / (scale - start)) * 100}%`;
    track.append(part);
  }
  return track;
}

/** One tab stop for the chart; arrows walk, and what is pointed at is said in the readout. */
function walkable(chart, readout, rest) {
  const parts = [...chart.querySelectorAll(".segment")];
  if (parts.length) parts[0].tabIndex = 0;
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = parts.indexOf(document.activeElement);
    const next = step && here >= 0 ? parts[here + step] : null;
    if (!next) return;
    event.preventDefault();
    parts[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  const show = (event) => say(readout, event.target.dataset.words ?? rest);
  chart.addEventListener("pointerover", show);
  chart.addEventListener("focusin", show);
  for (const over of ["pointerleave", "focusout"])
    chart.addEventListener(over, () => say(readout, rest));
}

function legendEntry(phase) {
  return make(
    "li",
    { title: phase.text },
    make("i", { class: "swatch", dataset: { kind: phase.kind } }),
    `${phase.name} `,
    make("b", {}, time(phase.seconds)),
  );
}

function summary(receipt) {
  const hidden =
    receipt.transfer_bytes && receipt.transfer_s > 0
      ? Math.round(100 * (1 - receipt.transfer_exposed_s / receipt.transfer_s))
      : 0;
  const exposed = hidden > 0 ? `; ${hidden}\u00a0% of the transfer was hidden behind prefill` : "";
  const speed = receipt.tpot_s ? `, then ${number(Math.round(1 / receipt.tpot_s))} tokens/s` : "";
  return `First token after ${time(receipt.ttft_s)}${speed}${exposed}`;
}

function facts(receipt, usage, requestId) {
  const cached = [
    ["prefill", receipt.cached_tokens],
    ["of these from memory", receipt.dram_tokens],
    ["from disk", receipt.ssd_tokens],
    ["fetched from another worker", receipt.fetched_tokens],
    ["decode", receipt.decode_cached_tokens],
  ]
    .filter(([, tokens]) => tokens > 0)
    .map(([role, tokens]) => `${role}\u00a0${number(tokens)}`);
  const how = [receipt.lane, receipt.mode].filter(Boolean).join(", ");
  const hits = cached.length ? `; cached: ${cached.join(", ")}` : ", none cached";
  const entries = [
    ["prompt", usage && plural(usage.prompt_tokens, "token") + hits],
    [
      "answer",
      plural(receipt.output_tokens ?? 0, "token") +
        (receipt.tpot_s ? `, ${time(receipt.tpot_s)} each` : ""),
    ],
    [
      "transfer",
      receipt.transfer_bytes
        ? `${size(receipt.transfer_bytes)}, ${rate(receipt.gb_per_s)}, ${how}`
        : "none was needed",
    ],
    [
      "workers",
      ["prefill", "decode"]
        .filter((role) => receipt[role])
        .map((role) => `${role} ${shortId(receipt[role])} (${receipt[`${role}_pool`]} pool)`)
        .join(" → "),
    ],
    [
      "attempts",
      number(receipt.attempts ?? 1) +
        (receipt.errors?.length ? ` (${receipt.errors.join(", ")})` : ""),
    ],
    [
      "expected",
      receipt.predicted_ttft_s !== undefined &&
        make("span", {}, `token 1 after ${time(receipt.predicted_ttft_s)} `, whyButton(requestId)),
    ],
    ["request", requestId],
  ];
  return make(
    "dl",
    { class: "facts" },
    ...entries
      .filter(([, text]) => text)
      .map(([name, text]) =>
        make("div", { dataset: { fact: name } }, make("dt", {}, name), make("dd", {}, text)),
      ),
  );
}
