// The report of a run.

function showLosses(host) {
  const { xs, loss } = data.losses;
  if (loss.every((value) => value === null)) {
    host.append(make("p", "No step had a finite loss: there is nothing to draw.", { class: "soft" }));
    return;
  }
  new Lines(host, "Loss over steps; arrow keys move through the steps", {
    xs,
    series: [{ name: "loss", values: loss, colour: "c0", missing: "not finite" }],
    unit: "step",
    format: (value) => value.toPrecision(4),
    fromZero: false,
  });
}

function showSpeed(host) {
  const { xs, speed } = data.losses;
  const series = [{ name: "measured", values: speed, colour: "c2", missing: "not kept" }];
  if (data.losses.predicted !== null) {
    series.push({ name: "predicted", values: xs.map(() => data.losses.predicted), colour: "c4" });
  }
  new Lines(host, "Tokens per second over steps; arrow keys move through the steps", {
    xs,
    series,
    unit: "step",
    format: count,
    fromZero: true,
  });
}

const charts = { loss: showLosses, speed: showSpeed, memory: showMemory, lanes: showLanes };
for (const [name, show] of Object.entries(charts)) {
  const host = document.getElementById(name);
  if (host) show(host);
}
