// Drawings: the score's curve, a handoff's waterfall, a small history line.
// Each function returns an element; texts go in as text, never as markup.

import { duration, nats, percent } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

// An HTML element with attributes and children; strings become text nodes.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawing(width, height, label, className) {
  const box = { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" };
  return shape("svg", { ...box, "aria-label": label, class: className });
}

const line = (className, x1, y1, x2, y2) => shape("line", { class: className, x1, y1, x2, y2 });

function words(text, x, y, anchor = "start") {
  return shape("text", { x, y, "text-anchor": anchor }, text);
}

// Several steps that together are one path; `null` interrupts it.
function path(points, className) {
  let steps = "";
  let pen = "M";
  for (const point of points) {
    if (point === null) {
      pen = "M";
    } else {
      steps += `${pen}${point[0].toFixed(1)},${point[1].toFixed(1)}`;
      pen = "L";
    }
  }
  return shape("path", { class: className, d: steps });
}

const EDGE = { left: 40, right: 12, top: 16, bottom: 22 };

// The policy's score (nats) at each token of the small model: `scores` are [token, score or null],
// tokens counted from 1; 0 is the prompt's. `threshold` may be null. `changed`: the token after which the large model took over, or
// null; `shown`: how many of the small model's tokens the reader got, the rest was dropped unseen.
export function curve({ scores, threshold, changed, shown, width }) {
  const height = 132;
  const known = scores.filter(([, score]) => score !== null);
  const top = 1.1 * Math.max(0.01, threshold ?? 0, ...known.map(([, score]) => score));
  const low = 1.1 * Math.min(0, threshold ?? 0, ...known.map(([, score]) => score));
  const first = Math.min(1, ...scores.map(([token]) => token));
  const count = Math.max(1, ...scores.map(([token]) => token));
  const right = width - EDGE.right;
  const step = (right - EDGE.left - 12) / Math.max(1, count - first);
  const x = (token) => EDGE.left + 6 + (token - first) * step;
  const y = (score) =>
    EDGE.top + ((top - score) / (top - low)) * (height - EDGE.top - EDGE.bottom);

  const lowest = known.length ? Math.min(...known.map(([, score]) => score)) : null;
  const label = [
    `Score of the small model's ${count} tokens`,
    lowest === null ? "none known" : `lowest ${nats(lowest)}`,
    threshold === null ? "no threshold" : `threshold ${nats(threshold)}`,
    changed === null ? "no escalation" : `escalated at token ${changed}`,
  ].join(", ");
  const made = drawing(width, height, label, "curve");
  if (changed !== null && shown < count) {
    const from = x(shown + 0.5);
    const box = { x: from, y: EDGE.top, width: right - from, height: y(low) - EDGE.top };
    const why = shape("title", {}, "dropped before anybody saw it");
    made.append(shape("rect", { class: "dropped", ...box }, why));
  }
  made.append(line("axis", EDGE.left, y(low), right, y(low)));
  if (threshold !== null) {
    made.append(line("threshold", EDGE.left, y(threshold), right, y(threshold)));
    made.append(words(threshold.toFixed(2), EDGE.left - 6, y(threshold) + 4, "end"));
  }
  made.append(
    path(
      scores.map(([token, score]) => (score === null ? null : [x(token), y(score)])),
      "score",
    ),
  );
  for (const [token, score] of known) {
    const below = threshold !== null && score < threshold;
    const place = { cx: x(token).toFixed(1), cy: y(score).toFixed(1), r: count > 120 ? 1.2 : 2.5 };
    const told = shape("title", {}, `token ${token}: ${nats(score)}`);
    made.append(shape("circle", { class: below ? "point below" : "point", ...place }, told));
  }
  if (changed !== null) {
    const at = x(changed);
    const flip = at > width / 2;
    made.append(line("escalation", at, EDGE.top - 6, at, y(low)));
    made.append(words("escalated", at + (flip ? -5 : 5), EDGE.top + 2, flip ? "end" : "start"));
  }
  if (known.length > 0) {
    const highest = Math.max(...known.map(([, score]) => score));
    if (threshold === null || Math.abs(y(highest) - y(threshold)) > 12) {
      made.append(words(highest.toFixed(2), EDGE.left - 6, y(highest) + 4, "end"));
    }
  }
  made.append(words(String(first), x(first), height - 6, "middle"));
  if (count > 1) made.append(words(`token ${count}`, right, height - 6, "end"));
  return made;
}

const STAGES = {
  ticket: "the model that has read names its blocks",
  queue: "the mapper is busy with others",
  read: "blocks read from that model's cache",
  map: "converted",
  wait_target: "the model that takes over has no blocks yet",
  write: "blocks written into the other model's cache",
  admit: "that model's first step",
};

// Where each stage is drawn: that tickets come first, writing ends the conversion and admitting
// comes last is known, the lengths are measured.
function starts(stages, total) {
  const begin = (stages.ticket ?? 0) + (stages.queue ?? 0);
  const end = total - (stages.admit ?? 0);
  return (name) => {
    if (name === "ticket") return 0;
    if (name === "queue") return stages.ticket ?? 0;
    if (name === "admit") return Math.max(0, end);
    return name === "write" ? Math.max(begin, end - stages.write) : begin;
  };
}

function bar(name, start, spent, scale, className, told) {
  const filled = element("div", { class: `bar ${className}` });
  const width = scale > 0 ? Math.min(100, (100 * spent) / scale) : 0;
  filled.style.width = `${width}%`;
  filled.style.marginLeft = `${Math.min(100 - width, scale > 0 ? (100 * start) / scale : 0)}%`;
  const row = element("tr", { "data-row": name });
  if (told) row.title = told;
  row.append(element("th", { scope: "row" }, name));
  row.append(element("td", { class: "track" }, filled));
  row.append(element("td", { class: "ms" }, duration(spent)));
  return row;
}

// The ways to the first token after a handoff, to one scale: `ways` are [name, ms, class].
export function comparison(ways) {
  const scale = Math.max(...ways.map(([, ms]) => ms));
  const caption = element("caption", {}, "Decision to the first token of the model that takes over");
  const rows = ways.map(([name, ms, className]) => bar(name, 0, ms, scale, className));
  return element("table", { class: "bars comparison" }, caption, element("tbody", {}, ...rows));
}

// A handoff's stages to the scale of its total.
export function waterfall(stages, total) {
  const place = starts(stages, total);
  const names = Object.keys(STAGES).filter((name) => name in stages);
  names.push(...Object.keys(stages).filter((name) => !(name in STAGES)));
  const rows = names
    .filter((name) => !["queue", "wait_target"].includes(name) || stages[name] >= 1)
    .map((name) => bar(name, place(name), stages[name], total, "stage", STAGES[name]));
  const caption = element("caption", {}, "Inside the handoff; reading, mapping and writing overlap");
  return element("table", { class: "bars stages" }, caption, element("tbody", {}, ...rows));
}

// Realised parts over time, oldest first, with the target (or null).
export function history(values, target) {
  const [width, height] = [260, 56];
  const top = Math.min(1, 1.25 * Math.max(0.08, target ?? 0, ...values));
  const y = (part) => 4 + (1 - part / top) * (height - 8);
  const step = (width - 8) / Math.max(1, values.length - 1);
  const label = `Realised fraction over ${values.length} readings, now ${percent(values.at(-1))}`;
  const made = drawing(width, height, label, "history");
  made.append(line("axis", 4, height - 4, width - 4, height - 4));
  if (target !== null) made.append(line("threshold", 4, y(target), width - 4, y(target)));
  made.append(
    path(
      values.map((value, index) => [4 + index * step, y(value)]),
      "score",
    ),
  );
  const last = { cx: 4 + (values.length - 1) * step, cy: y(values.at(-1)), r: 2.5 };
  made.append(shape("circle", { class: "point", ...last }));
  return made;
}
