// Bytes of a tier over a step, by kind: what was predicted above what was measured, on one scale.

const PANEL = 150;

class Memory extends Surface {
  constructor(host, tier, kinds) {
    const sides = ["predicted", "measured"].filter((side) => tier[side]);
    super(host, `Bytes of the ${tier.name} over a step; arrow keys move through time`, sides.length * (PANEL + 34) + 4);
    Object.assign(this, { tier, kinds, sides, cursor: 0 });
    this.until = Math.max(...sides.map((side) => tier[side].seconds));
    this.moments = [...new Set(sides.flatMap((side) => tier[side].times))].sort((a, b) => a - b);
    const peaks = sides.map((side) => Math.max(...tier[side].high));
    const top = Math.max(...peaks, 1);
    // A budget far above what is used would leave nothing to see.
    this.limit = tier.limit !== null && tier.limit < 4 * top ? tier.limit : null;
    this.top = Math.max(top, this.limit ?? 0) * 1.06;
    const summit = sides.map((side) => tier[side].times[tier[side].high.indexOf(Math.max(...tier[side].high))]);
    this.tell(this.moments.indexOf(summit[summit.length - 1]));
  }

  draw(context, width) {
    const area = { left: 66, right: width - 10 };
    this.area = area;
    this.x = (time) => area.left + (time / (this.until || 1)) * (area.right - area.left);
    this.sides.forEach((side, place) => {
      const top = place * (PANEL + 34) + 16;
      this.panel(context, this.tier[side], side, { ...area, top, bottom: top + PANEL - 6 });
    });
    const x = Math.round(this.x(this.moments[this.cursor])) + 0.5;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, 14);
    context.lineTo(x, this.height - 24);
    context.stroke();
  }

  panel(context, one, side, area) {
    const y = (value) => area.bottom - (value / this.top) * (area.bottom - area.top);
    const across = { at: this.x, ticks: ticks(0, this.until, (area.right - area.left) / 110) };
    grid(context, area, across, { at: y, ticks: byteTicks(this.top, 4) }, { across: seconds, up: bytes });
    const below = new Float64Array(one.times.length);
    const ends = [...one.times.slice(1), one.seconds].map(this.x);
    for (const [number, kind] of this.kinds.entries()) {
      const values = one.kinds[kind];
      if (!values) continue;
      context.fillStyle = colour(`c${number % COLOURS}`);
      for (let place = 0; place < values.length; place += 1) {
        const left = this.x(one.times[place]);
        const height = y(below[place]) - y(below[place] + values[place]);
        if (values[place]) context.fillRect(left, y(below[place] + values[place]), Math.max(0.6, ends[place] - left), height);
        below[place] += values[place];
      }
    }
    this.line(context, one, y);
    if (this.limit !== null) {
      context.setLineDash([6, 4]);
      context.strokeStyle = colour("warn");
      context.beginPath();
      context.moveTo(area.left, y(this.limit));
      context.lineTo(area.right, y(this.limit));
      context.stroke();
      context.setLineDash([]);
    }
    context.fillStyle = colour("ink");
    context.textAlign = "left";
    context.fillText(`${side}: at most ${bytes(Math.max(...one.high))}`, area.left, area.top - 8);
  }

  // The most between one moment and the next.
  line(context, one, y) {
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.2;
    context.beginPath();
    for (let place = 1; place < one.times.length; place += 1) {
      context.lineTo(this.x(one.times[place - 1]), y(one.high[place]));
      context.lineTo(this.x(one.times[place]), y(one.high[place]));
    }
    context.stroke();
  }

  tell(place) {
    this.cursor = Math.max(0, Math.min(this.moments.length - 1, place));
    const time = this.moments[this.cursor];
    const said = this.sides.map((side) => {
      const one = this.tier[side];
      const at = placeOf(one.times, time);
      if (at < 0 || time > one.seconds) return `${side} is over`;
      const held = this.kinds.filter((kind) => one.kinds[kind] && one.kinds[kind][at]);
      const total = held.reduce((sum, kind) => sum + one.kinds[kind][at], 0);
      const parts = held.map((kind) => `${kind} ${bytes(one.kinds[kind][at])}`).join(", ");
      return `${side} ${bytes(total)}${parts ? ` (${parts})` : ""}`;
    });
    this.say(`at ${seconds(time)}: ${said.join("; ")}`);
    this.request();
  }

  key(name, shift) {
    const by = shift ? 10 : 1;
    const last = this.moments.length - 1;
    const to = { ArrowLeft: this.cursor - by, ArrowRight: this.cursor + by, Home: 0, End: last }[name];
    if (to !== undefined) this.tell(to);
    return to !== undefined;
  }

  pointer(x) {
    if (!this.area) return;
    const share = (x - this.area.left) / (this.area.right - this.area.left || 1);
    this.tell(placeOf(this.moments, share * this.until));
  }
}

function showMemory(host) {
  const { kinds, tiers } = data.memory;
  const used = kinds.filter((kind) => tiers.some((tier) => ["predicted", "measured"].some((side) => tier[side]?.kinds[kind])));
  const tools = make("div", "", { class: "tools", role: "group", "aria-label": "Tier" });
  const place = make("div");
  const lines = key(used.map((kind) => [kind, `c${kinds.indexOf(kind) % COLOURS}`]));
  // Each is made once: a chart listens to the page for as long as that is there.
  const made = new Map();
  const choose = (tier, button) => {
    for (const other of tools.children) other.setAttribute("aria-pressed", String(other === button));
    if (!made.has(tier)) made.set(tier, make("div"));
    const host = made.get(tier);
    place.replaceChildren(host);
    if (!host.hasChildNodes()) new Memory(host, tier, kinds);
  };
  for (const tier of tiers) {
    const button = make("button", tier.name, { type: "button", "aria-pressed": "false" });
    button.addEventListener("click", () => choose(tier, button));
    tools.append(button);
  }
  host.append(tools, lines, place);
  choose(tiers[0], tools.firstElementChild);
}
