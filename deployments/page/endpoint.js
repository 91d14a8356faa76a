// The endpoint that served this page: models, answers, statistics. Knows HTTP; touches no page.

import { Answer, events } from "./stream.js";
import { failure } from "./words.js";

// Something the endpoint refused or broke off; the message is for people.
export class Failure extends Error {}

async function fetched(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The endpoint cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const envelope = await response.json().catch(() => null);
  throw new Failure(failure(response.status, envelope));
}

// Names of the served models: the routed one, the small one, the large one.
export async function models(key) {
  const listed = await (await fetched("v1/models", key)).json();
  return listed.data.map((card) => card.id);
}

export async function statistics(key) {
  return (await fetched("v1/cascade/stats", key)).json();
}

// Streams the answer to `request` (a body without `stream`). Calls `onPieces(pieces, answer)` for
// every event; returns {answer, ttftMs}. Throws Failure, or AbortError when `signal` fires.
export async function ask(request, { key, signal, onPieces = () => {} }) {
  const sent = performance.now();
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await fetched("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const answer = new Answer(request.model);
  let ttftMs = null;
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Failure(failure(response.status, event));
      const pieces = answer.take(event);
      if (pieces.length > 0 && ttftMs === null) ttftMs = performance.now() - sent;
      onPieces(pieces, answer);
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("The connection broke off in mid-answer.");
  }
  if (answer.finish === null) throw new Failure("The answer broke off before its end.");
  return { answer, ttftMs };
}
