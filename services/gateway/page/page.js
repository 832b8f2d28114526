// The page: a chat whose canvas is drawn step by step, and the cluster's state once a second. No framework, no build step.
// What the server sends is text, never markup: everything goes into the page by textContent.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const SAMPLES = [
  "What is 12 + 7?",
  "Tom has 12 apples. He buys 7 more. How many apples does he have?",
  "Mia has 9 books. She gets 6 more. Mia multiplies them by 3. She loses 11. How many books does she have now?",
  "1) What is 12 + 7? 2) Tom has 15 pens. He loses 4. How many pens does he have? 3) Sum of the numbers: 4, 9, 6",
];

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const showFacts = (list, facts) =>
  list.replaceChildren(
    ...facts.map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))),
  );

const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);

// --- the API key -------------------------------------------------------------------------------------------------

const KEY = "tediserve-api-key"; // in sessionStorage: of this tab, and gone with it

class NeedsKey extends Error {}

async function call(path, options = {}) {
  // Fetches with the key, if there is one. Throws NeedsKey where another one is wanted, Error at any other refusal.
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  throw new (response.status === 401 ? NeedsKey : Error)(await errorText(response));
}

async function errorText(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The gateway answered ${response.status}.`;
}

function askForKey(why) {
  const isFirst = !sessionStorage.getItem(KEY);
  sessionStorage.removeItem(KEY);
  if (!state.model) $("model").textContent = "an API key is needed";
  $("access-why").textContent = isFirst ? "" : why;
  $("access").hidden = false;
  if (document.activeElement === document.body) $("key").focus();
}

function useKey() {
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("access").hidden = true;
  poll();
}

// --- the canvas --------------------------------------------------------------------------------------------------

class Canvas {
  // Cells of the output area; a step commits some of them. A later attempt starts its block anew.
  constructor(root) {
    this.root = root;
    this.open(0, 1);
  }

  open(tokens, blockSize) {
    this.blockSize = blockSize;
    this.attempt = 0;
    this.committed = 0;
    this.cells = Array.from({ length: tokens }, (_, position) => {
      const cell = element("span");
      this.mask(cell, position);
      return cell;
    });
    this.root.replaceChildren(...this.cells);
    this.describe();
  }

  mask(cell, position) {
    cell.className = position && position % this.blockSize === 0 ? "cell masked block-start" : "cell masked";
    cell.textContent = "";
    cell.title = "masked";
    cell.style.background = "";
  }

  step(step) {
    if (step.attempt < this.attempt) return;
    if (step.attempt > this.attempt) {
      this.attempt = step.attempt;
      this.cells.forEach((cell, position) => {
        if (position >= step.block_index * this.blockSize && !cell.classList.contains("masked")) {
          this.mask(cell, position);
          this.committed -= 1;
        }
      });
    }
    this.root.querySelectorAll(".new").forEach((cell) => cell.classList.remove("new"));
    for (const { position, text, confidence } of step.commits) this.commit(position, text, confidence, step.step);
    this.describe();
  }

  commit(position, text, confidence, step) {
    const cell = this.cells[position];
    if (!cell) return;
    if (cell.classList.contains("masked")) this.committed += 1;
    cell.classList.remove("masked");
    cell.classList.add("new");
    cell.textContent = text === "\n" ? "⏎" : text || "▪"; // no text: the end of the answer
    cell.title = `confidence ${confidence.toFixed(3)}, committed in step ${step}`;
    cell.style.background = `color-mix(in hsl, hsl(var(--high)) ${Math.round(100 * confidence)}%, hsl(var(--low)))`;
  }

  describe() {
    const total = this.cells.length;
    this.root.setAttribute("aria-label", total ? `The canvas: ${this.committed} of ${total} tokens committed` : "The canvas: nothing asked yet");
  }
}

const canvas = new Canvas($("canvas"));

// --- the chat ----------------------------------------------------------------------------------------------------

let running = null; // AbortController of the call under way

async function ask() {
  running = new AbortController();
  setRunning(true);
  const began = performance.now();
  const live = { steps: 0, threshold: null, instance: "–", text: "" };
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(callBody()),
      signal: running.signal,
    });
    for await (const chunk of events(response.body)) take(chunk, live, began);
  } catch (error) {
    showError(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    setRunning(false);
  }
}

function callBody() {
  const body = {
    model: state.model,
    messages: [{ role: "user", content: $("prompt").value }],
    max_tokens: Number($("max-tokens").value),
    stream: true,
    watch: true,
  };
  if ($("slo").value) body.slo_ms = Number($("slo").value);
  if ($("mode").value === "pin") body.threshold = Number($("pin").value);
  return body;
}

async function* events(stream) {
  let buffered = "";
  for await (const text of stream.pipeThrough(new TextDecoderStream())) {
    buffered += text;
    const parts = buffered.split("\n\n");
    buffered = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function take(chunk, live, began) {
  if (chunk.error) throw new Error(chunk.error.message);
  const ours = chunk.tediserve ?? {};
  if (ours.canvas) canvas.open(ours.canvas.tokens, ours.canvas.block_size);
  if (ours.step) {
    canvas.step(ours.step);
    Object.assign(live, { steps: ours.step.step, threshold: ours.step.threshold, instance: `${ours.step.instance_id} (TP ${ours.step.tp_degree})` });
  }
  const text = chunk.choices?.[0]?.delta?.content;
  if (text) {
    live.text += text;
    $("answer").textContent = live.text;
  }
  const facts = [
    ["Steps", String(ours.steps ?? live.steps)],
    ["Threshold", ours.mean_threshold != null ? `${ours.mean_threshold.toFixed(2)} (mean)` : live.threshold != null ? live.threshold.toFixed(2) : "–"],
    ["Instance", live.instance],
    ["Time", seconds((performance.now() - began) / 1000)],
  ];
  if (ours.deadline_met !== undefined && ours.deadline_met !== null) facts.push(["Deadline", ours.deadline_met ? "met" : "missed"]);
  if (ours.moves !== undefined) facts.push(["Moves", String(ours.moves)]);
  showFacts($("facts"), facts);
}

function setRunning(isRunning) {
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
  if (!isRunning) {
    running = null;
    return;
  }
  $("error").hidden = true;
  $("answer").textContent = "…";
  canvas.open(0, 1);
  showFacts($("facts"), []);
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = false;
}

// --- the cluster -------------------------------------------------------------------------------------------------

const state = { model: "" };

async function poll() {
  try {
    const response = await call("v1/cluster", { signal: AbortSignal.timeout(5000) });
    showCluster(await response.json());
  } catch (error) {
    if (error instanceof NeedsKey) return askForKey(error.message); // goes on with a key
    $("cluster-state").textContent = `No news from the gateway: ${error.message}`;
  }
  setTimeout(poll, POLL_MS);
}

function showCluster(cluster) {
  if (state.model !== cluster.model) showModel(cluster);
  const running = cluster.instances.reduce((sum, instance) => sum + instance.requests, 0);
  const sentence = `${cluster.instances.length} instances hold ${running} requests.`;
  if ($("cluster-state").textContent !== sentence) $("cluster-state").textContent = sentence; // announced on change only
  const load = cluster.load;
  showFacts($("load"), load ? [
    ["Open requests", String(load.num_open)],
    ["Work asked for", `${load.demand_s.toFixed(2)} instance-s`],
    ["Capacity", `${load.capacity_s.toFixed(2)} instance-s in ${seconds(load.horizon_s)}`],
    ["Caps", load.caps.map((cap) => `${cap.threshold.toFixed(2)} (priority ${cap.priority})`).join(", ") || "none"],
    ["Hopeless", String(load.num_hopeless)],
  ] : [["Load control", "not heard from"]]);
  $("instances").replaceChildren(...cluster.instances.map(instanceRow));
  $("attainment").replaceChildren(attainmentChart(cluster.attainment));
  $("plan").textContent = cluster.plan ? `Revision ${cluster.plan.revision}: ${cluster.plan.reason || "no reason given"}` : "Fixed: no plan has been made.";
}

function showModel(cluster) {
  state.model = cluster.model;
  $("model").textContent = cluster.model;
  const [low, high] = [cluster.thresholds.at(0), cluster.thresholds.at(-1)];
  Object.assign($("pin"), { min: low, max: high, value: high });
  $("pin-value").textContent = high.toFixed(2);
  $("max-tokens").max = cluster.max_output_tokens;
}

function instanceRow(instance) {
  const cells = [
    instance.instance_id,
    instance.node_id,
    String(instance.tp_degree),
    `${instance.requests} of ${instance.max_requests}`,
    `${instance.held_tokens} of ${instance.kv_tokens}`,
    `${(1 / instance.latency_ratio).toFixed(2)} ×`,
    instance.draining ? "draining" : "taking requests",
  ];
  return element("tr", {}, ...cells.map((textContent, index) => element(index ? "td" : "th", index ? { textContent } : { textContent, scope: "row" })));
}

function attainmentChart(bins) {
  const asked = bins.reduce((sum, bin) => sum + bin.with_slo, 0);
  if (!asked) return element("p", { textContent: "No request with a deadline has ended lately." });
  const met = bins.reduce((sum, bin) => sum + bin.met, 0);
  const [width, height, left] = [600, 90, 34];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height + 18}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${Math.round((100 * met) / asked)} % of ${asked} requests with a deadline met it`);
  const add = (name, attributes, text = "") => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    svg.append(made);
  };
  for (const [share, label] of [[1, "100 %"], [0.5, "50 %"], [0, "0 %"]]) {
    const y = 4 + (1 - share) * (height - 8);
    add("line", { class: "axis", x1: left, x2: width, y1: y, y2: y });
    add("text", { x: 0, y: y + 4 }, label);
  }
  const step = (width - left) / bins.length;
  bins.forEach((bin, index) => {
    if (!bin.with_slo) return;
    const y = 4 + (1 - bin.met / bin.with_slo) * (height - 8);
    add("circle", { class: "met", cx: left + (index + 0.5) * step, cy: y, r: 3 });
  });
  add("text", { x: left, y: height + 14 }, "10 minutes ago");
  add("text", { x: width - 22, y: height + 14 }, "now");
  return svg;
}

// --- start -------------------------------------------------------------------------------------------------------

for (const sample of SAMPLES) {
  const button = element("button", { type: "button", textContent: sample.length > 40 ? `${sample.slice(0, 38)} …` : sample, title: sample });
  button.addEventListener("click", () => { $("prompt").value = sample; });
  document.querySelector(".samples").append(button);
}
$("prompt").value = SAMPLES[2];
$("mode").addEventListener("change", () => { $("pin").disabled = $("mode").value !== "pin"; });
$("pin").addEventListener("input", () => { $("pin-value").textContent = Number($("pin").value).toFixed(2); });
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});
$("stop").addEventListener("click", () => running?.abort());
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
poll();
