// The steps of the last hour in bounded memory, as bins: one step each, or several short ones.
// Imports nothing.
// Invariant: bins are in order and do not overlap; sums over bins are sums over their steps.

export const SLOTS = 8;
const LONGEST_S = 3600;
const MOST_BINS = 6000;
/** Bins up to this long are made of shorter steps as they come. */
const FINE_S = 0.05;
/** Bins up to this long are made of older ones, but not of the newest, once there are too many. */
const COARSE_S = 3;
const NEWEST_BINS = 1500;

function emptyBin(start) {
  return {
    start,
    end: start,
    steps: 0,
    firstStep: -1,
    lastStep: -1,
    promptTokens: 0,
    decodeTokens: 0,
    acceptedTokens: 0,
    draftTokens: 0,
    stepSeconds: 0,
    preempted: 0,
    // Token-seconds by colour, and second-seconds: over stepSeconds they are means over time, so that a long step
    // stays as high as it is when short ones are put together with it.
    promptArea: new Float64Array(SLOTS),
    decodeArea: new Float64Array(SLOTS),
    stepArea: 0,
    prefills: new Map(),
    seconds: {},
  };
}

function add(bin, other) {
  if (bin.steps === 0) bin.firstStep = other.firstStep;
  bin.lastStep = other.lastStep;
  bin.end = Math.max(bin.end, other.end);
  bin.steps += other.steps;
  bin.promptTokens += other.promptTokens;
  bin.decodeTokens += other.decodeTokens;
  bin.acceptedTokens += other.acceptedTokens;
  bin.draftTokens += other.draftTokens;
  bin.stepSeconds += other.stepSeconds;
  bin.preempted += other.preempted;
  for (let slot = 0; slot < SLOTS; slot += 1) {
    bin.promptArea[slot] += other.promptArea[slot];
    bin.decodeArea[slot] += other.decodeArea[slot];
  }
  bin.stepArea += other.stepArea;
  for (const [id, tokens] of other.prefills) bin.prefills.set(id, (bin.prefills.get(id) ?? 0) + tokens);
  for (const stage in other.seconds) bin.seconds[stage] = (bin.seconds[stage] ?? 0) + other.seconds[stage];
}

/**
 * Whether `next` may become part of `bin` when bins are up to `width` seconds long. A pause that is long beside that
 * stays one. So an hour makes at most 3,600 coarse bins: two neighbours are longer together, or a second apart.
 */
function fits(bin, next, width) {
  return next.end - bin.start <= width && next.start - bin.end <= width / 3;
}

function binOfStep(record, slotOf) {
  const wall = record.seconds.step;
  const bin = emptyBin(record.time - wall);
  Object.assign(bin, {
    end: record.time,
    steps: 1,
    firstStep: record.step,
    lastStep: record.step,
    promptTokens: record.num_prompt_tokens,
    decodeTokens: record.num_tokens - record.num_prompt_tokens,
    acceptedTokens: record.num_accepted_tokens ?? 0,
    draftTokens: record.num_draft_tokens ?? 0,
    stepSeconds: wall,
    stepArea: wall * wall,
    preempted: record.preempted.length,
    seconds: record.seconds,
  });
  for (const [id, computed, , promptLength, stepTokens] of record.requests) {
    const slot = slotOf(id);
    const prompt = Math.min(stepTokens, Math.max(0, promptLength - (computed - stepTokens)));
    bin.promptArea[slot] += prompt * wall;
    bin.decodeArea[slot] += (stepTokens - prompt) * wall;
    if (prompt > 0) bin.prefills.set(id, prompt);
  }
  return bin;
}

export class History {
  bins = [];

  get last() {
    return this.bins.at(-1);
  }

  /** `slotOf(id)` is a request's colour, 0 to SLOTS - 1. */
  push(record, slotOf) {
    const step = binOfStep(record, slotOf);
    const last = this.last;
    if (last) step.start = Math.max(step.start, last.end);
    if (last && fits(last, step, FINE_S)) {
      add(last, step);
    } else {
      const bin = emptyBin(step.start);
      add(bin, step);
      this.bins.push(bin);
    }
    if (this.bins.length > MOST_BINS) this.#compact();
  }

  /** Older bins coarser, and what is older than an hour gone. */
  #compact() {
    const newest = this.bins.splice(-NEWEST_BINS);
    const oldest = newest.at(-1).end - LONGEST_S;
    const coarse = [];
    for (const bin of this.bins) {
      if (bin.end < oldest) continue;
      const previous = coarse.at(-1);
      if (previous && fits(previous, bin, COARSE_S)) add(previous, bin);
      else coarse.push(bin);
    }
    this.bins = [...coarse, ...newest];
  }

  /** Index of the first bin that ends after `time`. */
  indexAfter(time) {
    let low = 0;
    let high = this.bins.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.bins[middle].end <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Bins that end after `time`, neighbours put together until each is at least `width` seconds long. */
  *grouped(time, width) {
    let group = null;
    for (let index = this.indexAfter(time); index < this.bins.length; index += 1) {
      const bin = this.bins[index];
      const wide = bin.end - bin.start >= width;
      if (group && (wide || bin.start - group.start >= width)) {
        yield group;
        group = null;
      }
      if (wide) {
        yield bin;
        continue;
      }
      if (!group) group = emptyBin(bin.start);
      add(group, bin);
    }
    if (group) yield group;
  }

  /** Seconds by stage, and the number of steps, of all bins that end after `time`. */
  stages(time) {
    const seconds = {};
    let steps = 0;
    for (let index = this.indexAfter(time); index < this.bins.length; index += 1) {
      const bin = this.bins[index];
      steps += bin.steps;
      for (const stage in bin.seconds) seconds[stage] = (seconds[stage] ?? 0) + bin.seconds[stage];
    }
    return { seconds, steps };
  }

  /**
   * Prompt and decode tokens per second, over at least 5 s and at least about three steps. Idle time counts, drafts
   * that were rejected do not. `busy` is whether a request runs: then a long step does not let the rate fall.
   */
  rates(now, busy) {
    const last = this.last;
    if (!last) return { prefill: 0, decode: 0 };
    const window = Math.max(5, (3 * last.stepSeconds) / last.steps);
    if (!busy && now - last.end > window) return { prefill: 0, decode: 0 };
    const until = busy ? last.end : now;
    let prompt = 0;
    let decode = 0;
    let start = last.start;
    for (let index = this.indexAfter(until - window); index < this.bins.length; index += 1) {
      const bin = this.bins[index];
      start = Math.min(start, bin.start);
      prompt += bin.promptTokens;
      decode += bin.decodeTokens - bin.draftTokens + bin.acceptedTokens;
    }
    const elapsed = Math.max(until - start, 1e-3);
    return { prefill: prompt / elapsed, decode: decode / elapsed };
  }
}
