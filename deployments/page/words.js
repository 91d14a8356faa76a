// Numbers and codes in words. Touches no page.

export function duration(ms) {
  if (ms === 0) return "0 s";
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(count >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${count} B`;
}

export const number = (value) => value.toLocaleString("en-GB");
export const nats = (value) => `${value.toFixed(2)} nats`;
export const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

const DECISIONS = {
  low_margin: "its score fell below the threshold",
  confident: "its score stayed above the threshold",
  watching: "nothing to doubt so far",
  no_evidence: "there were no scores to judge by",
  past_limit: "too late in the answer to change models",
  budget: "the budget of escalations is used up",
  scheduled: "the request asked for it",
  ended_early: "the answer ended before the token at which it was to change",
  forced: "the request asked for it",
  named: "the request named this model",
  policy: "the configured policy is fixed",
  random: "by chance",
  sticky: "the large model has read this conversation already",
  surprising_prompt: "the prompt surprised the small model",
  small_context: "the conversation is longer than the small model holds",
  small_failed: "the small model failed",
};

const HANDOFFS = {
  requested: "the request asked for it",
  no_ticket: "the small model kept nothing",
  drift: "its cache of this conversation came from too many handoffs",
  cheaper: "reading was expected to be faster",
  short: "too short to be worth a handoff",
  mapper_full: "every mapper was busy",
  mapper_silent: "no mapper answered in time",
  deadline: "the mapper was late",
  expired: "the small model had dropped its cache",
  nothing_covered: "the mapper had nothing to convert",
};

const told = (table, code) => table[code] ?? String(code).replaceAll("_", " ");

// One sentence: who wrote how much, and why.
export function account(cascade) {
  const runs = cascade.served_by ?? [];
  if (runs.length === 0) return "No token was written.";
  const wrote = runs.map((run) => `${run.model} wrote ${plural(run.tokens, "token")}`).join(", then ");
  const decision = cascade.decision;
  if (!decision) return `${wrote}.`;
  const score = decision.score ?? null;
  const threshold = decision.threshold ?? null;
  const unit = decision.reason === "random" ? "" : " nats";
  const numbers =
    score === null || threshold === null
      ? ""
      : ` (${score.toFixed(2)} against ${threshold.toFixed(2)}${unit})`;
  return `${wrote}: ${told(DECISIONS, decision.reason)}${numbers}.`;
}

// One sentence: how a model got the conversation, for an escalation or before the answer.
export function crossing(handoff, before) {
  const why = handoff.reason ? `: ${told(HANDOFFS, handoff.reason)}` : "";
  const source = before ? "Before the answer, the other" : "The small";
  const target = before ? "Before the answer, the" : "The large";
  return handoff.path === "mapped"
    ? `${source} model's cache was converted and moved${why}.`
    : `${target} model read the conversation itself${why}.`;
}

// An error of the endpoint in words: HTTP status, and OpenAI's envelope if there is one.
export function failure(status, envelope) {
  const error = envelope?.error;
  if (status === 401 || status === 403) {
    return `${error?.message ?? "The endpoint wants an API key."} Enter the key under Settings.`;
  }
  if (!error) return `The endpoint answered with HTTP status ${status} and no explanation.`;
  const where = error.param && !error.message.includes(error.param) ? ` (field ${error.param})` : "";
  const again = { 429: " Try again in a moment.", 503: " Try again in a moment." }[status] ?? "";
  return `${error.message}${where}${again}`;
}
