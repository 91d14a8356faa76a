// One turn on the page: the question, the coloured answer, and what is known of how it was made.

import { comparison, curve, element, waterfall } from "./charts.js";
import { account, bytes, crossing, duration, nats, number, plural } from "./words.js";

// Number of the small model's token at which the large one took over, or null while it did not.
function changedAt(answer, roleOf) {
  const judged = answer.scores.at(-1)?.[0];
  const small = answer.servedBy.find((run) => roleOf(run.model) === "small")?.tokens ?? 0;
  if (answer.cascade) {
    return answer.cascade.decision?.action === "escalate" ? Math.max(judged ?? 0, small) : null;
  }
  const last = answer.servedBy.at(-1);
  return last && judged && roleOf(last.model) === "large" ? judged : null;
}

export class TurnView {
  // `roleOf` says of a model's name whether it is `small` or `large`.
  constructor(list, question, roleOf) {
    this.roleOf = roleOf;
    this.body = element("div", { class: "answer body", "aria-busy": "true" });
    this.note = element("p", { class: "account" }, "Waiting for the first token");
    this.figures = element("div", { class: "figures" });
    const item = element("li", { class: "turn" });
    item.append(
      element("p", { class: "question" }, element("span", { class: "unseen" }, "You: "), question),
      this.body,
      this.note,
      this.figures,
    );
    list.append(item);
    this.item = item;
    this.last = null;
    this.pending = false;
    this.width = 0;
    // A drawing is as wide as its place was: another place, another drawing.
    new ResizeObserver(() => {
      if (this.curve && this.figures.clientWidth !== this.width) this.#draw(this.answer);
    }).observe(this.figures);
  }

  // Shows new pieces of the answer.
  add(pieces, answer) {
    if (pieces.length > 0 && this.last === null) this.note.textContent = "Answering";
    for (const piece of pieces) {
      const role = this.roleOf(piece.model);
      if (this.last !== null && this.last !== piece.model) {
        const change = `${this.last} hands over to ${piece.model}`;
        this.body.append(element("span", { class: "change", role: "separator", "aria-label": change }));
      }
      this.last = piece.model;
      const known = piece.margin === null ? "margin unknown" : `margin ${nats(piece.margin)}`;
      const title = `${piece.model}, ${known}`;
      const kind = piece.thought ? `token ${role} thought` : `token ${role}`;
      this.body.append(element("span", { class: kind, title }, piece.text));
    }
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      if (answer.cascade === null) this.#draw(answer);
    });
  }

  // The answer is complete: `ttftMs` is the browser's clock. `again` repeats it by reading.
  finish(answer, ttftMs, again) {
    this.body.setAttribute("aria-busy", "false");
    const cascade = answer.cascade ?? { served_by: answer.servedBy };
    const cut = answer.finish === "length" ? " It ended at the longest answer allowed." : "";
    this.note.textContent = account(cascade) + cut;
    this.#draw(answer);
    this.figures.append(this.#facts(answer, ttftMs));
    if (cascade.borrowed?.handoff_ms != null) this.#showHandoff(cascade.borrowed, null);
    if (cascade.handoff?.handoff_ms != null) this.#showHandoff(cascade.handoff, again);
  }

  // The answer ended early, for a reason in words.
  stop(words, failed) {
    this.body.setAttribute("aria-busy", "false");
    this.note.textContent = words;
    if (failed) {
      this.note.className = "account failed";
      this.note.setAttribute("role", "alert");
    }
  }

  #draw(answer) {
    this.curve?.remove();
    this.answer = answer;
    this.width = this.figures.clientWidth;
    // A policy that draws lots has numbers, but they are no scores of tokens.
    if (!answer.scores.some(([, score]) => score !== null)) return;
    if (answer.cascade?.decision?.reason === "random") return;
    const small = answer.servedBy.find((run) => this.roleOf(run.model) === "small")?.tokens ?? 0;
    const drawn = curve({
      scores: answer.scores,
      threshold: answer.threshold,
      changed: changedAt(answer, this.roleOf),
      shown: small,
      width: Math.max(260, Math.min(880, this.width || 640)),
    });
    const caption = "The policy's score, token by token of the small model (nats); below the line is doubt";
    this.curve = element("figure", {}, element("figcaption", {}, caption), drawn);
    this.figures.prepend(this.curve);
  }

  #facts(answer, ttftMs) {
    const handoff = answer.cascade?.handoff;
    const session = answer.cascade?.session;
    const known = [
      ["Prompt", answer.usage && `${number(answer.usage.prompt_tokens)} tokens`],
      ["Answer", `${number(answer.usage?.completion_tokens ?? answer.tokens)} tokens`],
      ["First token after", ttftMs !== null && duration(ttftMs)],
      ["Moved", handoff && `${bytes(handoff.bytes_read)} read, ${bytes(handoff.bytes_written)} written`],
      ["Held already", handoff?.held_tokens != null && `${number(handoff.held_tokens)} tokens`],
      ["Converted", handoff && `${number(handoff.covered_tokens)} tokens`],
      ["Read again", handoff?.reread_tokens != null && `${number(handoff.reread_tokens)} tokens`],
      ["Turn", session && String(session.turn)],
      ["Since a full reading", session && plural(session.drift_handoffs ?? 0, "handoff")],
    ];
    const list = element("dl", { class: "facts" });
    for (const [name, value] of known) {
      if (value) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    }
    return list;
  }

  // `again` is null for a handoff before the answer, which cannot be repeated alone.
  #showHandoff(handoff, again) {
    const mapped = handoff.path === "mapped";
    const way = mapped ? ["converted cache", "mapped"] : ["reading again", "recompute"];
    const ways = [[way[0], handoff.handoff_ms, way[1]]];
    const predicted = handoff.predicted_ms ?? {};
    if (mapped && predicted.recompute != null) {
      ways.push(["reading again, predicted", predicted.recompute, "recompute predicted"]);
    }
    if (!mapped && predicted.mapped != null) {
      ways.push(["converted cache, predicted", predicted.mapped, "mapped predicted"]);
    }
    const holder = element("div", { class: "handoff" });
    let shown = comparison(ways);
    holder.append(element("p", {}, crossing(handoff, again === null)), shown);
    if (mapped && Object.keys(handoff.stages_ms ?? {}).length) {
      holder.append(waterfall(handoff.stages_ms, handoff.handoff_ms));
    }
    if (mapped && again !== null) {
      const button = element("button", { type: "button" }, "Answer again, re-reading");
      const told = element("p", { class: "again", role: "status" });
      button.addEventListener("click", async () => {
        button.disabled = true;
        told.textContent = "The large model reads the conversation again";
        const result = await again();
        button.disabled = false;
        told.textContent = result.words;
        if (result.ms !== null) {
          ways.push(["reading again, measured", result.ms, "recompute measured"]);
          const drawn = comparison(ways);
          shown.replaceWith(drawn);
          shown = drawn;
        }
        if (result.text) {
          const summary = element("summary", {}, "The answer after reading again");
          const text = element("p", { class: "answer" }, result.text);
          told.append(element("details", {}, summary, text));
        }
      });
      holder.append(button, told);
    }
    this.figures.append(holder);
  }
}
