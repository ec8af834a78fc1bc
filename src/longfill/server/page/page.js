// The live page: what the stream says goes into the ledger, and the ledger onto the screen.
// May import every module of the page; none imports this one.
// Invariant: nothing is drawn but in an animation frame, at most once for all that arrived since the last one.

import { bytes, count, duration, measured, percent, plural, rate } from "./format.js";
import { Ledger } from "./ledger.js";
import { MemoryMeter, PagesMeter, StagesMeter } from "./meters.js";
import { RequestsList } from "./requests_list.js";
import { StepsChart } from "./steps_chart.js";
import { LiveStream } from "./stream.js";
import { setUpTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);
const SPAN = "longfill-span";

const ledger = new Ledger();
let connection = { kind: "connecting" };
let frame = 0;

const chart = new StepsChart(byId("chart"), byId("readout"), redraw);
const list = new RequestsList(byId("rows"), byId("rest"));
const stages = new StagesMeter(byId("stages-bar"), byId("stages"), byId("stages-note"));
const pages = new PagesMeter(byId("pages-bar"), byId("pages"), byId("pages-note"));
const memory = new MemoryMeter({
  bar: byId("memory-bar"),
  legend: byId("memory"),
  note: byId("memory-note"),
  marker: byId("rss"),
  more: byId("memory-more"),
  small: byId("memory-small"),
});
const stream = new LiveStream("v1/live", onEvent, onState);

function redraw() {
  frame ||= requestAnimationFrame(render);
}

function put(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

function onEvent(name, value) {
  if (name === "hello") ledger.takeHello(value);
  if (name === "update") ledger.takeUpdate(value);
  redraw();
}

function onState(state) {
  connection = state;
  const dialog = byId("key-dialog");
  if (state.kind === "unauthorized" && !dialog.open) {
    if (state.reason) put("key-reason", state.reason);
    dialog.showModal();
  }
  redraw();
}

function render() {
  frame = 0;
  renderStatus();
  if (!ledger.current.pages) return;
  renderFacts();
  renderNumbers();
  const { hello, history, now, requests, ended, current } = ledger;
  const ticked = connection.kind === "live" ? ledger.sinceUpdate : 0;
  list.show(requests, ended, current.num_requests, ticked);
  chart.draw(history, now, hello.max_num_batched_tokens);
  const busy = history.stages(now - chart.span);
  stages.show(busy.seconds, busy.steps);
  pages.show(current.pages, hello.page_size);
  memory.show(hello.memory, current.rss_bytes);
}

/** The connection first: without it health is what it was, not what it is. */
function renderStatus() {
  const health = ledger.current.health ?? { status: "ok", reason: "" };
  const live = connection.kind === "live";
  const status = live ? health.status : connection.kind;
  const words = { unauthorized: "API key needed" };
  put("status-text", words[status] ?? status);
  byId("status").dataset.status = status;
  document.body.dataset.connection = connection.kind;
  let notice = "";
  if (live && health.status !== "ok") notice = health.reason || `The server is ${health.status}.`;
  if (connection.kind === "reconnecting") {
    notice = `Not connected: ${connection.reason}.`;
    if (ledger.hello) notice += " Shown is the last known state.";
  }
  const asks = connection.kind === "unauthorized";
  if (asks) notice = "The server asks for its API key.";
  put("notice", notice);
  byId("notice-box").hidden = notice === "";
  byId("ask-key").hidden = !asks;
}

function renderFacts() {
  const { hello } = ledger;
  put("model", hello.served_model_name);
  byId("model").title = hello.model;
  const facts = [
    `longfill ${hello.version}`,
    `up ${duration(ledger.now - hello.started)}`,
    `prompts up to ${count(hello.max_model_len)} tokens`,
    `steps up to ${count(hello.max_num_batched_tokens)}`,
    `${bytes(hello.memory.bytes_per_token)} of KV a token`,
    plural(hello.num_threads, "thread"),
    kernelPaths(hello.kernels),
  ];
  put("facts", facts.join(" · "));
}

/** The kernels that are used; one with a remark behind its name only where the name does not stand alone. */
function kernelPaths(kernels) {
  const paths = [...new Set(Object.values(kernels))];
  return paths.filter((path) => !paths.some((other) => other !== path && path.startsWith(other))).join("; ");
}

function renderNumbers() {
  const { current, history, requests } = ledger;
  const rates = history.rates(ledger.now, current.num_running > 0);
  put("prefill-rate", rate(rates.prefill));
  put("decode-rate", rate(rates.decode));
  const [value, unit] = current.lastStep ? measured(current.lastStep.seconds.step) : ["–", ""];
  put("step-seconds", value);
  put("step-seconds-unit", unit);
  put("num-running", count(current.num_running));
  put("num-waiting", count(current.num_waiting));
  const first = requests.find((request) => request.state === "prefill");
  const share = first ? `${percent(first.num_computed_tokens / first.num_tokens)} · ` : "";
  const title = `${share}${ledger.hello.served_model_name} · longfill`;
  if (document.title !== title) document.title = title;
}

function setUpSpan() {
  const choices = [...document.querySelectorAll('input[name="span"]')];
  const kept = localStorage.getItem(SPAN);
  for (const choice of choices) {
    if (choice.value === kept) choice.checked = true;
    choice.addEventListener("change", () => {
      chart.span = Number(choice.value);
      localStorage.setItem(SPAN, choice.value);
      redraw();
    });
  }
  chart.span = Number(choices.find((choice) => choice.checked).value);
}

function setUpKey() {
  const dialog = byId("key-dialog");
  dialog.addEventListener("close", () => {
    const field = byId("key");
    if (field.value) stream.useKey(field.value);
    field.value = "";
  });
  byId("ask-key").addEventListener("click", () => dialog.showModal());
}

setUpSpan();
setUpKey();
setUpTheme(byId("theme"), () => {
  chart.forgetColours();
  redraw();
});
// Clocks and the chart's right edge move on between updates.
setInterval(() => {
  if (connection.kind === "live") redraw();
}, 1000);
addEventListener("online", () => stream.retryNow());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) stream.retryNow();
});
stream.run();
