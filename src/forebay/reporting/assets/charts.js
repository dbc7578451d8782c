"use strict";
// What all charts of a page are made of. Texts go in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const FONT = "12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const COLOURS = 8;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== "") element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function scaled(value, base, units) {
  let power = 0;
  while (power < units.length - 1 && Math.abs(value) / base ** power >= base - 0.05) power += 1;
  return power ? `${(value / base ** power).toFixed(1)} ${units[power]}` : `${Math.round(value)} ${units[0]}`;
}

const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const count = (value) => scaled(value, 1000, ["", "k", "M", "G", "T"]).trim();
const digits = (value) => value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);

function seconds(value) {
  if (!value) return "0 s";
  if (value >= 0.9995) return `${digits(value)} s`;
  return value >= 0.9995e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} us`;
}

// Round numbers from low to high, about as many as asked for.
function ticks(low, high, about) {
  const span = high - low || 1;
  const rough = span / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// The same for bytes, in powers of two.
function byteTicks(high, about) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, high / about)));
  const found = [];
  for (let at = 0; at <= high; at += step) found.push(at);
  return found;
}

// The last place whose value is not above the one asked for; -1 where all are.
function placeOf(values, at) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// A canvas as wide as its place, drawn anew when that changes, at most once a frame; below it a line that says what is
// under the pointer or chosen with the keys.
class Surface {
  constructor(host, label, height) {
    this.height = height;
    this.canvas = make("canvas", "", { tabindex: "0", role: "img", "aria-label": label });
    const frame = make("div", "", { class: "chart" });
    frame.append(this.canvas);
    this.readout = make("p", "", { class: "readout", "aria-live": "polite" });
    host.append(frame, this.readout);
    this.frame = frame;
    this.pending = false;
    new ResizeObserver(() => this.request()).observe(frame);
    scheme.addEventListener("change", () => this.request());
    this.canvas.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey || event.ctrlKey) return;
      if (this.key(event.key, event.shiftKey)) event.preventDefault();
    });
    this.canvas.addEventListener("pointermove", (event) => this.pointer(event.offsetX, event.offsetY));
  }

  request() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.paint();
    });
  }

  paint() {
    const ratio = devicePixelRatio || 1;
    const width = this.frame.clientWidth;
    if (!width) return;
    const pixels = [Math.round(width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
      [this.canvas.width, this.canvas.height] = pixels;
      this.canvas.style.height = `${this.height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.draw(context, width);
  }

  say(text) {
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }
}

function key(entries) {
  const list = make("ul", "", { class: "key" });
  for (const [name, which] of entries) {
    const item = make("li");
    const patch = make("i");
    patch.style.background = `var(--${which})`;
    item.append(patch, document.createTextNode(name));
    list.append(item);
  }
  return list;
}

function grid(context, area, across, up, format) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.lineWidth = 1;
  for (const value of up.ticks) {
    const y = Math.round(up.at(value)) + 0.5;
    context.beginPath();
    context.moveTo(area.left, y);
    context.lineTo(area.right, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(format.up(value), area.left - 6, y);
  }
  let free = -Infinity;
  context.textAlign = "center";
  for (const value of across.ticks) {
    const text = format.across(value);
    const half = context.measureText(text).width / 2;
    const x = Math.min(Math.max(across.at(value), area.left), area.right - half);
    if (x - half < free) continue;
    context.fillText(text, x, area.bottom + 12);
    free = x + half + 10;
  }
}

// Lines over whole numbers: of each series a value for each of xs, or none, for which it has words.
class Lines extends Surface {
  constructor(host, label, { xs, series, unit, format, fromZero }) {
    super(host, label, 200);
    Object.assign(this, { xs, series, unit, format, fromZero, cursor: -1 });
    if (series.length > 1) host.prepend(key(series.map((one) => [one.name, one.colour])));
    this.tell(xs.length - 1);
  }

  scales(width) {
    const values = this.series.flatMap((one) => one.values.filter((value) => value !== null));
    let low = this.fromZero ? 0 : Math.min(...values);
    let high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    if (!this.fromZero) low -= room;
    high += room;
    const area = { left: 58, right: width - 10, top: 8, bottom: this.height - 24 };
    const first = this.xs[0];
    const last = this.xs[this.xs.length - 1];
    const x = (value) => area.left + ((value - first) / (last - first || 1)) * (area.right - area.left);
    const y = (value) => area.bottom - ((value - low) / (high - low)) * (area.bottom - area.top);
    const whole = ticks(first, last, width / 110).filter(Number.isInteger);
    return { area, across: { at: x, ticks: whole }, up: { at: y, ticks: ticks(low, high, 4) } };
  }

  draw(context, width) {
    const { area, across, up } = (this.drawn = this.scales(width));
    grid(context, area, across, up, { across: String, up: this.format });
    for (const one of this.series) {
      context.strokeStyle = context.fillStyle = colour(one.colour);
      context.lineWidth = 1.6;
      context.beginPath();
      let open = false;
      one.values.forEach((value, place) => {
        if (value === null) {
          open = false;
          return;
        }
        context[open ? "lineTo" : "moveTo"](across.at(this.xs[place]), up.at(value));
        open = true;
      });
      context.stroke();
      const dot = (place, radius) => {
        context.beginPath();
        context.arc(across.at(this.xs[place]), up.at(one.values[place]), radius, 0, 7);
        context.fill();
      };
      const there = (place) => (one.values[place] ?? null) !== null;
      // Between two that are missing there is no line to see.
      one.values.forEach((_, place) => {
        if (there(place) && !there(place - 1) && !there(place + 1)) dot(place, 2);
      });
      if (there(this.cursor)) dot(this.cursor, 3.5);
    }
  }

  tell(place) {
    this.cursor = Math.max(0, Math.min(this.xs.length - 1, place));
    const said = this.series.map((one) => {
      const value = one.values[this.cursor];
      return `${one.name} ${value === null ? one.missing : this.format(value)}`;
    });
    this.say(`${this.unit} ${this.xs[this.cursor]}: ${said.join(", ")}`);
    this.request();
  }

  key(name, shift) {
    const by = shift ? 10 : 1;
    const to = { ArrowLeft: this.cursor - by, ArrowRight: this.cursor + by, Home: 0, End: this.xs.length - 1 }[name];
    if (to !== undefined) this.tell(to);
    return to !== undefined;
  }

  pointer(x) {
    if (!this.drawn) return;
    const { area } = this.drawn;
    const share = (x - area.left) / (area.right - area.left || 1);
    const first = this.xs[0];
    this.tell(placeOf(this.xs, first + share * (this.xs[this.xs.length - 1] - first) + 0.5));
  }
}
