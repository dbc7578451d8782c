// What every lane does in a step: of each lane what was predicted above what was measured.

const BAR = 13;
const ROW = 2 * BAR + 16;
const PHASES = { forward: "c0", backward: "c2", recompute: "c4" };

class Lanes extends Surface {
  constructor(host, lanes) {
    const label = "Lanes of a step. Left and right arrow: the event before and after; up and down: another lane; plus and minus: zoom; 0: the whole step";
    super(host, label, lanes.names.length * ROW + 30);
    this.lanes = lanes;
    this.until = Math.max(...["predicted", "measured"].map((side) => lanes[side]?.seconds ?? 0)) || 1;
    this.view = [0, this.until];
    this.rows = lanes.names.flatMap((lane, place) => ["predicted", "measured"].map((side) => this.row(lane, place, side)));
    this.chosen = null;
    const first = this.rows.findIndex((row) => row.starts.length);
    if (first >= 0) this.choose(first, 0);
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointerup", () => (this.held = null));
    this.canvas.addEventListener("pointercancel", () => (this.held = null));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  row(lane, place, side) {
    const events = (this.lanes[side]?.events ?? []).filter((event) => event[0] === place);
    const starts = Float64Array.from(events, (event) => event[1]);
    const ends = Float64Array.from(events, (event) => event[1] + event[2]);
    const hues = events.map((event) => this.hue(lane, this.lanes.words[event[4]]));
    return { lane, side, events, starts, ends, hues, top: place * ROW + (side === "predicted" ? 14 : 15 + BAR) };
  }

  hue(lane, word) {
    if (lane === "stall") return "c1";
    if (lane !== "compute") return ["c5", "c3", "c6", "c7"][this.lanes.names.indexOf(lane) % 4];
    return PHASES[word.split(" ", 1)[0]] ?? "c7";
  }

  draw(context, width) {
    const area = { left: 8, right: width - 8, top: 0, bottom: this.height - 22 };
    const [from, to] = this.view;
    const scale = (area.right - area.left) / (to - from);
    this.area = area;
    this.x = (time) => area.left + (time - from) * scale;
    const across = { at: this.x, ticks: ticks(from, to, width / 110).filter((at) => at >= from) };
    grid(context, area, across, { at: () => 0, ticks: [] }, { across: seconds, up: String });
    context.textAlign = "left";
    this.lanes.names.forEach((lane, place) => {
      context.fillStyle = colour("ink");
      context.fillText(lane, area.left, place * ROW + 6);
      context.fillStyle = colour("raised");
      context.fillRect(area.left, place * ROW + 14, area.right - area.left, 2 * BAR + 1);
    });
    const shades = {};
    for (const row of this.rows) this.bars(context, row, area, shades);
    this.mark(context);
  }

  // Events too short to be seen apart are drawn as one.
  bars(context, row, area, shades) {
    const { starts, ends, hues } = row;
    let left = 0;
    let right = -1;
    let hue = "";
    const flush = () => {
      if (right < left) return;
      context.fillStyle = shades[hue] ??= colour(hue);
      context.fillRect(left, row.top, Math.max(0.7, right - left), BAR);
    };
    context.globalAlpha = row.side === "predicted" ? 0.55 : 1;
    for (let place = Math.max(0, this.firstSeen(row)); place < starts.length; place += 1) {
      const begin = Math.max(area.left, this.x(starts[place]));
      if (begin > area.right) break;
      const end = Math.min(area.right, this.x(ends[place]));
      if (end < area.left) continue;
      if (hues[place] === hue && begin <= right + 0.3) {
        right = Math.max(right, end);
        continue;
      }
      flush();
      [left, right, hue] = [begin, Math.max(begin, end - (end - begin > 3 ? 0.7 : 0)), hues[place]];
    }
    flush();
    context.globalAlpha = 1;
  }

  firstSeen(row) {
    let place = placeOf(row.starts, this.view[0]);
    // An event of a lane that does several things at a time may reach over those that begin after it.
    for (let back = 0; back < 4 && place > 0; back += 1) place -= 1;
    return place;
  }

  mark(context) {
    if (!this.chosen) return;
    const row = this.rows[this.chosen.row];
    const left = this.x(row.starts[this.chosen.place]);
    const right = Math.max(left + 2, this.x(row.ends[this.chosen.place]));
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect(left - 1, row.top - 1, right - left + 2, BAR + 2);
  }

  choose(number, place, show = false) {
    const row = this.rows[number];
    this.chosen = { row: number, place };
    const [, start, length, moved, word] = row.events[place];
    if (show) this.bring(start, start + length);
    const what = this.lanes.words[word];
    const rate = moved && length > 0 ? `, ${bytes(moved)}, ${bytes(moved / length)}/s` : "";
    this.say(
      `${row.side} ${row.lane}${what ? `: ${what}` : ""}, ${seconds(length)} from ${seconds(start)} to ` +
        `${seconds(start + length)}${rate} (${place + 1} of ${row.events.length})`,
    );
    this.request();
  }

  // Moves the view so far that the span is in it.
  bring(start, end) {
    const span = this.view[1] - this.view[0];
    if (start < this.view[0] || end > this.view[1]) this.look((start + end) / 2 - span / 2, span);
  }

  look(from, span) {
    const wide = Math.min(this.until, Math.max(this.until / 20000, span));
    const left = Math.min(Math.max(0, from), this.until - wide);
    this.view = [left, left + wide];
    this.request();
  }

  zoom(factor, about) {
    const span = this.view[1] - this.view[0];
    const middle = about ?? (this.chosen ? this.rows[this.chosen.row].starts[this.chosen.place] : this.view[0] + span / 2);
    const at = Math.min(Math.max(middle, this.view[0]), this.view[1]);
    this.look(at - ((at - this.view[0]) / span) * span * factor, span * factor);
  }

  key(name, shift) {
    const span = this.view[1] - this.view[0];
    if (name === "+" || name === "=") this.zoom(0.5);
    else if (name === "-" || name === "_") this.zoom(2);
    else if (name === "0") this.look(0, this.until);
    else if (shift && name === "ArrowLeft") this.look(this.view[0] - span / 4, span);
    else if (shift && name === "ArrowRight") this.look(this.view[0] + span / 4, span);
    else if (name === "ArrowLeft" || name === "ArrowRight") this.step(name === "ArrowLeft" ? -1 : 1);
    else if (name === "ArrowUp" || name === "ArrowDown") this.climb(name === "ArrowUp" ? -1 : 1);
    else return false;
    return true;
  }

  step(by) {
    if (!this.chosen) return;
    const { row, place } = this.chosen;
    this.choose(row, Math.max(0, Math.min(this.rows[row].starts.length - 1, place + by)), true);
  }

  climb(by) {
    if (!this.chosen) return;
    const time = this.rows[this.chosen.row].starts[this.chosen.place];
    for (let row = this.chosen.row + by; row >= 0 && row < this.rows.length; row += by) {
      if (!this.rows[row].starts.length) continue;
      this.choose(row, Math.max(0, placeOf(this.rows[row].starts, time)), true);
      return;
    }
  }

  time(x) {
    return this.view[0] + ((x - this.area.left) / (this.area.right - this.area.left)) * (this.view[1] - this.view[0]);
  }

  pointer(x, y) {
    if (!this.area) return;
    if (this.held) {
      const span = this.view[1] - this.view[0];
      const moved = ((this.held.x - x) / (this.area.right - this.area.left)) * span;
      this.look(this.held.from + moved, span);
      return;
    }
    const number = this.rows.findIndex((row) => y >= row.top && y <= row.top + BAR);
    if (number < 0 || !this.rows[number].starts.length) return;
    const place = placeOf(this.rows[number].starts, this.time(x));
    if (place >= 0 && this.x(this.rows[number].ends[place]) >= x - 3) this.choose(number, place);
  }

  grab(event) {
    this.held = { x: event.offsetX, from: this.view[0] };
    this.canvas.setPointerCapture(event.pointerId);
  }

  wheel(event) {
    // Without the key the wheel scrolls the page, as everywhere.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
  }
}

function showLanes(host) {
  const tools = make("div", "", { class: "tools", role: "group", "aria-label": "Zoom" });
  const place = make("div");
  const kinds = [["forward", "c0"], ["backward", "c2"], ["recomputed", "c4"], ["waiting", "c1"]];
  host.append(key(kinds), tools, place);
  const chart = new Lanes(place, data.lanes);
  const actions = [["closer", () => chart.zoom(0.5)], ["further", () => chart.zoom(2)], ["the whole step", () => chart.key("0")]];
  for (const [name, act] of actions) {
    const button = make("button", name, { type: "button" });
    button.addEventListener("click", act);
    tools.append(button);
  }
}
