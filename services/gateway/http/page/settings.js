// What the visitor may set. All of it lives in this tab's session and goes when the tab closes.

import { apiKey } from "./api.js";
import { byId, say } from "./dom.js";

const STORE = "pdmesh.settings";
const FIELDS = ["system", "temperature", "max-tokens"];

const dialog = byId("settings");
const keyWanted = byId("key-wanted");

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

/** The fields of a chat request that the settings decide; what is empty is left to the model. */
export function requestFields() {
  const settings = stored();
  const fields = {};
  if (settings.temperature) fields.temperature = Number(settings.temperature);
  if (settings["max-tokens"]) fields.max_tokens = Number(settings["max-tokens"]);
  return fields;
}

/** The system message as the beginning of a conversation; empty if there is none. */
export function systemMessages() {
  const { system } = stored();
  return system ? [{ role: "system", content: system }] : [];
}

/** Open the dialog. reason: why a key is wanted; "" = the visitor opened it. */
export function openSettings(reason = "") {
  const settings = stored();
  for (const name of FIELDS) byId(name).value = settings[name] ?? "";
  byId("api-key").value = apiKey.get();
  keyWanted.hidden = !reason;
  say(keyWanted, reason);
  if (!dialog.open) dialog.showModal();
  if (reason) byId("api-key").focus();
}

/** Wire the dialog. onSaved: called after the settings changed. */
export function startSettings(onSaved) {
  byId("open-settings").addEventListener("click", () => openSettings());
  byId("cancel-settings").addEventListener("click", () => dialog.close());
  byId("settings-form").addEventListener("submit", () => {
    const settings = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value.trim()]));
    sessionStorage.setItem(STORE, JSON.stringify(settings));
    apiKey.set(byId("api-key").value.trim());
    onSaved();
  });
}
