// Policies side by side: the seconds of a step over the most bytes of the device.

class Scatter extends Surface {
  constructor(host, points) {
    super(host, "Step time over device peak; arrow keys move from policy to policy", 380);
    this.points = [...points].sort((a, b) => a.peak - b.peak || a.seconds - b.seconds);
    this.tell(Math.max(0, this.points.findIndex((one) => one.policy === "auto")));
  }

  scales(width) {
    const top = Math.max(...this.points.map((one) => one.seconds)) * 1.08;
    const wide = Math.max(...this.points.map((one) => one.peak)) * 1.05;
    const area = { left: 66, right: width - 12, top: 10, bottom: this.height - 24 };
    const x = (value) => area.left + (value / wide) * (area.right - area.left);
    const y = (value) => area.bottom - (value / top) * (area.bottom - area.top);
    return {
      area,
      across: { at: x, ticks: byteTicks(wide, Math.max(2, width / 130)) },
      up: { at: y, ticks: ticks(0, top, 6) },
    };
  }

  draw(context, width) {
    const { area, across, up } = (this.drawn = this.scales(width));
    grid(context, area, across, up, { across: bytes, up: seconds });
    const places = [...this.points.keys()];
    const isOwn = (place) => this.points[place].policy === "auto";
    this.line(context, this.points.filter((one) => one.policy === "auto" && !one.measured));
    // Ours above the others, and what is chosen above all.
    const above = (place) => (place === this.chosen ? 2 : isOwn(place) ? 1 : 0);
    for (const place of places.sort((a, b) => above(a) - above(b))) this.point(context, place);
  }

  line(context, own) {
    context.strokeStyle = colour("c1");
    context.lineWidth = 1.2;
    context.beginPath();
    for (const one of own) context.lineTo(this.drawn.across.at(one.peak), this.drawn.up.at(one.seconds));
    context.stroke();
  }

  point(context, place) {
    const one = this.points[place];
    const own = one.policy === "auto";
    const x = this.drawn.across.at(one.peak);
    const y = this.drawn.up.at(one.seconds);
    context.fillStyle = context.strokeStyle = colour(own ? "c1" : one.exact ? "c0" : "c7");
    context.lineWidth = 1.6;
    context.beginPath();
    context.arc(x, y, own ? 5.5 : 4, 0, 7);
    context[one.measured ? "stroke" : "fill"]();
    if (place !== this.chosen) return;
    context.beginPath();
    context.arc(x, y, 9, 0, 7);
    context.strokeStyle = context.fillStyle = colour("ink");
    context.stroke();
    const right = x > this.drawn.area.right - 140;
    context.textAlign = right ? "right" : "left";
    context.fillText(one.policy, x + (right ? -14 : 14), y + 14);
  }

  tell(place) {
    this.chosen = Math.max(0, Math.min(this.points.length - 1, place));
    const one = this.points[this.chosen];
    const how = one.measured ? "measured" : "predicted";
    const numbers = one.exact ? "" : "; its numbers are not those of plain PyTorch";
    this.say(`${one.policy} with ${bytes(one.budget)}: ${seconds(one.seconds)} a step, ${bytes(one.peak)} on the device (${how})${numbers}`);
    this.request();
  }

  key(name) {
    const to = { ArrowLeft: this.chosen - 1, ArrowRight: this.chosen + 1, Home: 0, End: this.points.length - 1 }[name];
    if (to !== undefined) this.tell(to);
    return to !== undefined;
  }

  pointer(x, y) {
    if (!this.drawn) return;
    const far = (one) => Math.hypot(this.drawn.across.at(one.peak) - x, this.drawn.up.at(one.seconds) - y);
    const near = this.points.reduce((best, one, place) => (far(one) < far(this.points[best]) ? place : best), 0);
    if (far(this.points[near]) < 24) this.tell(near);
  }
}

const host = document.getElementById("policies");
if (host) {
  host.append(key([["auto", "c1"], ["others", "c0"], ["other numbers than plain PyTorch", "c7"]]));
  new Scatter(host, data.points);
}
