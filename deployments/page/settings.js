// The settings panel: what the next request asks for. The API key stays in its field, in memory.

const field = (id) => document.getElementById(id);

function whole(id) {
  const value = field(id).valueAsNumber;
  return Number.isFinite(value) ? Math.trunc(value) : null;
}

export class Settings {
  constructor(onKey) {
    this.names = [];
    const show = () => this.#show();
    for (const id of ["model", "route", "policy"]) field(id).addEventListener("change", show);
    field("key").addEventListener("change", onKey);
    this.#show();
  }

  get key() {
    return field("key").value.trim();
  }

  get model() {
    return field("model").value;
  }

  // Shows the served names: the routed one first, then the small and the large model.
  setModels(names) {
    this.names = names;
    const choices = names.map((name) => new Option(name, name));
    field("model").replaceChildren(...choices);
    field("small-name").textContent = names[1] ?? "small";
    field("large-name").textContent = names[2] ?? "large";
    this.#show();
  }

  // `small`, `large`, or `other` for a name that is neither.
  roleOf(name) {
    return { 1: "small", 2: "large" }[this.names.indexOf(name)] ?? "other";
  }

  // A request body for these messages.
  request(messages, session) {
    const body = { model: this.model, messages, logprobs: true, top_logprobs: 2 };
    const longest = whole("max-tokens");
    if (longest !== null) body.max_tokens = longest;
    const temperature = field("temperature").valueAsNumber;
    if (Number.isFinite(temperature)) body.temperature = temperature;
    if (this.model === this.names[0]) body.cascade = this.#cascade(session);
    return body;
  }

  #cascade(session) {
    const wish = { explain: true, session_id: session };
    const route = field("route").value;
    if (route === "small" || route === "large") wish.force = route;
    if (route === "after") wish.escalate_after_tokens = whole("after-tokens") ?? 0;
    if (route === "policy") {
      if (field("policy").value) wish.policy = field("policy").value;
      const target = field("target").valueAsNumber;
      if (Number.isFinite(target)) wish.target_fraction = target;
    }
    if (field("recompute").checked) wish.recompute = true;
    return wish;
  }

  #show() {
    const routed = this.names.length === 0 || this.model === this.names[0];
    const route = field("route").value;
    field("routing").disabled = !routed;
    field("policy-row").hidden = route !== "policy";
    field("target-row").hidden = route !== "policy";
    field("after-row").hidden = route !== "after";
  }
}
