// What the server said last, put together: hello, the newest update, requests by id, and the history of steps.
// May import history.
// Invariant: every step is booked once, also when a reconnection sends it again.

import { History, SLOTS } from "./history.js";

/** Requests that have ended stay in view until as many others ended after them. */
const ENDED_SHOWN = 3;

/** Whether a request has a place in steps; others wait, or are still read. */
export function runs(request) {
  return request.state === "prefill" || request.state === "decode";
}

export class Ledger {
  hello = null;
  history = new History();
  /** Newest values of: now, num_requests, num_running, num_waiting, pages, health, rss_bytes, lastStep (the record). */
  current = {};
  /** Unfinished, oldest first. Each is the server's object, and `slot`. */
  requests = [];
  /** The same, in order of their end; their numbers are those of their last step. */
  ended = [];
  #slots = new Map();
  #newestSlot = SLOTS - 1;
  #lastStep = -1;
  #received = 0;

  takeHello(hello) {
    if (this.hello && this.hello.started !== hello.started) {
      // Another server: its requests and step numbers have nothing to do with those before.
      this.#lastStep = -1;
      this.#slots.clear();
      this.requests = [];
      this.ended = [];
      this.current = {};
    }
    this.hello = hello;
    this.takeUpdate(hello);
  }

  takeUpdate(update) {
    const { requests, steps, ...values } = update;
    const known = new Set(requests.map((request) => request.id));
    // Requests that run get their colour before steps name them, and those that have ended keep it for their last ones.
    for (const request of requests) if (runs(request)) this.slotOf(request.id);
    for (const record of steps) this.#book(record, known);
    this.#takeRequests(requests, known, steps);
    for (const id of this.#slots.keys()) if (!known.has(id)) this.#slots.delete(id);
    this.current = { ...this.current, ...values };
    this.#received = performance.now();
  }

  /** Unix time at the server, as far as is known. */
  get now() {
    return (this.current.now ?? 0) + this.sinceUpdate;
  }

  /** Seconds since the newest values arrived. */
  get sinceUpdate() {
    return (performance.now() - this.#received) / 1000;
  }

  /** A request's colour, 0 to SLOTS - 1. */
  slotOf = (id) => {
    const known = this.#slots.get(id);
    if (known !== undefined) return known;
    const used = new Array(SLOTS).fill(0);
    for (const taken of this.#slots.values()) used[taken] += 1;
    // The next of those that the fewest share: also requests that follow each other are told apart.
    const least = Math.min(...used);
    let slot = (this.#newestSlot + 1) % SLOTS;
    while (used[slot] > least) slot = (slot + 1) % SLOTS;
    this.#newestSlot = slot;
    this.#slots.set(id, slot);
    return slot;
  };

  #book(record, known) {
    if (record.step <= this.#lastStep) return;
    this.#lastStep = record.step;
    this.history.push(record, (id) => this.slotOf(this.#ownerOf(id, known)));
    this.current.lastStep = record;
  }

  /**
   * The request that a name in a step stands for: one of several prompts is `ID-i` there, and one of several
   * completions `i_ID`.
   */
  #ownerOf(id, known) {
    const whole = id.replace(/^\d+_/, "");
    const names = [id, whole, whole.replace(/-\d+$/, "")];
    return names.find((name) => known.has(name) || this.#slots.has(name)) ?? id;
  }

  #takeRequests(requests, known, steps) {
    const final = new Map();
    for (const step of steps) for (const [id, computed, tokens] of step.requests) final.set(id, [computed, tokens]);
    for (const request of this.requests) {
      if (known.has(request.id)) continue;
      const [computed, tokens] = final.get(request.id) ?? [request.num_computed_tokens, request.num_tokens];
      this.ended.push({ ...request, state: "ended", num_computed_tokens: computed, num_tokens: tokens });
    }
    this.ended = this.ended.slice(-ENDED_SHOWN);
    this.requests = requests.map((request) => ({
      ...request,
      slot: runs(request) ? this.slotOf(request.id) : null,
    }));
  }
}
