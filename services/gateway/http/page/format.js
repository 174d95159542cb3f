// Numbers as people read them.

const count = new Intl.NumberFormat("en");

/** 1234 -> "1,234" */
export const number = (value) => count.format(value);

/** "1 token", "2 tokens" */
export const plural = (value, word) => `${number(value)}\u00a0${word}${value === 1 ? "" : "s"}`;

/** Seconds with three digits: "0.12 ms", "72.6 ms", "1.25 s"; "–" for what was not measured. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (ms < 0.995) return `${ms.toFixed(2)}\u00a0ms`;
  if (ms < 99.95) return `${ms.toFixed(1)}\u00a0ms`;
  if (ms < 999.5) return `${ms.toFixed(0)}\u00a0ms`;
  return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)}\u00a0s`;
}

/** Bytes: "512 B", "50 KiB", "1.5 MiB". */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  const digits = unit < 2 || bytes >= 99.95 ? 0 : 1;
  return `${bytes.toFixed(digits)}\u00a0${units[unit]}`;
}

/** A rate given in GB/s: "7.8 MB/s", "12.4 GB/s". */
export function rate(gbPerS) {
  if (gbPerS === null || gbPerS === undefined) return "–";
  if (gbPerS >= 1) return `${gbPerS.toFixed(gbPerS < 99.95 ? 1 : 0)}\u00a0GB/s`;
  const mb = gbPerS * 1000;
  return `${mb.toFixed(mb < 99.95 ? 1 : 0)}\u00a0MB/s`;
}

/** A count per second: "0", "4.2", "481". */
export function perSecond(value) {
  return value >= 99.95 || Number.isInteger(value) ? number(Math.round(value)) : value.toFixed(1);
}

/** The beginning of a worker's incarnation: enough to tell it from others. */
export const shortId = (incarnation) => incarnation.slice(0, 6);
