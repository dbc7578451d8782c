// The report of a run.

function showLosses(host) {
  const { xs, loss } = data.losses;
  new Lines(host, "Loss over steps; arrow keys move through the steps", {
    xs,
    series: [{ name: "loss", values: loss, colour: "c0" }],
    unit: "step",
    format: (value) => value.toPrecision(4),
    fromZero: false,
  });
}

function showSpeed(host) {
  const { xs, speed } = data.losses;
  const series = [{ name: "measured", values: speed, colour: "c2" }];
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
