// The scrolling chart: prompt tokens of each step, its decode rows, and how long it took, over time.
// May import format and history.
// Invariant: a drawing is a function of the history, the span, the clock, the size and the colours.

import { count, measured, plural } from "./format.js";
import { SLOTS } from "./history.js";

const LABEL_HEIGHT = 18;
const AXIS_HEIGHT = 20;
/** Parts of the height that prompt tokens, decode rows and step time get. */
const SHARES = [0.58, 0.21, 0.21];

/** The least of 1, 2, 5, 10, ... that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= value * (1 - 1e-9));
}

function highest(groups, valueOf) {
  return groups.reduce((most, bin) => Math.max(most, valueOf(bin)), 0);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** What a bin says in words. */
export function describe(bin, lastStep) {
  if (!bin) return "";
  const steps =
    bin.steps === 1 ? `step ${count(bin.firstStep)}` : `steps ${count(bin.firstStep)} to ${count(bin.lastStep)}`;
  const each = bin.steps === 1 ? "" : " each";
  const parts = [steps, `${measured(bin.stepSeconds / bin.steps).join(" ")}${each}`];
  if (bin.promptTokens) {
    const largest = [...bin.prefills].sort((a, b) => b[1] - a[1]);
    const named = largest.slice(0, 2).map(([id, tokens]) => `${count(tokens)} ${id}`);
    if (largest.length > 2) named.push(plural(largest.length - 2, "more request"));
    const whose = largest.length === 1 ? ` of ${largest[0][0]}` : ` (${named.join(", ")})`;
    parts.push(plural(bin.promptTokens, "prompt token") + whose);
  }
  if (bin.decodeTokens) parts.push(plural(bin.decodeTokens, "decode row"));
  if (bin.preempted) parts.push(`${count(bin.preempted)} preempted`);
  return (lastStep ? "latest: " : "") + parts.join(" · ");
}

export class StepsChart {
  span = 60;
  #canvas;
  #readout;
  #colours = null;
  #size = [0, 0];
  #history = null;
  #now = 0;
  #selected = null;

  /** `redraw` is called when the chart wants to be drawn again: after a change of size, or of what is selected. */
  constructor(canvas, readout, redraw) {
    this.#canvas = canvas;
    this.#readout = readout;
    new ResizeObserver(([entry]) => {
      this.#size = [entry.contentRect.width, entry.contentRect.height];
      redraw();
    }).observe(canvas);
    const select = (bin) => {
      if (bin === this.#selected) return;
      this.#selected = bin;
      redraw();
    };
    canvas.addEventListener("pointermove", (event) => select(this.#binAt(event.offsetX)));
    canvas.addEventListener("pointerleave", () => select(null));
    canvas.addEventListener("blur", () => select(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") select(null);
      if (!step) return;
      event.preventDefault();
      select(this.#neighbour(step));
    });
  }

  /** Colours may have changed: they are read again before the next drawing. */
  forgetColours() {
    this.#colours = null;
  }

  draw(history, now, budget) {
    this.#history = history;
    this.#now = now;
    const [width, height] = this.#size;
    if (width === 0) return;
    const context = this.#prepare(width, height);
    const groups = [...history.grouped(now - this.span, this.span / width)];
    const plot = height - AXIS_HEIGHT;
    let top = 0;
    const lanes = this.#lanes(groups, budget).map((lane, index) => {
      const box = { ...lane, top: top + LABEL_HEIGHT, bottom: top + SHARES[index] * plot };
      top = box.bottom;
      return box;
    });
    for (const lane of lanes) this.#drawLane(context, lane, groups, width);
    this.#drawAxis(context, width, height);
    this.#drawSelection(context, plot);
    this.#say(groups, budget);
  }

  #lanes(groups, budget) {
    const longest = niceCeiling(Math.max(1e-3, highest(groups, (bin) => bin.stepArea / bin.stepSeconds)));
    const rows = Math.max(4, niceCeiling(Math.max(1, highest(groups, (bin) => sum(bin.decodeArea) / bin.stepSeconds))));
    return [
      { label: "prompt tokens a step", most: budget, top_label: `budget ${count(budget)}`, areas: (bin) => bin.promptArea },
      { label: "decode rows a step", most: rows, top_label: count(rows), areas: (bin) => bin.decodeArea },
      { label: "time of a step", most: longest, top_label: measured(longest).join(" "), areas: null },
    ];
  }

  #prepare(width, height) {
    const scale = window.devicePixelRatio;
    const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.#canvas.width !== wide || this.#canvas.height !== high) {
      this.#canvas.width = wide;
      this.#canvas.height = high;
    }
    this.#colours ??= this.#readColours();
    const context = this.#canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(this.#canvas).fontFamily}`;
    return context;
  }

  #readColours() {
    const read = (name) => {
      this.#canvas.style.color = `var(${name})`;
      return getComputedStyle(this.#canvas).color;
    };
    const slots = Array.from({ length: SLOTS }, (_, slot) => read(`--slot-${slot}`));
    const colours = { slots, line: read("--line"), text: read("--muted"), time: read("--time"), ink: read("--ink") };
    this.#canvas.style.color = "";
    return colours;
  }

  #x(time) {
    return this.#size[0] * (1 - (this.#now - time) / this.span);
  }

  /** The nearest edge between pixels of the screen, so that bars of one height look alike. */
  #pixel(x) {
    const scale = window.devicePixelRatio;
    return Math.max(0, Math.round(x * scale) / scale);
  }

  #drawLane(context, lane, groups, width) {
    const { line, text } = this.#colours;
    context.fillStyle = line;
    context.fillRect(0, Math.round(lane.bottom) - 1, width, 1);
    context.fillRect(0, Math.round(lane.top), width, 1);
    context.fillStyle = text;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(lane.label, 0, lane.top - 5);
    context.textAlign = "right";
    context.fillText(lane.top_label, width, lane.top - 5);
    this.#drawBars(context, lane, groups);
  }

  /** Colour by colour, since to set one costs more than to draw with it. */
  #drawBars(context, lane, groups) {
    const { slots, time } = this.#colours;
    const colours = lane.areas ? slots : [time];
    const room = lane.bottom - 1 - lane.top;
    const gap = 1 / window.devicePixelRatio;
    const bottoms = new Float64Array(groups.length).fill(lane.bottom - 1);
    const areas = groups.map((bin) => (lane.areas ? lane.areas(bin) : [bin.stepArea]));
    colours.forEach((colour, slot) => {
      context.fillStyle = colour;
      groups.forEach((bin, index) => {
        if (areas[index][slot] === 0) return;
        const left = this.#pixel(this.#x(bin.start));
        const full = this.#pixel(this.#x(bin.end)) - left;
        const high = Math.max(1, (room * areas[index][slot]) / bin.stepSeconds / lane.most);
        bottoms[index] -= high;
        context.fillRect(left, bottoms[index], Math.max(gap, full > 3 * gap ? full - gap : full), high);
      });
    });
  }

  #drawAxis(context, width, height) {
    context.fillStyle = this.#colours.text;
    const [divisor, unit] = this.span > 120 ? [60, "min"] : [1, "s"];
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      context.textAlign = part === 0 ? "left" : part === 1 ? "right" : "center";
      const ago = ((1 - part) * this.span) / divisor;
      context.fillText(part === 1 ? "now" : `−${ago} ${unit}`, part * width, height - 4);
    }
  }

  #drawSelection(context, plot) {
    if (!this.#selected) return;
    const middle = (this.#x(this.#selected.start) + this.#x(this.#selected.end)) / 2;
    context.fillStyle = this.#colours.ink;
    context.fillRect(Math.round(middle), 0, 1, plot);
  }

  #say(groups, budget) {
    const last = groups.at(-1);
    const text = this.#selected ? describe(this.#selected, false) : describe(last, true) || "no step in this time";
    if (this.#readout.textContent !== text) this.#readout.textContent = text;
    const label = last
      ? `Steps over ${this.span} seconds: up to ${count(highest(groups, (bin) => sum(bin.promptArea) / bin.stepSeconds))} prompt tokens of a budget of ${count(budget)}`
      : "Steps: none in this time";
    if (this.#canvas.getAttribute("aria-label") !== label) this.#canvas.setAttribute("aria-label", label);
  }

  #visible() {
    return this.#history ? [...this.#history.grouped(this.#now - this.span, this.span / this.#size[0])] : [];
  }

  #binAt(x) {
    const time = this.#now - this.span * (1 - x / this.#size[0]);
    return this.#visible().find((bin) => bin.end >= time && bin.start <= time + this.span / this.#size[0]) ?? null;
  }

  #neighbour(step) {
    const bins = this.#visible();
    if (!this.#selected) return bins.at(-1) ?? null;
    const at = bins.findLastIndex((bin) => bin.start <= this.#selected.start);
    return bins[Math.min(bins.length - 1, Math.max(0, at + step))] ?? null;
  }
}
