"use strict";
// Names of tensors and files may hold anything: they reach the page as text nodes and on canvases only.
const began = performance.now();
const root = document.documentElement;
window.addEventListener("error", () => { root.dataset.failed = "1"; });
const report = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, text, cls) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  return node;
};
const human = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1024; at += 1; }
  return `${at ? n.toPrecision(n < 10 ? 3 : 4).replace(/\.?0+$/, "") : n} ${units[at]}`;
};
const count = (n) => n.toLocaleString("en");
// Characters that change the order of text or hide are shown by their number.
const plain = (text) => text.replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

const COLOURS = {
  BF16: "#3b82f6", F16: "#14b8a6", F32: "#f59e0b", F64: "#ef4444", F8_E4M3: "#a855f7", F8_E5M2: "#c084fc",
  F8_E8M0: "#d946ef", F4: "#ec4899", I8: "#84cc16", U8: "#65a30d", I16: "#22c55e", U16: "#16a34a", I32: "#10b981",
  U32: "#059669", I64: "#0ea5e9", U64: "#0284c7", BOOL: "#94a3b8", C64: "#f43f5e",
};
const colourOf = (dtype) => {
  if (Object.hasOwn(COLOURS, dtype)) return COLOURS[dtype];
  let hash = 7;
  for (const c of dtype) hash = (hash * 31 + c.charCodeAt(0)) % 360;
  return `hsl(${hash} 60% 55%)`;
};
const shardColour = (number) => `hsl(${(number * 137.5) % 360} 55% 55%)`;

let set, tree, current, matches, selected = -1, boxes = [];

// --- The tree of modules -------------------------------------------------------------------------------------------

function buildTree() {
  const top = { name: "", size: 0, children: new Map(), tensor: -1, parent: null };
  for (let t = 0; t < set.names.length; t += 1) {
    const bytes = set.bytes[t];
    if (!bytes) continue;
    let node = top;
    top.size += bytes;
    const parts = set.names[t].split(".");
    for (let i = 0; i < parts.length; i += 1) {
      let next = node.children.get(parts[i]);
      if (!next) {
        next = { name: parts[i], size: 0, children: new Map(), tensor: -1, parent: node };
        node.children.set(parts[i], next);
      }
      next.size += bytes;
      node = next;
    }
    if (node.tensor >= 0) node.also = (node.also || []).concat(t);
    else node.tensor = t;
  }
  return finish(top);
}

const collator = new Intl.Collator("en", { numeric: true });
const bySize = (a, b) => b.size - a.size || collator.compare(a.name, b.name);

// Sorts the children by size.
function finish(first) {
  const left = [first];
  while (left.length) {
    const node = left.pop();
    node.list = [...node.children.values()].sort(bySize);
    // A tensor whose name continues in others stands beside them.
    if (node.tensor >= 0 && node.list.length) {
      const own = set.bytes[node.tensor];
      node.list.push({ name: "(itself)", size: own, list: [], tensor: node.tensor, parent: node });
      node.tensor = -1;
      node.list.sort(bySize);
    }
    for (const child of node.list) if (child.children) left.push(child);
  }
  return first;
}

const pathOf = (node) => {
  const parts = [];
  for (let at = node; at.parent; at = at.parent) parts.unshift(at.name);
  return parts.join(".");
};

function countMatches(node) {
  const order = [], left = [node];
  while (left.length) {
    const at = left.pop();
    order.push(at);
    left.push(...at.list);
  }
  for (const at of order.reverse()) {
    at.hit = at.list.length ? at.list.some((child) => child.hit) : !matches || matches[at.tensor] === 1;
  }
}

// The dtype with most bytes below a node.
function mainDtype(node) {
  let at = node;
  while (at.list.length) at = at.list[0];
  return set.dtypes[set.dtype[at.tensor]];
}

// Squarified rows of `list` in a rectangle.
function squarify(list, x, y, w, h, visit) {
  let total = 0;
  for (const node of list) total += node.size;
  let at = 0;
  while (at < list.length && w > 0 && h > 0) {
    const side = Math.min(w, h), scale = (w * h) / total;
    let sum = 0, worst = Infinity, end = at;
    while (end < list.length) {
      const area = list[end].size * scale, next = sum + area;
      const ratio = Math.max((side * side * list[at].size * scale) / (next * next), (next * next) / (side * side * area));
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      end += 1;
    }
    const thick = sum / side;
    let along = 0;
    for (let i = at; i < end; i += 1) {
      const length = (list[i].size * scale) / thick;
      if (w >= h) visit(list[i], x, y + along, thick, length);
      else visit(list[i], x + along, y, length, thick);
      along += length;
    }
    for (let i = at; i < end; i += 1) total -= list[i].size;
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    at = end;
  }
}

function context(canvas, height) {
  const width = Math.max(canvas.parentElement.clientWidth - 2, 200), scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  return { ctx, width, height, style: getComputedStyle(root) };
}

function drawTree() {
  const { ctx, width, height, style } = context($("tree"), Math.max(360, Math.min(640, window.innerHeight * 0.62)));
  const panel = style.getPropertyValue("--panel"), text = style.getPropertyValue("--text");
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  boxes = [];
  const label = (words, x, y, w, colour) => {
    ctx.fillStyle = colour;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y - 8, w, 16);
    ctx.clip();
    ctx.fillText(words, x + 4, y);
    ctx.restore();
  };
  const draw = (node, x, y, w, h) => {
    node.box = [x, y, w, h];
    const leaf = !node.list.length;
    if (leaf || w * h < 12 || w < 3 || h < 3) {
      ctx.globalAlpha = node.hit ? 1 : 0.13;
      ctx.fillStyle = colourOf(mainDtype(node));
      ctx.fillRect(x, y, Math.max(w - 0.6, 0.4), Math.max(h - 0.6, 0.4));
      ctx.globalAlpha = 1;
      boxes.push(node);
      if (leaf && node.tensor === selected) {
        ctx.strokeStyle = text;
        ctx.lineWidth = 2;
        ctx.strokeRect(x + 1, y + 1, Math.max(w - 2, 1), Math.max(h - 2, 1));
      }
      if (leaf && w > 60 && h > 18) label(plain(node.name), x, y + h / 2, w - 4, "#fff");
      return;
    }
    const head = w > 50 && h > 34 ? 15 : 0;
    if (head) label(`${plain(node.name)}  ${human(node.size)}`, x, y + 8, w, text);
    const pad = w > 30 && h > 30 ? 1.5 : 0;
    squarify(node.list, x + pad, y + head + pad, w - 2 * pad, h - head - 2 * pad, draw);
  };
  ctx.fillStyle = panel;
  ctx.fillRect(0, 0, width, height);
  current.box = [0, 0, width, height];
  if (current.list.length) squarify(current.list, 0, 0, width, height, draw);
  else if (current.tensor >= 0) draw(current, 0, 0, width, height);
  const crumbs = $("crumbs");
  crumbs.replaceChildren();
  for (let at = current; at; at = at.parent) {
    const node = at, button = make("button", at.parent ? `. ${plain(at.name)}` : "all modules");
    button.type = "button";
    button.addEventListener("click", () => enter(node));
    crumbs.prepend(button);
  }
}

function enter(node) {
  current = node;
  drawTree();
}

const inside = (node, x, y) => {
  const [bx, by, bw, bh] = node.box;
  return x >= bx && x < bx + bw && y >= by && y < by + bh;
};

// --- Files and shards ----------------------------------------------------------------------------------------------

let mapHits = [];

function drawMap() {
  const rows = set.shards.length, step = rows > 120 ? 6 : rows > 40 ? 10 : 18, gap = rows > 40 ? 1 : 3, top = 26, space = 46;
  const { ctx, width, style } = context($("map"), top + space + rows * step + 4);
  const empty = style.getPropertyValue("--empty"), text = style.getPropertyValue("--text"), dim = style.getPropertyValue("--dim");
  const shown = set.files.reduce((sum, file) => sum + file.size, 0) || 1;
  const longest = Math.max(1, ...set.shards.map((shard) => shard.size));
  const starts = [];
  let at = 0;
  for (const file of set.files) { starts.push(at); at += file.size; }
  ctx.fillStyle = empty;
  ctx.fillRect(0, 0, width, top);
  for (let s = 0; s < rows; s += 1) ctx.fillRect(0, top + space + s * step, (set.shards[s].size / longest) * width, step - gap);
  mapHits = [];
  const lines = [];
  for (let t = 0; t < set.names.length; t += 1) {
    const x = ((starts[set.file[t]] + set.offset[t]) / shown) * width, w = Math.max((set.bytes[t] / shown) * width, 0.15);
    ctx.globalAlpha = !matches || matches[t] ? 1 : 0.15;
    const from = set.first[t], to = set.first[t + 1];
    for (let p = from; p < to; p += 1) {
      const shard = set.pieceShard[p], y = top + space + shard * step;
      const px = (set.pieceStart[p] / longest) * width, pw = Math.max(((set.pieceEnd[p] - set.pieceStart[p]) / longest) * width, 0.15);
      const part = w / (to - from);
      ctx.fillStyle = shardColour(shard);
      ctx.fillRect(x + (p - from) * part, 0, part, top);
      ctx.fillStyle = colourOf(set.dtypes[set.dtype[t]]);
      ctx.fillRect(px, y, pw, step - gap);
      mapHits.push(px, pw, shard, t);
      if (t === selected) lines.push([x + w / 2, px + pw / 2, y, px, pw]);
    }
  }
  ctx.globalAlpha = 1;
  ctx.strokeStyle = text;
  for (const [from, to, y, px, pw] of lines.slice(0, 400)) {
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(from, top);
    ctx.bezierCurveTo(from, top + space, to, y - space, to, y);
    ctx.stroke();
    ctx.lineWidth = 1.5;
    ctx.strokeRect(px, y, Math.max(pw, 2), step - gap);
  }
  ctx.fillStyle = dim;
  ctx.font = "11px system-ui, sans-serif";
  ctx.fillText(`${count(set.files.length)} shown, ${human(shown)}`, 4, top + 14);
  ctx.fillText(`${count(rows)} shards`, 4, top + space - 6);
  set.mapLayout = { top, space, step, shown, longest, starts, width };
}

function tensorOnMap(x, y) {
  const { top, space, step, shown, starts, width } = set.mapLayout;
  if (y < top) {
    const byte = (x / width) * shown;
    for (let t = 0; t < set.names.length; t += 1) {
      const start = starts[set.file[t]] + set.offset[t];
      if (byte >= start && byte < start + set.bytes[t]) return t;
    }
    return -1;
  }
  const row = Math.floor((y - top - space) / step);
  for (let i = mapHits.length - 4; i >= 0; i -= 4) {
    if (mapHits[i + 2] === row && x >= mapHits[i] - 0.5 && x <= mapHits[i] + mapHits[i + 1] + 0.5) return mapHits[i + 3];
  }
  return -1;
}

// --- Tables --------------------------------------------------------------------------------------------------------

// Columns whose head begins with # hold numbers.
function table(id, heads, rows) {
  const node = typeof id === "string" ? $(id) : id;
  node.replaceChildren();
  const head = node.createTHead().insertRow();
  for (const word of heads) head.append(make("th", word.replace("#", ""), word.startsWith("#") ? "n" : ""));
  const body = node.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((cell, i) => line.append(make("td", String(cell), heads[i].startsWith("#") ? "n" : "")));
  }
  return node;
}

const alignmentOf = (offset) => {
  let align = 1;
  while (align < 4096 && offset % (align * 2) === 0) align *= 2;
  return align;
};

function drawTables() {
  const shardTensors = new Array(set.shards.length).fill(0);
  for (const shard of set.pieceShard) shardTensors[shard] += 1;
  table("shards", ["shard", "#bytes", "#header", "#pieces", "#tensor bytes"], set.shards.map((shard, i) =>
    [plain(shard.name), count(shard.size), count(shard.header), count(shardTensors[i]), count(shard.data)]));
  table("files", ["file", "format", "#bytes", "#header", "#tensors"], set.files.map((file) =>
    [plain(file.name), file.format, count(file.size), count(file.header), count(file.tensors)]));
  const shown = new Map(), stored = new Map();
  const add = (map, offset) => map.set(alignmentOf(offset), (map.get(alignmentOf(offset)) || 0) + 1);
  let bad = 0;
  for (let t = 0; t < set.names.length; t += 1) {
    if (!set.bytes[t]) continue;
    add(shown, set.offset[t]);
    if (set.offset[t] % Math.max(1, set.widths[set.dtype[t]])) bad += 1;
    for (let p = set.first[t]; p < set.first[t + 1]; p += 1) add(stored, set.pieceStart[p]);
  }
  const keys = [...new Set([...shown.keys(), ...stored.keys()])].sort((a, b) => b - a);
  table("alignment", ["begins on a multiple of", "#tensors as shown", "#pieces in shards"],
    keys.map((key) => [key === 4096 ? "4096 (a page) or more" : key, count(shown.get(key) || 0), count(stored.get(key) || 0)])
      .concat([["tensors as shown that their dtype does not divide", count(bad), ""]]));
  const duplicates = $("duplicates");
  duplicates.replaceChildren();
  if (!set.recorded) {
    const line = make("p", "No checksums of all shards are recorded. Record them with ");
    line.append(make("code", "tensorfs verify"), " and make the report again.");
    duplicates.append(line);
  } else if (!set.duplicates.length) {
    duplicates.append(make("p", "No two tensors have the same bytes."));
  } else {
    const wasted = set.duplicates.reduce((sum, group) => sum + set.bytes[group[0]] * (group.length - 1), 0);
    duplicates.append(make("p", `${human(wasted)} are stored more than once.`));
    duplicates.append(table(make("table"), ["#bytes", "#times", "tensors"], set.duplicates.slice(0, 500).map((group) =>
      [count(set.bytes[group[0]]), group.length, group.slice(0, 20).map((t) => plain(set.names[t])).join(", ")])));
  }
  const view = $("view");
  view.replaceChildren();
  view.append(make("p", `Shown with: ${report.options.length ? report.options.join(",") : "no options"}.`));
  if (set.changes) {
    const rows = set.changes.slice(0, 1000).map((change) => change.map(plain));
    if (rows.length) view.append(table(make("table"), ["tensor", "stored", "shown"], rows));
    else view.append(make("p", "The view leaves names, dtypes and shapes of all tensors as they are stored."));
    if (set.changes.length > rows.length) view.append(make("p", `and ${count(set.changes.length - rows.length)} more`));
  }
  $("notelist").replaceChildren(...report.notes.map((note) => make("li", plain(note))));
  $("notes").hidden = !report.notes.length;
}

function drawSummary() {
  const total = set.bytes.reduce((a, b) => a + b, 0);
  $("title").textContent = plain(set.name);
  $("subtitle").textContent = plain(`${report.source} (${set.kind})`);
  document.title = `${plain(set.name)}: tensorfs report`;
  const cards = [
    [count(set.names.length), "tensors"], [human(total), "of tensors"], [set.parameters.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }), "elements"],
    [count(set.shards.length), "shards"], [count(set.files.length), "files shown"],
    [human(set.shards.reduce((sum, shard) => sum + shard.header, 0)), "of headers in shards"], [set.tail, "last pieces"],
  ];
  $("cards").replaceChildren(...cards.map(([big, small]) => {
    const card = make("div", undefined, "card");
    card.append(make("b", big), make("span", small));
    return card;
  }));
  const bytes = new Array(set.dtypes.length).fill(0);
  for (let t = 0; t < set.names.length; t += 1) bytes[set.dtype[t]] += set.bytes[t];
  $("legend").replaceChildren(...set.dtypes.map((name, i) => {
    const item = make("span"), dot = make("i");
    dot.style.background = colourOf(name);
    item.append(dot, `${name} ${human(bytes[i])}`);
    return item;
  }));
}

function select(t) {
  selected = t;
  const detail = $("detail");
  detail.replaceChildren();
  if (t < 0) { detail.textContent = "None is selected."; } else {
    detail.append(make("p", undefined));
    detail.firstChild.append(make("code", plain(set.names[t])));
    const file = set.files[set.file[t]];
    detail.append(table(make("table"), ["dtype", "shape", "#bytes", "file", "#offset", "#begins on a multiple of"],
      [[set.dtypes[set.dtype[t]], `[${set.shapes[set.shape[t]].join(", ")}]`, count(set.bytes[t]), plain(file.name),
        count(set.offset[t]), alignmentOf(set.offset[t])]]));
    const rows = [];
    for (let p = set.first[t]; p < Math.min(set.first[t + 1], set.first[t] + 500); p += 1) {
      const box = set.boxes[set.pieceBox[p]];
      rows.push([plain(set.shards[set.pieceShard[p]].name), count(set.pieceStart[p]),
        count(set.pieceEnd[p]), `[${box[0].join(", ")}]`, `[${box[1].join(", ")}]`]);
    }
    detail.append(table(make("table"), ["shard", "#first byte", "#end", "at", "shape of the piece"], rows));
  }
  drawTree();
  drawMap();
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) {
    matches = null;
  } else {
    matches = new Uint8Array(set.names.length);
    set.lower = set.lower || set.names.map((name) => name.toLowerCase());
    for (let t = 0; t < matches.length; t += 1) matches[t] = set.lower[t].includes(wanted) ? 1 : 0;
  }
  $("results").hidden = !matches;
  if (matches) {
    let found = 0, bytes = 0;
    const hits = [];
    for (let t = 0; t < matches.length; t += 1) {
      if (!matches[t]) continue;
      found += 1;
      bytes += set.bytes[t];
      if (hits.length < 200) {
        const button = make("button", `${plain(set.names[t])}   ${set.dtypes[set.dtype[t]]} ${human(set.bytes[t])}`), item = make("li");
        button.type = "button";
        button.addEventListener("click", () => select(t));
        item.append(button);
        hits.push(item);
      }
    }
    $("found").textContent = `${count(found)} tensors, ${human(bytes)}`;
    $("hits").replaceChildren(...hits);
  }
  countMatches(tree);
  drawTree();
  drawMap();
}

function tip(event, text) {
  const node = $("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  node.style.left = `${Math.min(event.clientX + 14, window.innerWidth - node.offsetWidth - 8)}px`;
  node.style.top = `${Math.min(event.clientY + 14, window.innerHeight - node.offsetHeight - 8)}px`;
}

const facts = (t) => `${plain(set.names[t])}\n${set.dtypes[set.dtype[t]]} [${set.shapes[set.shape[t]].join(", ")}], ${human(set.bytes[t])}`;

function choose(number) {
  set = report.sets[number];
  tree = buildTree();
  current = tree;
  selected = -1;
  matches = null;
  $("search").value = "";
  $("results").hidden = true;
  countMatches(tree);
  drawSummary();
  drawTables();
  select(-1);
}

$("tree").addEventListener("mousemove", (event) => {
  const node = boxes.find((box) => inside(box, event.offsetX, event.offsetY));
  tip(event, node && (node.list.length ? `${plain(pathOf(node))}\n${human(node.size)}` : facts(node.tensor)));
});
$("tree").addEventListener("click", (event) => {
  let node = current.list.find((child) => child.box && inside(child, event.offsetX, event.offsetY)) || null;
  const leaf = boxes.find((box) => inside(box, event.offsetX, event.offsetY));
  if (leaf && !leaf.list.length && (!node || node === leaf || event.shiftKey)) select(leaf.tensor);
  else if (node) {
    enter(node);
    if (leaf && !leaf.list.length && leaf.parent === node) select(leaf.tensor);
  }
});
$("map").addEventListener("mousemove", (event) => {
  const t = tensorOnMap(event.offsetX, event.offsetY);
  tip(event, t < 0 ? "" : facts(t));
});
$("map").addEventListener("click", (event) => select(tensorOnMap(event.offsetX, event.offsetY)));
for (const id of ["tree", "map"]) $(id).addEventListener("mouseleave", (event) => tip(event, ""));
$("search").addEventListener("input", (event) => search(event.target.value));
$("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  drawTree();
  drawMap();
});
window.addEventListener("resize", () => { drawTree(); drawMap(); });
root.dataset.theme = window.matchMedia && window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("sets").hidden = report.sets.length < 2;
report.sets.forEach((one, i) => $("sets").append(new Option(plain(one.directory ? `${one.directory}/${one.name}` : one.name), String(i))));
$("sets").addEventListener("change", (event) => choose(Number(event.target.value)));
choose(0);
if (location.hash.startsWith("#search=")) {
  $("search").value = decodeURIComponent(location.hash.slice(8));
  search($("search").value);
}
root.dataset.ready = String(Math.round(performance.now() - began));
