// Numbers as people read them: counts, bytes, durations, rates, with widths that hardly change.
// Imports nothing.
// Invariant: the same value always gives the same text.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
  return WHOLE.format(value);
}

/** "1 page", "2 pages". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** Three digits, whatever the size. */
function threeDigits(value) {
  return value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function rate(perSecond) {
  return perSecond === 0 ? "0" : threeDigits(perSecond);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count(value) : threeDigits(value)} ${units[unit]}`;
}

/** A measured time as [number, unit]: "423", "ms". */
export function measured(seconds) {
  if (seconds < 1e-3) return [threeDigits(seconds * 1e6), "µs"];
  if (seconds < 1) return [threeDigits(seconds * 1e3), "ms"];
  return [threeDigits(seconds), "s"];
}

/** How long something lasts, to the second: "8 s", "3 m 07 s", "2 h 05 m". */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}
