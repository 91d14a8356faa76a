// A streamed chat completion: its server-sent events, and the answer that they add up to.
// Knows OpenAI's format and the `cascade` object; touches no page.

// The JSON objects of a server-sent event stream (a ReadableStream of bytes), until `[DONE]`.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      waiting += value;
      const lines = waiting.split(/\r\n|\n/);
      waiting = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// Difference of the two best log-probabilities (nats) at one token, or null when unknown.
export function margin(entry) {
  const best = (entry.top_logprobs ?? []).map((one) => one.logprob).sort((a, b) => b - a);
  if (best.length < 2) return null;
  const found = best[0] - best[1];
  return Number.isFinite(found) ? found : null;
}

// What arrived of one answer.
export class Answer {
  // `model` wrote everything, as far as the endpoint does not say otherwise.
  constructor(model) {
    this.model = model;
    this.text = "";
    this.tokens = 0;
    this.scores = [];
    this.threshold = null;
    this.servedBy = [];
    this.cascade = null;
    this.usage = null;
    this.finish = null;
  }

  // Takes one event; returns its new pieces {text, model, margin, thought}, one per token if the
  // tokens' texts are those of the event. `margin` is in nats or null.
  take(event) {
    if (event.usage) this.usage = event.usage;
    const progress = event.cascade;
    if (progress) {
      this.servedBy = progress.served_by ?? this.servedBy;
      this.scores.push(...(progress.scores ?? []));
      this.threshold = progress.threshold ?? progress.decision?.threshold ?? this.threshold;
    }
    const choice = event.choices?.[0];
    if (!choice) return [];
    if (choice.finish_reason) {
      this.finish = choice.finish_reason;
      this.cascade = progress ?? null;
    }
    const thought = choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "";
    const content = choice.delta?.content ?? "";
    this.text += content;
    return this.#pieces(thought || content, choice.logprobs?.content ?? [], Boolean(thought));
  }

  #pieces(text, entries, thought) {
    const pieces = [];
    let rest = text;
    let start = 0;
    entries.forEach((entry, index) => {
      const last = index === entries.length - 1;
      // Tokens that end within a character have no text of their own: the next one gets it.
      const fits = entry.token !== "" && rest.startsWith(entry.token);
      if (!last && !fits) return;
      const part = last ? rest : entry.token;
      pieces.push({ text: part, ...this.#writer(this.tokens + index), margin: margin(entry), thought });
      rest = rest.slice(part.length);
      start = index + 1;
    });
    this.tokens += entries.length;
    if (rest && start === 0) {
      pieces.push({ text: rest, ...this.#writer(this.tokens - 1), margin: null, thought });
    }
    return pieces.filter((piece) => piece.text !== "");
  }

  // Who wrote token `index` of the answer, counted from 0.
  #writer(index) {
    let end = 0;
    for (const run of this.servedBy) {
      end += run.tokens;
      if (index < end) return { model: run.model };
    }
    return { model: this.servedBy.at(-1)?.model ?? this.model };
  }
}
