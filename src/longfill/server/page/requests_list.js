// One row for each request: its two numbers as a bar, its stage, its age and what is left.
// May import format and ledger.
// Invariant: a row belongs to one request for as long as it is shown; a cell is written only when its text changes.

import { count, duration, percent, plural } from "./format.js";
import { runs } from "./ledger.js";

const MOST_RUNNING = 64;
const MOST_WAITING = 12;

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

function cell(className, ...children) {
  const made = element("span", className, ...children);
  made.setAttribute("role", "cell");
  return made;
}

class Row {
  #written = new Map();

  constructor(id) {
    this.name = element("b", "name", id);
    this.name.title = id;
    this.detail = element("small", "detail");
    this.stage = element("span", "stage");
    this.cached = element("i", "cached");
    this.computed = element("i", "computed");
    this.boundary = element("i", "boundary");
    this.bar = element("div", "bar", this.computed, this.cached, this.boundary);
    this.bar.setAttribute("role", "progressbar");
    this.bar.setAttribute("aria-label", `Computed tokens of ${id}`);
    this.tokens = element("span", "count");
    this.share = element("small", "detail");
    this.age = element("span", "age");
    this.left = element("span", "left");
    this.node = element(
      "div",
      "row",
      cell("who", element("i", "dot"), element("span", "stacked", this.name, this.detail)),
      cell("in-stage", this.stage),
      cell("progress", this.bar),
      cell("right stacked", this.tokens, this.share),
      cell("right", this.age),
      cell("right", this.left),
    );
    this.node.setAttribute("role", "row");
    this.node.dataset.id = id;
  }

  /** `ticked` is how many seconds ago the request's numbers arrived. */
  show(request, ticked) {
    const { num_computed_tokens: computed, num_tokens: tokens, num_prompt_tokens: prompt } = request;
    const cached = Math.min(request.num_cached_tokens ?? 0, computed);
    const outputs = tokens - prompt;
    const ended = request.state === "ended";
    // Its length is not known before its body is read.
    const known = tokens > 0;
    const shareOf = (part) => (known ? part / tokens : 0);
    this.#put("state", request.state, (value) => (this.node.dataset.state = value));
    this.#put("slot", request.slot, (value) => (this.node.dataset.slot = value ?? "none"));
    this.#text(this.stage, this.#stageOf(request));
    this.#text(this.detail, this.#detailsOf(request));
    this.#text(this.tokens, known ? `${count(computed)} / ${count(tokens)}` : "");
    const share = outputs > 0 ? `${count(outputs)} generated` : known ? percent(shareOf(computed)) : "";
    this.#text(this.share, cached > 0 ? `${share} · ${count(cached)} cached` : share);
    this.#text(this.age, ended ? "" : duration(request.age_s + ticked));
    this.#text(this.left, this.#leftOf(request, ticked));
    // Rounded to less than a pixel, so that a bar that is all but full is not drawn again for each token.
    const filled = Math.round(2000 * shareOf(computed)) / 2000;
    this.#put("computed", filled, (value) => (this.computed.style.transform = `scaleX(${value})`));
    this.#put("cached", shareOf(cached), (value) => (this.cached.style.width = `${100 * value}%`));
    this.#put("boundary", known ? prompt / tokens : 1, (value) => {
      this.boundary.style.left = `${100 * value}%`;
      this.boundary.hidden = value === 1;
    });
    this.#put("now", computed, (value) => this.bar.setAttribute("aria-valuenow", value));
    this.#put("max", tokens, (value) => this.bar.setAttribute("aria-valuemax", value));
    this.#put("words", `${this.tokens.textContent}`, (value) => this.bar.setAttribute("aria-valuetext", value));
  }

  #stageOf(request) {
    return request.state === "waiting" && request.num_preemptions > 0 ? "preempted" : request.state;
  }

  #detailsOf(request) {
    const parts = [request.endpoint.replace(/^\/v1\//, "")];
    if (request.stream) parts.push("stream");
    if (request.priority !== 0) parts.push(`priority ${request.priority}`);
    if (request.num_preemptions > 0) parts.push(plural(request.num_preemptions, "preemption"));
    return parts.join(" · ");
  }

  #leftOf(request, ticked) {
    if (request.state !== "waiting" && request.state !== "prefill") return "";
    if (request.estimated_prefill_s === null) return "";
    return `≈ ${duration(Math.max(1, request.estimated_prefill_s - ticked))}`;
  }

  #text(node, value) {
    this.#put(node, value, (text) => (node.textContent = text));
  }

  #put(what, value, write) {
    if (this.#written.get(what) === value && this.#written.has(what)) return;
    this.#written.set(what, value);
    write(value);
  }
}

export class RequestsList {
  #rows = new Map();

  constructor(body, rest) {
    this.body = body;
    this.rest = rest;
  }

  /** `total` counts all unfinished requests, also those that the server left out. */
  show(requests, ended, total, ticked) {
    const running = requests.filter(runs).slice(0, MOST_RUNNING);
    const waiting = requests.filter((request) => !runs(request)).slice(0, MOST_WAITING);
    const unfinished = new Set(requests.map((request) => request.id));
    const shown = [...running, ...waiting, ...ended.filter((request) => !unfinished.has(request.id))];
    const ids = new Set(shown.map((request) => request.id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.#rows.delete(id);
    }
    let place = this.body.firstElementChild;
    for (const request of shown) {
      let row = this.#rows.get(request.id);
      if (!row) this.#rows.set(request.id, (row = new Row(request.id)));
      row.show(request, ticked);
      if (row.node === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.node, place);
    }
    const more = total - running.length - waiting.length;
    const text = more > 0 ? `${count(more)} more` : shown.length === 0 ? "none" : "";
    if (this.rest.textContent !== text) this.rest.textContent = text;
  }
}
