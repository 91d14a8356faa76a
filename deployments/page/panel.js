// The running panel: what the cascade did lately, from its own statistics.

import { element, history } from "./charts.js";
import { statistics } from "./endpoint.js";
import { duration, number, percent } from "./words.js";

const EVERY_MS = 5000;
const READINGS = 60;

export class Panel {
  constructor(holder, settings) {
    this.holder = holder;
    this.settings = settings;
    this.readings = [];
  }

  // Reads now, and from time to time while the page is seen.
  start() {
    this.refresh();
    setInterval(() => document.hidden || this.refresh(), EVERY_MS);
  }

  async refresh() {
    try {
      this.#show(await statistics(this.settings.key));
    } catch (error) {
      this.holder.replaceChildren(element("p", { class: "hint" }, error.message));
    }
  }

  #show(stats) {
    const realised = stats.realised_fraction ?? null;
    const target = stats.target_fraction ?? null;
    if (realised !== null) this.readings = [...this.readings, realised].slice(-READINGS);
    const handoffs = stats.handoffs ?? {};
    const window = stats.window == null ? "" : `, last ${number(stats.window)}`;
    const saved = stats.saved_prefill_s ?? null;
    const known = [
      ["Policy", stats.policy],
      [`Answers${window}`, number(stats.requests ?? 0)],
      ["Escalated", number(stats.escalated ?? 0)],
      ["Realised", realised === null ? "none yet" : percent(realised)],
      ["Target", target === null ? "none set" : percent(target)],
      ["Mapped handoffs", number(handoffs.mapped ?? 0)],
      ["Read again", number(handoffs.recompute ?? 0)],
      ["Cancelled", number(handoffs.cancelled ?? 0)],
      ["Prefill saved", saved === null ? null : duration(1000 * saved)],
    ];
    const list = element("dl", { class: "facts" });
    for (const [name, value] of known) {
      if (value) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    }
    const parts = [list];
    if (this.readings.length > 0) {
      const caption = element("figcaption", {}, `Realised fraction${target === null ? "" : ", the target dashed"}`);
      parts.push(element("figure", {}, caption, history(this.readings, target)));
    }
    this.holder.replaceChildren(...parts);
  }
}
