// Stacked bars with a legend: time per stage, pages, and memory against the budget.
// May import format.
// Invariant: parts keep their order and their colour, so that only lengths and numbers move.

import { bytes, count, measured, percent, plural } from "./format.js";

/** Stages in the order of a step; others that a server sends come after these, by name. */
const STAGE_ORDER = [
  "schedule", "plan", "project", "store", "index", "attend", "mlp", "experts", "head", "logprobs", "sample", "draft",
];
const STAGE_END = ["other", "update", "idle"];
/** Not stages: the whole step, and the worker's part of it. */
const WHOLE = new Set(["step", "compute"]);
/** The host's stages; all others lie inside "compute". */
const HOST = new Set(["schedule", "update", "idle"]);
/** Below this share of the budget a line of the memory plan goes into the folded list. */
const SMALL_ROW = 0.02;

/** A bar of parts with a line for each. A part is {key, name, value, text, note?, title?}. */
class Stack {
  #parts = new Map();

  constructor(bar, legend) {
    this.bar = bar;
    this.legend = legend;
  }

  /** `whole` is the value that the full length of the bar stands for. */
  show(parts, whole) {
    const keys = parts.map((part) => part.key);
    if (keys.join("\n") !== [...this.#parts.keys()].join("\n")) this.#build(parts);
    for (const part of parts) {
      const { piece, value, note } = this.#parts.get(part.key);
      const width = `${whole > 0 ? ((100 * part.value) / whole).toFixed(2) : 0}%`;
      if (piece.style.width !== width) piece.style.width = width;
      if (value.textContent !== part.text) value.textContent = part.text;
      if (note.textContent !== (part.note ?? "")) note.textContent = part.note ?? "";
    }
  }

  #build(parts) {
    this.#parts.clear();
    this.bar.replaceChildren();
    this.legend.replaceChildren();
    for (const part of parts) {
      const piece = document.createElement("i");
      piece.dataset.part = part.key;
      this.bar.append(piece);
      const line = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.dataset.part = part.key;
      const [name, value, note] = ["span", "b", "small"].map((tag) => document.createElement(tag));
      name.textContent = part.name;
      if (part.title) line.title = part.title;
      line.append(swatch, name, value, note);
      this.legend.append(line);
      this.#parts.set(part.key, { piece, value, note });
    }
  }
}

/** Seconds by stage -> [stage, seconds], in the order of a step, with what the worker did besides as "other". */
export function orderedStages(seconds) {
  const names = Object.keys(seconds).filter((name) => !WHOLE.has(name));
  const inside = names.filter((name) => !HOST.has(name)).reduce((total, name) => total + seconds[name], 0);
  const all = { ...seconds, other: Math.max(0, (seconds.compute ?? inside) - inside) + (seconds.other ?? 0) };
  const known = new Set([...STAGE_ORDER, ...STAGE_END]);
  const unknown = names.filter((name) => !known.has(name)).sort();
  return [...STAGE_ORDER, ...unknown, ...STAGE_END].filter((name) => name in all).map((name) => [name, all[name]]);
}

export class StagesMeter {
  constructor(bar, legend, note) {
    this.stack = new Stack(bar, legend);
    this.note = note;
  }

  /** `seconds` are sums over `steps` steps. */
  show(seconds, steps) {
    const stages = steps > 0 ? orderedStages(seconds) : [];
    const whole = stages.reduce((total, [, value]) => total + value, 0);
    const parts = stages.map(([name, value]) => {
      const text = measured(value / steps).join(" ");
      return { key: name, name, value, text, note: percent(value / whole) };
    });
    this.stack.show(parts, whole);
    const text = steps > 0 ? `a step, mean of ${count(steps)}` : "no step in this time";
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}

export class PagesMeter {
  constructor(bar, legend, note) {
    this.stack = new Stack(bar, legend);
    this.note = note;
  }

  show({ used, cached, total }, pageSize) {
    const line = (key, name, value) => {
      return { key, name, value, text: count(value), note: `${count(value * pageSize)} tokens` };
    };
    this.stack.show(
      [line("used", "in use", used), line("found", "cached, free to take", cached), line("free", "free", total - used - cached)],
      total,
    );
    const text = `${plural(total, "page")} of ${plural(pageSize, "token")}`;
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}

export class MemoryMeter {
  #shown = null;

  /** `nodes` has bar, legend, note, marker, more (a details element) and small (its list). */
  constructor(nodes) {
    this.nodes = nodes;
    this.stack = new Stack(nodes.bar, nodes.legend);
  }

  /** `rssBytes` is 0 before the first step. */
  show(memory, rssBytes) {
    if (memory !== this.#shown) this.#showPlan(memory);
    this.#shown = memory;
    const { note, marker } = this.nodes;
    marker.hidden = rssBytes === 0;
    const left = `${Math.min(100, (100 * rssBytes) / memory.budget).toFixed(2)}%`;
    if (marker.style.left !== left) marker.style.left = left;
    const budget = `${bytes(memory.budget)} budget`;
    const text = rssBytes === 0 ? budget : `${bytes(rssBytes)} resident of ${budget}`;
    if (note.textContent !== text) note.textContent = text;
  }

  #showPlan(memory) {
    const large = memory.rows.filter((row) => row.bytes >= SMALL_ROW * memory.budget);
    const small = memory.rows.filter((row) => !large.includes(row));
    const smallBytes = small.reduce((total, row) => total + row.bytes, 0);
    const parts = large.map((row, index) => {
      return { key: `row-${index % 6}`, name: row.name, value: row.bytes, text: bytes(row.bytes), title: row.note };
    });
    if (small.length) {
      const name = plural(small.length, "smaller row");
      parts.push({ key: "small", name, value: smallBytes, text: bytes(smallBytes) });
    }
    const rest = memory.budget - memory.rows.reduce((total, row) => total + row.bytes, 0);
    parts.push({ key: "free", name: "not planned", value: Math.max(0, rest), text: bytes(Math.max(0, rest)) });
    this.stack.show(parts, memory.budget);
    const { more, small: list } = this.nodes;
    more.hidden = small.length === 0;
    more.querySelector("summary").textContent = "smaller rows";
    list.replaceChildren(
      ...small.map((row) => {
        const line = document.createElement("li");
        const [name, value] = ["span", "b"].map((tag) => document.createElement(tag));
        name.textContent = row.name;
        value.textContent = bytes(row.bytes);
        line.title = row.note;
        line.append(document.createElement("i"), name, value);
        return line;
      }),
    );
  }
}
