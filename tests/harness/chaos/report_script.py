"""The style and the script of a report: a timeline that is drawn on a canvas and can be zoomed, with nothing from elsewhere.

The script reads what it draws from the page itself. Of bars that are narrower than a pixel, one is drawn for all that share it.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #fbfbf9; --ink: #1c1e21; --dim: #6b7077; --line: #dcdcd6; --card: #fff;
  --good: #1a7f4b; --bad: #c2262e; --warn: #9a6200; --fault: #8a8f99; --clock: #8b46c8; --held: #5b7fa6; --light: 46%; }
@media (prefers-color-scheme: dark) { :root { --back: #15171a; --ink: #e6e6e3; --dim: #9a9fa6; --line: #2e3238; --card: #1c1f23;
  --good: #4cc38a; --bad: #ff6b6f; --warn: #e5a63b; --fault: #7b818b; --clock: #b583ea; --held: #6f96c2; --light: 62%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.6rem; } h1.good { color: var(--good); } h1.bad { color: var(--bad); } h1.warn { color: var(--warn); }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); }
a { color: inherit; }
.figures { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1rem 0; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem; }
.figure b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.tables { display: flex; flex-wrap: wrap; gap: 2rem; align-items: start; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
ol.violations { padding: 0; list-style: none; }
ol.violations li { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 4px;
  margin: .4rem 0; padding: .4rem .7rem; overflow-wrap: anywhere; }
ol.violations li:target { outline: 2px solid var(--bad); }
.letter { font-weight: 700; color: var(--bad); margin-right: .4rem; }
#timeline { position: relative; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
canvas { display: block; width: 100%; touch-action: pan-y; cursor: grab; }
canvas:focus-visible { outline: 2px solid var(--held); }
#tip { position: absolute; display: none; pointer-events: none; background: var(--ink); color: var(--back); border-radius: 4px;
  padding: .25rem .5rem; font-size: 13px; max-width: 32rem; white-space: pre-line; z-index: 1; }
.bar { display: flex; gap: .4rem; align-items: center; margin: .4rem 0; flex-wrap: wrap; }
button { font: inherit; padding: .1rem .7rem; border: 1px solid var(--line); border-radius: 4px; background: var(--card);
  color: var(--ink); cursor: pointer; }
"""

SCRIPT = """
'use strict';
const scene = JSON.parse(document.getElementById('scene').textContent);
const canvas = document.getElementById('canvas'), box = document.getElementById('timeline'), tip = document.getElementById('tip');
const context = canvas.getContext('2d');
const LABEL = 170, AXIS = 22, FAULT_ROW = 15, ROW = 26, GAP = 8;
const faultsTop = AXIS, rowsTop = AXIS + scene.kinds.length * FAULT_ROW + GAP;
const height = rowsTop + scene.rows.length * ROW + 6;
const whole = [0, scene.lasted];
let view = whole.slice(), shown = -1, hatch = null;

const clamp = (value, least, most) => Math.max(least, Math.min(most, value));
const wide = () => Math.max(canvas.clientWidth - LABEL - 8, 50);
const xOf = at => LABEL + (at - view[0]) / (view[1] - view[0]) * wide();
const atOf = x => view[0] + (x - LABEL) / wide() * (view[1] - view[0]);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = client => `hsl(${(client * 137.508) % 360} 55% ${colour('--light')})`;
const instant = at => '+' + at.toFixed(Math.abs(view[1] - view[0]) < 1 ? 6 : 3) + ' s';

function show(from, to) {
  const span = clamp(to - from, 1e-4, whole[1]);
  const first = clamp(from, 0, whole[1] - span);
  view = [first, first + span];
  requestAnimationFrame(draw);
}
function zoom(factor, at) {
  const span = view[1] - view[0], share = (at - view[0]) / span;
  const next = clamp(span * factor, 1e-4, whole[1]);
  show(at - share * next, at + (1 - share) * next);
}
function firstVisible(marks) {
  // Ends are not in order, but a bar that began long before the view and reaches into it is rare: look a little further back.
  let low = 0, high = marks.length;
  while (low < high) { const middle = (low + high) >> 1; if (marks[middle][1] < view[0]) low = middle + 1; else high = middle; }
  return Math.max(low - 200, 0);
}
function ticks() {
  const span = view[1] - view[0], rough = span / Math.max(wide() / 110, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  const digits = clamp(-Math.floor(Math.log10(step)), 0, 6), found = [];
  for (let number = Math.ceil(view[0] / step); number * step <= view[1] && found.length < 200; number++)
    found.push([number * step, (number * step).toFixed(digits)]);
  return found;
}
function makeHatch(ratio) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 6 * ratio;
  const pen = tile.getContext('2d');
  pen.strokeStyle = colour('--dim'); pen.lineWidth = 1.2 * ratio;
  pen.beginPath(); pen.moveTo(0, 6 * ratio); pen.lineTo(6 * ratio, 0); pen.stroke();
  return context.createPattern(tile, 'repeat');
}
function draw() {
  const ratio = window.devicePixelRatio || 1, full = canvas.clientWidth;
  canvas.style.height = height + 'px';
  canvas.width = full * ratio; canvas.height = height * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  hatch = makeHatch(ratio);
  context.font = '12px system-ui, sans-serif'; context.textBaseline = 'middle';
  drawAxis();
  drawRowLabels();
  context.save();
  context.beginPath(); context.rect(LABEL, 0, wide() + 4, height); context.clip();
  drawFaults();
  scene.rows.forEach(drawRow);
  scene.violations.forEach(drawViolation);
  context.restore();
  document.getElementById('span').textContent = instant(view[0]) + ' \\u2026 ' + instant(view[1]);
}
function drawAxis() {
  for (const [at, label] of ticks()) {
    const x = xOf(at);
    context.fillStyle = colour('--line'); context.fillRect(x, AXIS - 4, 1, height);
    context.fillStyle = colour('--dim'); context.textAlign = 'center'; context.fillText(label, x, AXIS / 2);
  }
}
function label(text, y) {
  let short = text;
  while (short.length > 4 && context.measureText(short).width > LABEL - 14) short = short.slice(0, -4) + '\\u2026';
  context.textAlign = 'left'; context.fillText(short, 6, y);
}
function drawRowLabels() {
  context.fillStyle = colour('--dim');
  scene.kinds.forEach((kind, number) => label(kind, faultsTop + (number + .5) * FAULT_ROW));
  context.fillStyle = colour('--ink');
  scene.rows.forEach((row, number) => label(row.name, rowsTop + (number + .5) * ROW));
  context.fillStyle = colour('--line');
  for (let number = 0; number <= scene.rows.length; number++) context.fillRect(0, rowsTop + number * ROW, canvas.clientWidth, 1);
}
function drawFaults() {
  for (const [kind, began, ended, , clocks] of scene.faults) {
    if (ended < view[0] || began > view[1]) continue;
    const x = xOf(began), width = Math.max(xOf(ended) - x, 1.5);
    context.fillStyle = colour(clocks ? '--clock' : '--fault');
    context.globalAlpha = .1; context.fillRect(x, rowsTop, width, height - rowsTop);
    context.globalAlpha = .9; context.fillRect(x, faultsTop + kind * FAULT_ROW + 2, width, FAULT_ROW - 4);
    context.globalAlpha = 1;
  }
}
function drawRow(row, number) {
  const top = rowsTop + number * ROW + 3, tall = ROW - 6;
  for (const [slice, held, , unknown, stale] of row.slices) {
    const x = xOf(slice * scene.slice), width = Math.max(wide() * scene.slice / (view[1] - view[0]), 1);
    if (x + width < LABEL || x > LABEL + wide()) continue;
    context.fillStyle = colour('--held'); context.globalAlpha = .15 + .5 * held; context.fillRect(x, top, width, tall);
    context.globalAlpha = 1;
    if (unknown) { context.fillStyle = hatch; context.fillRect(x, top + tall - 6, Math.max(width, 1), 6); }
    if (stale) drawStale(x + width / 2, top);
  }
  let lastX = -1, lastLane = -1;
  for (let place = firstVisible(row.marks); place < row.marks.length; place++) {
    const [sort, began, lasted, , client, lane] = row.marks[place];
    if (began > view[1]) break;
    if (began + lasted < view[0]) continue;
    const x = xOf(began), width = Math.max(xOf(began + lasted) - x, 1);
    if (sort === 2) { drawStale(x + (width > 2 ? width : 0), top); continue; }
    if (sort === 0 && width <= 1 && Math.floor(x) === lastX && lane === lastLane) continue;
    if (sort === 0) { lastX = Math.floor(x); lastLane = lane; }
    if (sort === 1) { context.fillStyle = hatch; context.fillRect(x, top + tall - 6, width, 6); continue; }
    context.fillStyle = hue(client);
    context.fillRect(x, top + (lane ? tall / 2 : 0), width, lane ? tall / 2 : tall - 7);
    if (width > 70) {
      context.fillStyle = colour('--back'); context.textAlign = 'left';
      context.fillText(String(row.marks[place][3]), x + 4, top + (lane ? tall * .75 : (tall - 7) / 2 + 1));
    }
  }
}
function drawStale(x, top) {
  context.fillStyle = colour('--warn');
  context.beginPath(); context.moveTo(x, top + 8); context.lineTo(x - 4, top); context.lineTo(x + 4, top); context.fill();
}
function drawViolation([, at, row, , , calls], number) {
  const top = row < 0 ? rowsTop : rowsTop + row * ROW;
  context.strokeStyle = context.fillStyle = colour('--bad');
  context.lineWidth = number === shown ? 3 : 1.5;
  for (const [, began, lasted] of calls) {
    if (began + lasted < view[0] || began > view[1]) continue;
    const width = xOf(began + lasted) - xOf(began);
    // Outlines of calls that are narrower than that would hide what they are about.
    if (width >= 3 || number === shown) context.strokeRect(xOf(began), top + 2, Math.max(width, 2), ROW - 4);
  }
  if (at >= view[0] && at <= view[1]) {
    const x = xOf(at);
    context.fillRect(x - .75, top, 1.5, row < 0 ? height : ROW);
    context.beginPath(); context.moveTo(x, top - 1); context.lineTo(x - 5, top - 8); context.lineTo(x + 5, top - 8); context.fill();
  }
}
function lookAt(number) {
  const [, , row, from, to] = scene.violations[number], margin = Math.max((to - from) * .3, .05);
  shown = number;
  show(from - margin, to + margin);
  const y = canvas.getBoundingClientRect().top + window.scrollY + rowsTop + Math.max(row, 0) * ROW;
  window.scrollTo({ top: Math.max(y - window.innerHeight / 2, 0), behavior: 'smooth' });
}
function under(x, y) {
  const at = atOf(x), slack = 4 / wide() * (view[1] - view[0]), said = [];
  if (x < LABEL) return '';
  if (y < rowsTop) {
    const kind = Math.floor((y - faultsTop) / FAULT_ROW);
    for (const [each, began, ended, target] of scene.faults)
      if (each === kind && began - slack <= at && at <= ended + slack && said.length < 8)
        said.push(`${scene.kinds[kind]}: ${target}, ${instant(began)} \\u2026 ${instant(ended)}`);
    return said.join('\\n');
  }
  const number = Math.floor((y - rowsTop) / ROW), row = scene.rows[number];
  if (!row) return '';
  for (const [letter, shownAt, of, , , calls] of scene.violations) {
    if (of !== number || said.length >= 8) continue;
    if (Math.abs(shownAt - at) <= slack) said.push(`${letter} is broken here`);
    for (const [words, began, lasted] of calls) if (began - slack <= at && at <= began + lasted + slack) said.push(words);
  }
  for (let place = firstVisible(row.marks); place < row.marks.length && said.length < 8; place++) {
    const [sort, began, lasted, token, client] = row.marks[place];
    if (began > at + slack) break;
    if (began + lasted < at - slack) continue;
    const what = ['granted', 'unknown Acquire', 'refused as stale'][sort], of = token ? `token ${token}, ` : '';
    said.push(`${what}: ${of}${scene.clients[client]}, ${instant(began)} \\u2026 ${instant(began + lasted)}`);
  }
  const slice = scene.slice ? row.slices.find(each => each[0] === Math.floor(at / scene.slice)) : null;
  if (!said.length && slice)
    said.push(`${scene.slice.toPrecision(3)} s: ${slice[2]} grants, held for ${Math.round(slice[1] * 100)} %, ${slice[3]} unknown, ${slice[4]} stale`);
  return said.join('\\n');
}
let dragged = null;
canvas.addEventListener('pointerdown', event => { dragged = [event.offsetX, view.slice()]; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener('pointerup', () => { dragged = null; });
canvas.addEventListener('pointercancel', () => { dragged = null; });
canvas.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
canvas.addEventListener('pointermove', event => {
  if (dragged) {
    const by = (dragged[0] - event.offsetX) / wide() * (dragged[1][1] - dragged[1][0]);
    show(dragged[1][0] + by, dragged[1][1] + by);
    return;
  }
  tip.textContent = under(event.offsetX, event.offsetY);
  tip.style.display = tip.textContent ? 'block' : 'none';
  tip.style.left = Math.min(event.offsetX + 14, Math.max(canvas.clientWidth - tip.offsetWidth - 4, 0)) + 'px';
  tip.style.top = event.offsetY + 16 + 'px';
});
canvas.addEventListener('wheel', event => {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
  event.preventDefault();
  zoom(Math.exp((event.deltaY || event.deltaX) * .002), atOf(event.offsetX));
}, { passive: false });
canvas.addEventListener('dblclick', event => zoom(.25, atOf(event.offsetX)));
canvas.addEventListener('keydown', event => {
  const span = view[1] - view[0], middle = (view[0] + view[1]) / 2;
  const does = { '+': () => zoom(.5, middle), '=': () => zoom(.5, middle), '-': () => zoom(2, middle), '0': () => show(...whole),
    ArrowLeft: () => show(view[0] - span / 4, view[1] - span / 4), ArrowRight: () => show(view[0] + span / 4, view[1] + span / 4) }[event.key];
  if (does) { event.preventDefault(); does(); }
});
document.getElementById('in').onclick = () => zoom(.5, (view[0] + view[1]) / 2);
document.getElementById('out').onclick = () => zoom(2, (view[0] + view[1]) / 2);
document.getElementById('left').onclick = () => show(view[0] - (view[1] - view[0]) / 2, view[1] - (view[1] - view[0]) / 2);
document.getElementById('right').onclick = () => show(view[0] + (view[1] - view[0]) / 2, view[1] + (view[1] - view[0]) / 2);
document.getElementById('all').onclick = () => show(...whole);
document.addEventListener('click', event => {
  const link = event.target.closest('a[data-violation], a[data-from]');
  if (!link) return;
  event.preventDefault();
  if (link.dataset.violation) { lookAt(Number(link.dataset.violation)); history.replaceState(null, '', '#v' + link.dataset.violation); }
  else { show(Number(link.dataset.from) - 1, Number(link.dataset.to) + 1); box.scrollIntoView({ behavior: 'smooth' }); }
});
window.addEventListener('resize', () => requestAnimationFrame(draw));
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => requestAnimationFrame(draw));
const asked = /^#v(\\d+)$/.exec(location.hash);
if (asked && scene.violations[asked[1]]) lookAt(Number(asked[1])); else draw();
"""
