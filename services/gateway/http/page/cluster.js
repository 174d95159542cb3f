// The cluster's state: asked every second while somebody looks, drawn in place.

import { ApiError, cluster } from "./api.js";
import { keyReason } from "./chat.js";
import { byId, make, say } from "./dom.js";
import { number, perSecond, rate, shortId, size, time } from "./format.js";
import { openSettings } from "./settings.js";

const EVERY_MS = 1000;
const SLOWEST_MS = 5000;
const BLOCKS = [
  ["reserved", "in use"],
  ["quarantined", "quarantined"],
  ["free", "free or only cached"],
];

let timer = 0;
let looking = null;
let hasAskedForKey = false;

/** Begin to look; looks whenever the page is visible. */
export function startCluster() {
  document.addEventListener("visibilitychange", look);
  look();
}

/** Look now, and from now on every second. */
export async function look() {
  clearTimeout(timer);
  looking?.abort();
  if (document.hidden) return;
  const own = (looking = new AbortController());
  try {
    show(await cluster(AbortSignal.any([own.signal, AbortSignal.timeout(SLOWEST_MS)])));
  } catch (failure) {
    if (own.signal.aborted) return; // a later look has begun
    showFailure(failure);
  }
  timer = setTimeout(look, EVERY_MS);
}

/** The visitor has changed the key: if it is wrong, say so again. */
export function lookWithNewKey() {
  hasAskedForKey = false;
  void look();
}

function showFailure(failure) {
  const needsKey = failure instanceof ApiError && failure.needsKey;
  const isGone = !(failure instanceof ApiError);
  setStatus(
    needsKey ? "locked" : "unreachable",
    needsKey ? "needs a key" : isGone ? "unreachable" : "error",
  );
  byId("alert").hidden = false;
  say(
    byId("alert"),
    needsKey
      ? "This gateway tells its state only to who has an API key: enter one in the settings."
      : isGone
        ? "Gateway unreachable. What you see is from before; this page tries again every second."
        : `The gateway answered with an error: ${failure.message}`,
  );
  byId("cluster-body").classList.add("stale");
  if (needsKey && !hasAskedForKey) {
    hasAskedForKey = true;
    openSettings(keyReason(failure));
  }
}

function setStatus(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  say(status, text);
}

function show(view) {
  byId("alert").hidden = view.ready;
  if (!view.ready) say(byId("alert"), `Not ready: ${view.not_ready_reason}.`);
  setStatus(view.ready ? "ready" : "waiting", view.ready ? "ready" : "not ready");
  byId("cluster-body").classList.remove("stale");
  say(byId("model"), view.model ? view.model.id : "");
  byId("demo-note").hidden = view.model?.id !== "demo";
  byId("model").title = view.model
    ? `context of ${number(view.model.max_model_len)} tokens; pdmesh ${view.version}`
    : "";
  showTraffic(view.gateway, view.window);
  showWorkers(view.workers);
  showPrefixes(view.hot_prefixes);
  showTransfers(view.transfers);
}

function showTraffic(gateway, window) {
  const eachS = window.output_tokens_each_s;
  say(byId("output-rate"), perSecond(eachS.at(-1)));
  drawSpark(eachS);
  say(byId("running"), number(gateway.running));
  const parts = [`${number(gateway.queued)} queued`, `${number(window.requests)} in 60 s`];
  if (window.failed) parts.push(`${number(window.failed)} failed`);
  if (gateway.refused) {
    const reasons = Object.entries(gateway.refusals);
    const listed = reasons.map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
    parts.push(`${number(gateway.refused)} refused (${listed})`);
  }
  say(byId("answers-more"), parts.join(" · "));
  for (const [id, percentiles] of [
    ["ttft", window.ttft_s],
    ["itl", window.itl_s],
  ]) {
    say(byId(id), time(percentiles?.p50));
    say(
      byId(`${id}-more`),
      percentiles
        ? `p90\u00a0${time(percentiles.p90)} · p99\u00a0${time(percentiles.p99)}`
        : "nothing in 60 s",
    );
  }
}

function drawSpark(values) {
  const most = Math.max(1, ...values);
  const points = values.map(
    (value, second) => `${second + 0.5},${(19.5 - (18.5 * value) / most).toFixed(2)}`,
  );
  const path = byId("spark").firstElementChild;
  path.setAttribute("d", `M0.5,20 L${points.join(" L")} L${values.length - 0.5},20 Z`);
  byId("spark").setAttribute(
    "aria-label",
    `Output tokens in each of the last ${values.length} seconds; the most was ${number(most)}`,
  );
}

/** Keep one element for each key, in order: focus and selection survive a redraw. */
function redraw(list, items, keyOf, makeItem, fillItem) {
  const known = new Map([...list.children].map((element) => [element.dataset.key, element]));
  const wanted = items.map((item) => {
    const key = keyOf(item);
    const element = known.get(key) ?? makeItem(item);
    element.dataset.key = key;
    fillItem(element, item);
    return element;
  });
  for (const element of known.values()) if (!wanted.includes(element)) element.remove();
  wanted.forEach((element, place) => {
    if (list.children[place] !== element) list.insertBefore(element, list.children[place] ?? null);
  });
}

const part = (element, name) => element.querySelector(`[data-part=${name}]`);

function showWorkers(workers) {
  redraw(byId("workers"), workers, (worker) => worker.incarnation, makeWorker, fillWorker);
  byId("workers").dataset.empty = String(!workers.length);
}

function makeWorker(worker) {
  const named = (tag, name, attributes = {}) =>
    make(tag, { ...attributes, dataset: { part: name } });
  return make(
    "li",
    { class: "worker", dataset: { role: worker.role } },
    make(
      "div",
      { class: "worker-head" },
      named("span", "role", { class: "role" }),
      make("code", { title: `incarnation ${worker.incarnation}` }, shortId(worker.incarnation)),
      make("span", { class: "address" }, worker.address),
      named("span", "state", { class: "state" }),
    ),
    make(
      "div",
      { class: "blocks", role: "img", dataset: { part: "bar" } },
      ...BLOCKS.map(([kind, text]) =>
        make("span", { class: "block", dataset: { kind, part: kind }, title: text }),
      ),
    ),
    make("p", { class: "worker-foot" }, named("span", "load"), named("span", "room")),
  );
}

/** What a worker is at the moment; of one that may be either its home, too. */
function roleOf(worker) {
  if (worker.moves)
    return worker.pool === worker.home ? worker.pool : `${worker.pool} (${worker.home})`;
  return worker.paired.includes(worker.incarnation) ? "colocated" : worker.role;
}

function fillWorker(element, worker) {
  const { total, reserved, quarantined } = worker.blocks;
  say(part(element, "role"), roleOf(worker));
  const state = part(element, "state");
  state.dataset.state = worker.state;
  say(
    state,
    worker.role === "prefill" && worker.state === "usable" && !worker.paired.length
      ? "no pair yet"
      : worker.state,
  );
  for (const [kind] of BLOCKS)
    part(element, kind).style.flexGrow = String(worker.blocks[kind] / Math.max(1, total));
  const words = BLOCKS.filter(([kind]) => kind === "free" || worker.blocks[kind]).map(
    ([kind, text]) => `${number(worker.blocks[kind])} ${text}`,
  );
  part(element, "bar").setAttribute(
    "aria-label",
    `KV blocks: ${words.join(", ")}, of ${number(total)}`,
  );
  const load = [`${number(worker.running)} running`];
  if (worker.waiting) load.push(`${number(worker.waiting)} waiting`);
  if (worker.pending_tokens) load.push(`${number(worker.pending_tokens)} to read`);
  if (worker.step_s) load.push(`step ${time(worker.step_s)}`);
  const { known, believed, ttft_error } = worker.prediction;
  if (ttft_error !== null) load.push(`predictions off by ${Math.round(100 * ttft_error)} %`);
  if (!known || !believed) load.push("routed by load alone");
  const { tokens, cached_tokens, dram_tokens, ssd_tokens } = worker.prompts;
  if (cached_tokens) {
    const percent = (part) => Math.round((100 * part) / tokens);
    const below = [
      ["memory", dram_tokens],
      ["disk", ssd_tokens],
    ]
      .filter(([, part]) => part > 0)
      .map(([tier, part]) => `${percent(part)} from ${tier}`);
    const parts = below.length ? ` (${below.join(", ")})` : "";
    load.push(`${percent(cached_tokens)} % of prompts cached${parts}`);
  }
  say(part(element, "load"), load.join(" · "));
  const held = quarantined
    ? `${number(reserved)} + ${number(quarantined)} quarantined`
    : number(reserved);
  say(part(element, "room"), `${held} / ${number(total)} blocks`);
}

/** What many prompts begin with, by its hash alone: a hash tells nothing of the text. */
function showPrefixes(prefixes) {
  byId("prefixes-part").hidden = !prefixes.length;
  redraw(
    byId("prefixes"),
    prefixes,
    (prefix) => prefix.hash,
    (prefix) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, make("code", {}, shortId(prefix.hash))),
        ...["tokens", "share", "holders"].map((name) =>
          make("td", { class: "number", dataset: { part: name } }),
        ),
      ),
    (element, prefix) => {
      say(part(element, "tokens"), number(prefix.tokens));
      say(part(element, "share"), `${Math.round(100 * prefix.share)} %`);
      say(part(element, "holders"), number(prefix.workers));
    },
  );
}

function showTransfers(transfers) {
  redraw(
    byId("transfers"),
    transfers,
    (pair) => `${pair.prefill} ${pair.decode} ${pair.lane}`,
    (pair) =>
      make(
        "tr",
        {},
        make(
          "th",
          { scope: "row" },
          make("code", {}, shortId(pair.prefill)),
          " → ",
          make("code", {}, shortId(pair.decode)),
        ),
        make("td", {}, pair.lane),
        ...["count", "size", "rate", "exposed"].map((name) =>
          make("td", { class: "number", dataset: { part: name } }),
        ),
      ),
    (element, pair) => {
      say(part(element, "count"), number(pair.count));
      say(part(element, "size"), size(pair.bytes));
      say(part(element, "rate"), rate(pair.gb_per_s?.p50));
      say(part(element, "exposed"), time(pair.exposed_s?.p50));
    },
  );
  byId("transfers").dataset.empty = String(!transfers.length);
}
