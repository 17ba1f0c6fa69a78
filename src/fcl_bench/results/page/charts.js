// The page's interactive charts, drawn by Plotly: one setting at a time, the same methods in all of them.
"use strict";
(() => {
  const rows = JSON.parse(document.querySelector("#chart-data").textContent);
  const settingOf = (row) => Object.entries(row.setting).map(([key, value]) => `${key} ${value}`).join(", ");
  const find = (id) => document.querySelector(id);
  const [setting, method, chips] = [find("#chart-setting"), find("#chart-method"), find("#chips")];
  const SVG = "http://www.w3.org/2000/svg";
  const names = [...new Set(rows.map((row) => row.name))];
  const off = new Set();
  let picked = {};
  const shades = [[0, "#00224e"], [0.25, "#35456c"], [0.5, "#7d7c78"], [0.75, "#bcad6c"], [1, "#fee838"]];
  // Dragging zooms and a double click undoes it; a finger scrolls the page instead.
  const config = { responsive: true, displayModeBar: false };
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  const layout = (x, y) => {
    const axis = { gridcolor: "#d0d0d0", linecolor: "#d0d0d0", zeroline: false, automargin: true };
    return {
      // White in dark mode, too, as the figures are: the methods' colours include black.
      paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", font: { color: "#1a1a1a", family: "inherit", size: 13 },
      margin: { l: 50, r: 15, t: 30, b: 45 }, showlegend: false, hovermode: "closest", dragmode,
      xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
    };
  };
  // The edge of a marker, in the marker's own colour.
  const EDGE = { width: 1.5 };
  const matches = (row) => Object.entries(picked).every(([key, value]) => !(key in row.setting) || row.setting[key] === value);
  const shown = () => rows.filter((row) => settingOf(row) === setting.value && !off.has(row.name));
  const gated = (row) => row.gates ? `<br>gate: ${row.gates}` : "";
  const fill = (select, values) => {
    const before = select.value;
    select.replaceChildren(...values.map((value) => new Option(value || "the only one", value)));
    if (values.includes(before)) select.value = before;
  };
  // An axis of percent: what is shown and a little room, never beyond 0 to 100.
  const range = (values) => {
    const known = values.filter((value) => value !== null);
    if (!known.length) return [0, 100];
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const room = Math.max(0.06 * (high - low), 0.5);
    return [Math.max(0, low - room), Math.min(100, high + room)];
  };

  // Ticks of a log axis at 1, 2, 5, 10, ...; over more than two decades at 1, 10, ...
  const steps = (values) => {
    if (!values.length) return [];
    const [low, high] = [Math.min(...values) / 2, Math.max(...values) * 2];
    const [first, last] = [low, high].map((value) => Math.floor(Math.log10(value)));
    const decades = Array.from({ length: last - first + 1 }, (_, place) => first + place);
    const within = last - first > 2 ? [1] : [1, 2, 5];
    return decades.flatMap((decade) => within.map((times) => Number(`${times}e${decade}`)));
  };

  const drawTasks = () => {
    const traces = shown().map((row) => ({
      name: row.name, x: row.accuracy.map((_, task) => task + 1), y: row.accuracy, cliponaxis: false,
      mode: row.look.symbol ? "lines+markers" : "lines",
      line: { color: row.look.color, dash: row.look.dash }, marker: { symbol: row.look.symbol, size: 9, line: EDGE },
      error_y: row.accuracy_std ? { array: row.accuracy_std, thickness: 1, width: 3 } : undefined,
      hovertemplate: `<b>%{fullData.name}</b><br>task %{x}: %{y:.2f} %<br>n = ${row.n}${gated(row)}<extra></extra>`,
    }));
    const y = { title: { text: "accuracy (%)" }, range: range(shown().flatMap((row) => row.accuracy)) };
    Plotly.react("chart-tasks", traces, layout({ title: { text: "task" }, dtick: Math.max(...rows.map((row) => row.accuracy.length)) > 12 ? null : 1 }, y), config);
  };
  const drawBytes = () => {
    const known = shown().filter((row) => row.A_avg !== null);
    // A ceiling has all data in one place, so its bytes do not compare: it is a line.
    const ceilings = known.filter((row) => !row.look.symbol).map((row) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: row.A_avg, y1: row.A_avg, layer: "below",
      line: { color: row.look.color, dash: row.look.dash, width: 2 },
    }));
    const sent = known.filter((row) => row.look.symbol && row.bytes > 0);
    const traces = sent.map((row) => ({
      name: row.name, x: [row.bytes], y: [row.A_avg], mode: "markers", cliponaxis: false,
      marker: { color: row.look.color, symbol: row.look.symbol, size: 12, line: EDGE },
      error_y: row.A_avg_std ? { array: [row.A_avg_std], thickness: 1, width: 4, color: row.look.color } : undefined,
      hovertemplate: `<b>%{fullData.name}</b><br>%{x:.3~g} MiB, A_avg %{y:.2f} %<br>n = ${row.n}${gated(row)}<extra></extra>`,
    }));
    const x = { title: { text: "upload (MiB)" }, type: "log", tickvals: steps(sent.map((row) => row.bytes)) };
    const y = { title: { text: "A_avg (%)" }, range: range(known.flatMap((row) => [row.A_avg - (row.A_avg_std ?? 0), row.A_avg + (row.A_avg_std ?? 0)])) };
    Plotly.react("chart-bytes", traces, { ...layout(x, y), shapes: ceilings }, config);
  };
  const drawMatrix = () => {
    const row = shown().find((one) => one.name === method.value);
    const tasks = row ? row.matrix.map((_, task) => task + 1) : [];
    const trace = {
      type: "heatmap", x: tasks, y: tasks, z: row ? row.matrix : [], colorscale: shades, hoverongaps: false,
      texttemplate: tasks.length <= 10 ? "%{z:.0f}" : "", colorbar: { title: { text: "%" }, thickness: 12 },
      hovertemplate: "after task %{y}, test samples of task %{x}: %{z:.2f} %<extra></extra>",
    };
    const ticks = { dtick: tasks.length > 12 ? null : 1, showgrid: false };
    const x = { title: { text: "test samples of task" }, ...ticks };
    Plotly.react("chart-matrix", [trace], layout(x, { title: { text: "after task" }, autorange: "reversed", ...ticks }), config);
  };
  const draw = () => {
    fill(method, shown().map((row) => row.name));
    drawTasks();
    drawBytes();
    drawMatrix();
  };
  const offer = () => {
    fill(setting, [...new Set(rows.filter(matches).map(settingOf))]);
    draw();
  };

  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  for (const name of names) {
    const chip = document.createElement("button");
    const swatch = document.createElementNS(SVG, "svg");
    swatch.setAttribute("viewBox", "-9 -9 18 18");
    swatch.setAttribute("aria-hidden", "true");
    chip.type = "button";
    chip.append(swatch, name);
    chip.setAttribute("aria-pressed", "true");
    chip.addEventListener("click", () => {
      if (!off.delete(name)) off.add(name);
      chip.setAttribute("aria-pressed", String(!off.has(name)));
      draw();
    });
    chips.append(chip);
  }
  // A button shows the method's marker. Plotly knows its shape: it draws all of them once, out of sight.
  const drawSwatches = async () => {
    const box = document.createElement("div");
    box.style.cssText = "position: absolute; left: -9999px; width: 400px; height: 400px";
    document.body.append(box);
    const looks = names.map((name) => rows.find((row) => row.name === name).look);
    const traces = looks.map(({ color, symbol }, place) => ({
      x: [place], y: [0], mode: "markers", cliponaxis: false, marker: { color, symbol: symbol || "line-ew-open", size: 12, line: EDGE },
    }));
    await Plotly.newPlot(box, traces, { showlegend: false }, { staticPlot: true });
    const swatches = chips.querySelectorAll("svg");
    box.querySelectorAll(".scatterlayer .trace .points path").forEach((drawn, place) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", drawn.getAttribute("d"));
      path.setAttribute("style", drawn.getAttribute("style"));
      swatches[place].append(path);
    });
    Plotly.purge(box);
    box.remove();
  };
  setting.addEventListener("change", draw);
  method.addEventListener("change", drawMatrix);
  document.addEventListener("choices", (event) => { picked = event.detail; offer(); });
  offer();
  drawSwatches();
})();
