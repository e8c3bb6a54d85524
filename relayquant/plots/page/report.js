"use strict";
// What moves in the page. Texts come from a model: they are set as text, never as HTML.
const rows = JSON.parse(document.getElementById("rows").textContent);
const find = (id) => document.getElementById(id);

function add(parent, tag, text, attributes) {
  const element = parent.namespaceURI.endsWith("svg") || tag === "svg"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined && text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

// --- One operator -------------------------------------------------------------------------------

const percent = (share) => (100 * share).toPrecision(3) + " %";
const decibels = (value) => (typeof value === "number" ? value + " dB" : value);
const FIELDS = [
  ["operator", (row) => row.op],
  ["runs on", (row) => (row.quantized ? row.dtype + (row.pattern ? ", pattern " + row.pattern : "") : "float")],
  ["why in float", (row) => row.reason],
  ["what to do", (row) => row.advice],
  ["passed over", (row) => (row.passed_over || []).join("; ")],
  ["parameters", (row) => row.scale === undefined ? undefined
    : `scale ${row.scale}, zero point ${row.zero_point}` + (row.scheme ? `, ${row.scheme}` : "")
      + (row.parameters ? `; the first of ${row.parameters}` : "")],
  ["picked by", (row) => row.observer],
  ["line of the configuration", (row) => row.rule],
  ["SQNR, accumulated", (row) => decibels(row.sqnr)],
  ["SQNR, alone", (row) => decibels(row.alone)],
  ["outputs, it alone quantized", (row) => decibels(row.score)],
  ["cosine", (row) => row.cosine],
  ["largest error", (row) => row.max_error],
  ["outside of its range", (row) => row.saturated === undefined ? undefined : percent(row.saturated)],
  ["multiply-adds", (row) => row.macs && row.macs.toLocaleString("en")],
  ["time of its kernel", (row) => row.us === undefined ? undefined : row.us + " us"],
  ["share of the integer peak", (row) => row.peak === undefined ? undefined : percent(row.peak)],
  ["sums held in", (row) => row.accumulator],
  ["free bits in the register", (row) => row.headroom === undefined ? undefined
    : `${row.headroom}; with any input ${row.worst_headroom}`],
  ["values inside", (row) => row.values && row.values.join(", ")],
  ["nodes of the source model", (row) => row.sources && row.sources.join(", ")],
];

function openOperator(index) {
  const row = rows[index];
  find("operator-head").textContent = row.name;
  const body = find("operator-body");
  body.replaceChildren();
  const list = add(body, "dl");
  for (const [label, value] of FIELDS) {
    const text = value(row);
    if (text === undefined || text === "" || text === 0) continue;
    add(list, "dt", label);
    add(list, "dd", text);
  }
  if (row.histogram) drawHistogram(body, row.histogram);
  if (row.weights) drawWeights(body, row.weights);
  find("operator").showModal();
}

function addPlot(body, title, label) {
  add(body, "h3", title);
  return add(body, "svg", null, {class: "plot", viewBox: "0 0 640 170", role: "img", "aria-label": label});
}

function drawHistogram(body, data) {
  const label = `Histogram from ${data.low} to ${data.high}`
    + (data.chosen.length ? `, chosen range ${data.chosen.join(" to ")}` : "");
  const plot = addPlot(body, "Values in float (filled) and on integers (line)", label);
  const width = 620, base = 145, high = 125, bins = data.floating.length;
  const top = Math.log1p(Math.max(...data.floating, ...data.integer, 1));
  const x = (value) => 10 + width * (value - data.low) / (data.high - data.low);
  const outline = (counts) => {
    let path = `M10 ${base}`;
    counts.forEach((count, i) => {
      const y = base - high * Math.log1p(count) / top;
      path += `L${10 + width * i / bins} ${y}L${10 + width * (i + 1) / bins} ${y}`;
    });
    return path + `L630 ${base}`;
  };
  add(plot, "path", null, {class: "floating", d: outline(data.floating) + "z"});
  add(plot, "path", null, {class: "integer", d: outline(data.integer)});
  add(plot, "line", null, {class: "axis", x1: 10, x2: 630, y1: base, y2: base});
  for (const end of data.chosen) {
    add(plot, "line", null, {class: "chosen", x1: x(end), x2: x(end), y1: 12, y2: base});
  }
  add(plot, "text", data.low, {x: 10, y: 162});
  add(plot, "text", data.high, {x: 630, y: 162, "text-anchor": "end"});
  const chosen = data.chosen.length ? `chosen range ${data.chosen[0]} to ${data.chosen[1]} (dashed); ` : "";
  add(plot, "text", chosen + "counts in logarithms", {x: 320, y: 162, "text-anchor": "middle"});
}

function drawWeights(body, data) {
  const lowest = Math.min(...data.lowest), highest = Math.max(...data.highest);
  const plot = addPlot(body, `Weights of its ${data.channels} output channels`,
    `Range of the weights by output channel, from ${lowest} to ${highest}`);
  const top = 10, base = 145, count = data.lowest.length;
  const reach = Math.max(Math.abs(lowest), Math.abs(highest)) || 1;
  const y = (value) => (top + base) / 2 - (base - top) / 2 * value / reach;
  add(plot, "line", null, {class: "axis", x1: 10, x2: 630, y1: y(0), y2: y(0)});
  for (let i = 0; i < count; i++) {
    const above = y(data.highest[i]), below = y(data.lowest[i]);
    add(plot, "rect", null, {class: "floating", x: 10 + 620 * i / count, y: above,
      width: Math.max(620 / count - 1, 1), height: Math.max(below - above, 1)});
  }
  add(plot, "text", `from ${lowest} to ${highest}` + (count < data.channels ? "; neighbours are drawn as one" : ""),
    {x: 320, y: 162, "text-anchor": "middle"});
}

for (const button of document.querySelectorAll("[data-open]")) {
  button.addEventListener("click", () => openOperator(button.dataset.open));
}
find("operator").addEventListener("click", (event) => {
  if (event.target === find("operator")) find("operator").close();
});

// --- The chart of errors ------------------------------------------------------------------------

const ORDERS = {depth: (item) => Number(item.dataset.row), damage: (item) => Number(item.dataset.damage)};
const sorters = [...document.querySelectorAll("[data-sort]")];
for (const sorter of sorters) {
  sorter.addEventListener("click", () => {
    const order = ORDERS[sorter.dataset.sort];
    find("chart").append(...[...find("chart").children].sort((a, b) => order(a) - order(b)));
    for (const other of sorters) other.setAttribute("aria-pressed", String(other === sorter));
  });
}

function describeErrors(row) {
  const lines = [["result", row.sqnr], ["alone", row.alone], ["outputs, it alone quantized", row.score]];
  return [row.name, `${row.op}, ${row.quantized ? row.dtype : "float"}`,
    ...lines.filter(([, value]) => value !== undefined).map(([what, value]) => `${what}: ${decibels(value)}`)].join("\n");
}

for (const item of document.querySelectorAll("#chart li")) {
  item.addEventListener("pointermove", (event) => {
    const tip = find("tip");
    tip.textContent = describeErrors(rows[item.dataset.row]);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  });
  item.addEventListener("pointerleave", () => { find("tip").hidden = true; });
}

// --- Tables -------------------------------------------------------------------------------------

function readCell(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = Number.parseFloat(text.replaceAll(",", ""));
  return {text, number: text === "exact" ? Infinity : number};
}

function sortTable(table, column, head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const isNumber = head.classList.contains("number") || head.textContent === "#";
  const sorted = [...table.tBodies[0].rows].map((row) => [row, readCell(row, column)]);
  sorted.sort(([, a], [, b]) => {
    if (!a.text || !b.text) return Boolean(b.text) - Boolean(a.text);  // what is empty comes last
    const order = isNumber ? a.number - b.number || 0 : a.text.localeCompare(b.text, "en", {numeric: true});
    return down ? -order : order;
  });
  table.tBodies[0].append(...sorted.map(([row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => sortTable(table, column, head));
  });
}

function filterTable(id) {
  const table = find(id), words = document.querySelector(`[data-filter="${id}"]`).value.toLowerCase().split(/\s+/);
  const kind = id === "ledger" ? find("kind").value : "";
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) || (kind !== "" && row.dataset.kind !== kind);
    shown += !row.hidden;
  }
  const status = document.querySelector(`[data-count="${id}"]`);
  status.textContent = `${shown} of ${table.tBodies[0].rows.length} ${status.dataset.noun}`;
}

for (const input of document.querySelectorAll("[data-filter]")) {
  input.addEventListener("input", () => filterTable(input.dataset.filter));
  filterTable(input.dataset.filter);
}
find("kind").addEventListener("change", () => filterTable("ledger"));

// --- The graph ----------------------------------------------------------------------------------

const network = find("network");
const boxes = [...network.querySelectorAll(".box[data-index]")];
const whole = {x: -20, y: -20, width: Number(network.dataset.width) + 40, height: Number(network.dataset.height) + 40};
let view = {...whole};

function show(next) {
  view = next;
  network.setAttribute("viewBox", `${view.x} ${view.y} ${view.width} ${view.height}`);
}

function zoom(factor, centre) {
  const at = centre || {x: view.x + view.width / 2, y: view.y + view.height / 2};
  const width = Math.min(Math.max(view.width * factor, 120), 4 * Math.max(whole.width, whole.height));
  const scale = width / view.width;
  show({x: at.x - (at.x - view.x) * scale, y: at.y - (at.y - view.y) * scale, width, height: view.height * scale});
}

function toDrawing(event) {
  const point = new DOMPoint(event.clientX, event.clientY);
  return point.matrixTransform(network.getScreenCTM().inverse());
}

// Of a long network the whole is too small to read: begin at its top, with names at their size.
function showTop() {
  const frame = find("view").getBoundingClientRect();
  const width = Math.max(frame.width, 1);
  const first = network.querySelector(".input") || boxes[0];
  const middle = first && whole.width > width ? placeOf(first).x + 84 : whole.x + whole.width / 2;
  show({x: middle - width / 2, y: whole.y, width, height: frame.height});
}

function placeOf(box) {
  const [x, y] = box.getAttribute("transform").match(/-?\d+/g).map(Number);
  return {x, y};
}

function centre(box) {
  const {x, y} = placeOf(box);
  const frame = find("view").getBoundingClientRect();
  const width = Math.min(view.width, 1200), height = width * frame.height / Math.max(frame.width, 1);
  show({x: x + 84 - width / 2, y: y + 22 - height / 2, width, height});
}

network.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, toDrawing(event));
}, {passive: false});
let drag = null;
network.addEventListener("pointerdown", (event) => {
  drag = {from: toDrawing(event), moved: false, x: event.clientX, y: event.clientY};
});
network.addEventListener("pointermove", (event) => {
  if (drag === null) return;
  if (!drag.moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 5) return;
  if (!drag.moved) network.setPointerCapture(event.pointerId);
  drag.moved = true;
  const to = toDrawing(event);
  show({...view, x: view.x + drag.from.x - to.x, y: view.y + drag.from.y - to.y});
});
network.addEventListener("pointerup", (event) => {
  const box = event.target.closest(".box[data-index]");
  if (drag !== null && !drag.moved && box !== null) {
    focusBox(box);
    openOperator(box.dataset.index);
  }
  drag = null;
});
network.addEventListener("pointercancel", () => { drag = null; });

// One box at a time is in the order of the Tab key: a network has hundreds.
function focusBox(box) {
  for (const other of boxes) other.tabIndex = -1;
  box.tabIndex = 0;
  box.focus({preventScroll: true});
}
if (boxes.length) boxes[0].tabIndex = 0;
const STEPS = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1};
network.addEventListener("keydown", (event) => {
  const box = event.target.closest(".box[data-index]");
  if (box === null) return;
  if (event.key === "Enter" || event.key === " ") openOperator(box.dataset.index);
  else if (event.key in STEPS) {
    const next = boxes[boxes.indexOf(box) + STEPS[event.key]];
    if (next) { focusBox(next); centre(next); }
  } else return;
  event.preventDefault();
});

function colour() {
  const mode = find("colour").value;
  network.dataset.colour = mode;
  for (const list of find("legend").children) list.classList.toggle("shown", list.dataset.for === mode);
}
find("colour").addEventListener("change", colour);
colour();
find("closer").addEventListener("click", () => zoom(1 / 1.5));
find("farther").addEventListener("click", () => zoom(1.5));
find("whole").addEventListener("click", () => show({...whole}));

let hits = [], turn = 0;
function search() {
  const words = find("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  hits = words.length ? boxes.filter((box) => {
    const row = rows[box.dataset.index], text = `${row.name} ${row.op} ${row.dtype}`.toLowerCase();
    return words.every((word) => text.includes(word));
  }) : [];
  for (const box of boxes) box.classList.toggle("hit", hits.includes(box));
  network.classList.toggle("searching", words.length > 0);
  find("found").textContent = words.length ? `${hits.length} found` + (hits.length > 1 ? "; Enter goes to the next" : "") : "";
  turn = 0;
  if (hits.length) centre(hits[0]);
}
find("find").addEventListener("input", search);
find("find").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !hits.length) return;
  event.preventDefault();
  turn = (turn + 1) % hits.length;
  centre(hits[turn]);
});
showTop();
addEventListener("beforeprint", () => show({...whole}));

// --- Texts to copy ------------------------------------------------------------------------------

for (const button of document.querySelectorAll("[data-copy]")) {
  const source = find(button.dataset.copy), status = find(`${button.dataset.copy}-copied`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      status.textContent = "copied";
    } catch {
      // Pages that are opened from a disk may not be allowed to: select it instead.
      getSelection().selectAllChildren(source);
      status.textContent = "selected; press Ctrl+C";
    }
  });
}
