// Reads /v1/live, an event stream, for as long as the page is open: connects, reconnects, asks for a key.
// Imports nothing.
// Invariant: at most one connection is open, and whoever listens is told each change of state exactly once.

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 10_000;
/** The server says something every 5 s; silence for longer than this means that the connection is dead. */
const SILENCE_MS = 16_000;
const KEY = "longfill-api-key";

/** Splits the text of an event stream, in pieces of any size, into events. Lines end with LF or CRLF. */
export class EventParser {
  #rest = "";
  #event = "message";
  #data = [];

  constructor(onEvent) {
    this.onEvent = onEvent;
  }

  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  #line(line) {
    if (line === "") {
      if (this.#data.length) this.onEvent(this.#event, this.#data.join("\n"));
      this.#event = "message";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment: the connection is alive
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#event = value;
    if (field === "data") this.#data.push(value);
  }
}

export class LiveStream {
  #wake = null;
  #failures = 0;

  /**
   * `onEvent(name, value)` gets each event's parsed data. `onState(state)` gets {kind: "connecting" | "live" |
   * "reconnecting" | "unauthorized", reason?, retryAt?}; `retryAt` is in milliseconds of `performance.now`.
   */
  constructor(url, onEvent, onState) {
    this.url = url;
    this.onEvent = onEvent;
    this.onState = onState;
  }

  async run() {
    this.onState({ kind: "connecting" });
    for (;;) {
      const end = await this.#read();
      if (end.unauthorized) {
        this.onState({ kind: "unauthorized", reason: end.reason });
        await this.#pause(Infinity);
        continue;
      }
      const jitter = 0.75 + Math.random() / 2;
      const delay = jitter * Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** this.#failures);
      this.#failures += 1;
      this.onState({ kind: "reconnecting", reason: end.reason, retryAt: performance.now() + delay });
      await this.#pause(delay);
    }
  }

  /** Ends a pause between two attempts, if there is one. */
  retryNow() {
    this.#wake?.();
  }

  /** Takes the key for this tab and connects with it. */
  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.retryNow();
  }

  #pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = Number.isFinite(milliseconds) ? setTimeout(resolve, milliseconds) : null;
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    }).finally(() => (this.#wake = null));
  }

  /** One connection, from request to end. Never raises: says why it ended. */
  async #read() {
    const abort = new AbortController();
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    let unreadable = null;
    try {
      const key = sessionStorage.getItem(KEY);
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const response = await fetch(this.url, { headers, cache: "no-store", signal: abort.signal });
      if (response.status === 401 || response.status === 403) {
        abort.abort();
        const refused = response.status === 401 ? "The server refused this key." : "The feed needs the server's first key.";
        return { unauthorized: true, reason: key ? refused : "" };
      }
      if (!response.ok || !response.headers.get("content-type")?.startsWith("text/event-stream")) {
        abort.abort();
        return { reason: `the server answered with status ${response.status}` };
      }
      const parser = new EventParser((name, data) => {
        if (name === "hello") {
          this.#failures = 0;
          this.onState({ kind: "live" });
        }
        try {
          this.onEvent(name, JSON.parse(data));
        } catch (error) {
          console.error(`longfill: event ${name}`, error);
          unreadable = `the page cannot read event ${name}: ${error.message}`;
          throw error;
        }
      });
      const decoder = new TextDecoder();
      const reader = response.body.getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        heard();
        parser.push(decoder.decode(part.value, { stream: true }));
      }
      return { reason: "the server closed the connection" };
    } catch {
      return {
        reason: unreadable ?? (abort.signal.aborted ? "the server went silent" : "the server does not answer"),
      };
    } finally {
      clearTimeout(silence);
      abort.abort(); // what is left of the response
    }
  }
}
