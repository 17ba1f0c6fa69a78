// The page's charts, of the rows that the filters leave in the first table: one setting at a time.
"use strict";
(() => {
  const MOST_LINES = 10;
  const find = (id) => document.querySelector(id);
  const rows = JSON.parse(find("#chart-data").textContent);
  const [setting, method] = [find("#chart-setting"), find("#chart-method")];
  const settingOf = (row) => Object.entries(row.setting).map(([key, value]) => `${key} ${value}`).join(", ");
  let left = rows;

  const shown = () => left.filter((row) => settingOf(row) === setting.value);
  const fill = (select, values) => {
    const before = select.value;
    select.replaceChildren(...values.map((value) => new Option(value || "the only one", value)));
    if (values.includes(before)) select.value = before;
  };
  const percent = (value) => (value === null ? "–" : `${value.toFixed(2)} %`);
  const tipOf = (row) => [
    row.name, `A_avg ${percent(row.A_avg)}${row.A_avg_std === null ? "" : ` ± ${row.A_avg_std.toFixed(2)}`}, n = ${row.n}`,
    ...(row.bytes ? [`${Number(row.bytes.toPrecision(3))} MiB`] : []), ...(row.gates ? [`gate: ${row.gates}`] : []),
  ];

  const draw = () => {
    const best = shown().sort((a, b) => b.A_avg - a.A_avg);
    const curves = best.filter((row) => row.accuracy.length).slice(0, MOST_LINES);
    const color = new Map(curves.map((row, slot) => [row, `var(--s${slot})`]));
    charts.lines(find("#chart-tasks"), {
      title: "Accuracy after each task", x: "task", y: "accuracy (%)",
      lines: curves.map((row) => ({ name: row.name, values: row.accuracy, color: color.get(row), dash: row.ceiling ? "2 3" : null })),
    });
    const known = best.filter((row) => row.A_avg !== null);
    charts.points(find("#chart-bytes"), {
      title: "A_avg against the upload of the busiest client and task", x: "upload (MiB)", y: "A_avg (%)",
      // A ceiling has all data in one place, so its bytes do not compare: it is a line.
      levels: known.filter((row) => row.ceiling).map((row) => ({ name: row.name, y: row.A_avg })),
      points: known.filter((row) => !row.ceiling && row.bytes !== null).map((row) => ({
        name: row.name, x: row.bytes, y: row.A_avg, half: row.A_avg_std, shape: 0, color: color.get(row), tip: tipOf(row),
      })),
    });
  };
  const drawMatrix = () => {
    const matrix = shown().find((row) => row.name === method.value)?.matrix ?? [];
    const cell = (name, text) => Object.assign(document.createElement(name), { textContent: text });
    const line = (task, cells) => {
      const row = document.createElement("tr");
      row.append(cell("th", task), ...cells);
      return row;
    };
    const known = matrix.flat().filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const share = (value) => 5 + (45 * (value - low)) / (high - low || 1);
    const shade = (value) => {
      const box = cell("td", value === null ? "" : value.toFixed(matrix.length > 10 ? 0 : 1));
      if (value !== null) box.style.background = `color-mix(in srgb, var(--mark) ${share(value)}%, var(--paper))`;
      return box;
    };
    const tasks = matrix.map((_, task) => task + 1);
    find("#chart-matrix").replaceChildren(
      line("after task", tasks.map((task) => cell("th", task))), ...matrix.map((row, place) => line(place + 1, row.map(shade))),
    );
  };
  const update = () => {
    fill(setting, [...new Set(left.map(settingOf))]);
    offer();
  };
  const offer = () => {
    fill(method, shown().filter((row) => row.matrix.length).map((row) => row.name));
    draw();
    drawMatrix();
  };

  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  for (const element of document.querySelectorAll("details.figure")) element.open = false;
  addEventListener("beforeprint", () => document.querySelectorAll("details.figure").forEach((one) => { one.open = true; }));
  setting.addEventListener("change", offer);
  method.addEventListener("change", drawMatrix);
  document.addEventListener("left", (event) => {
    left = event.detail.map((place) => rows[place]);
    update();
  });
  update();
  charts.kept(find("#chart-tasks"), draw);
})();
