// The page: one conversation, one request at a time.

import { ask, Failure, models } from "./endpoint.js";
import { Panel } from "./panel.js";
import { Settings } from "./settings.js";
import { TurnView } from "./turn.js";
import { plural } from "./words.js";

const get = (id) => document.getElementById(id);
const settings = new Settings(connect);
const panel = new Panel(get("stats"), settings);
const form = get("ask");
const prompt = get("prompt");
const narrow = matchMedia("(max-width: 900px)");
const fold = () => { get("settings").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();

let messages = [];
let session = newSession();
let running = null;

// 128 random bits; `randomUUID` is missing where a page came over plain HTTP.
function newSession() {
  const bits = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bits, (one) => one.toString(16).padStart(2, "0")).join("")}`;
}

function say(words) {
  get("state").textContent = words;
}

async function connect() {
  try {
    const names = await models(settings.key);
    settings.setModels(names);
    get("send").disabled = false;
    say("Ready");
  } catch (error) {
    say(error.message);
  }
  panel.refresh();
}

function busy(controller) {
  running = controller;
  get("stop").hidden = controller === null;
  get("send").hidden = controller !== null;
  get("fresh").disabled = controller !== null;
}

// Follows the answer as it grows, unless the reader scrolled away.
function follow(change) {
  const page = document.scrollingElement;
  const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 160;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}

async function send(question) {
  const asked = [...messages, { role: "user", content: question }];
  const request = settings.request(asked, session);
  get("empty").hidden = true;
  const view = new TurnView(get("turns"), question, (name) => settings.roleOf(name));
  const controller = new AbortController();
  busy(controller);
  say("Answering");
  let text = "";
  try {
    const { answer, ttftMs } = await ask(request, {
      key: settings.key,
      signal: controller.signal,
      onPieces(pieces, soFar) {
        text = soFar.text;
        follow(() => view.add(pieces, soFar));
      },
    });
    follow(() => view.finish(answer, ttftMs, () => readAgain(request, answer)));
    say(`Answered with ${plural(answer.tokens, "token")}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped && !(error instanceof Failure)) throw error;
    const words = stopped ? "Stopped." : error.message;
    view.stop(words, !stopped);
    say(words);
    if (text === "" && prompt.value === "") prompt.value = question;
  } finally {
    busy(null);
  }
  // What was seen belongs to the conversation, also when it broke off.
  if (text !== "") messages = [...asked, { role: "assistant", content: text }];
  panel.refresh();
  prompt.focus();
}

// The same request, changing models after as many tokens, by reading; in a session of its own, so
// that the large model holds nothing of it.
async function readAgain(request, before) {
  const small = before.servedBy.find((run) => settings.roleOf(run.model) === "small")?.tokens ?? 0;
  const cascade = { explain: true, session_id: newSession(), recompute: true };
  cascade.escalate_after_tokens = small;
  try {
    const { answer } = await ask({ ...request, cascade }, { key: settings.key });
    const handoff = answer.cascade?.handoff;
    const ms = handoff?.handoff_ms ?? null;
    const words =
      ms === null
        ? "This time the small model ended its answer before the change."
        : `It read ${plural(handoff.reread_tokens ?? 0, "token")} again.`;
    return { ms, words, text: answer.text };
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    return { ms: null, words: error.message, text: "" };
  } finally {
    panel.refresh();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const question = prompt.value.trim();
  if (question === "" || running !== null || get("send").disabled) return;
  prompt.value = "";
  send(question);
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

get("stop").addEventListener("click", () => running?.abort());

get("fresh").addEventListener("click", () => {
  messages = [];
  session = newSession();
  get("turns").replaceChildren();
  get("empty").hidden = false;
  say("A new conversation");
  prompt.focus();
});

await connect();
panel.start();
