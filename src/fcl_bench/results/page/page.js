// Sorting and filtering for every table of the page, and charts of what is left of the first. Without it the page has the
// tables and the figures.
"use strict";
(() => {
  const { make, size, percent, holdsAll, collator, ordered, showOrder, fill } = parts;
  const COMPARISON = /^(<=|>=|<|>|=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)$/i;
  const HOLDS = {
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
  };
  const MOST_LINES = 10;
  const find = (where) => document.querySelector(where);
  const each = (where, act) => document.querySelectorAll(where).forEach(act);

  // A cell's sort key: a number, a text, or null where there is no value.
  const keyOf = (cell) => {
    if (cell.classList.contains("absent")) return null;
    return cell.dataset.number === undefined ? cell.textContent : Number(cell.dataset.number);
  };

  // Whether a cell meets what was typed: a comparison for numbers, otherwise every word is somewhere in the text.
  const meets = (cell, typed) => {
    const comparison = COMPARISON.exec(typed);
    if (comparison) {
      const key = keyOf(cell);
      if (typeof key === "number") return HOLDS[comparison[1]](key, Number(comparison[2]));
      if (cell.classList.contains("number")) return false;
    }
    return holdsAll(cell.textContent, typed);
  };

  const everywhere = find("#everywhere");
  const redraws = [];
  const redraw = () => redraws.forEach((one) => one());

  // The setting of each row, key by key; what a choice has fixed is not repeated in the rows.
  const settingOf = (row) => JSON.parse(row.dataset.setting ?? "{}");
  const facets = find("#facets");
  const choices = {};
  const chosen = (row) => {
    const setting = settingOf(row);
    return Object.entries(choices).every(([key, { value }]) => !value || !(key in setting) || setting[key] === value);
  };
  const offerChoices = () => {
    const settings = [...document.querySelectorAll("tr[data-setting]")].map(settingOf);
    const list = make("div");
    const box = make("details", {}, make("summary", {}, "Settings"), list);
    facets.append(box);
    for (const key of new Set(settings.flatMap(Object.keys))) {
      const values = [...new Set(settings.filter((one) => key in one).map((one) => one[key]))].sort(collator.compare);
      choices[key] = make("select", { "aria-label": key });
      list.append(make("label", {}, `${key} `, choices[key]));
      fill(choices[key], ["", ...values]);
      choices[key].addEventListener("change", () => {
        each("td.setting [data-key]", (part) => { part.hidden = Boolean(choices[part.dataset.key]?.value); });
        redraw();
      });
    }
    facets.hidden = !settings.length;
    box.open = Object.keys(choices).length <= 8;
  };

  const equip = (table) => {
    const [head, body] = [table.tHead.rows[0], table.tBodies[0]];
    const original = [...body.rows];
    const count = make("span", { class: "count", role: "status" });
    const clear = make("button", { type: "button" }, "Clear filters");
    table.closest("section").querySelector(".tools").append(clear, count);
    let order = { column: -1, way: 0 };

    const filters = make("tr", { class: "filters" });
    const inputs = [...head.cells].map((header, column) => {
      const name = header.textContent;
      const isNumber = header.classList.contains("number");
      const input = make("input", { type: "search", "aria-label": `Filter ${name}`, placeholder: isNumber ? ">70" : "words" });
      filters.append(make("th", { class: isNumber ? "number" : null }, input));
      const button = make("button", { type: "button", title: "Sort: up, down, as given" }, name);
      header.replaceChildren(button);
      button.addEventListener("click", () => {
        order = { column, way: order.column === column ? { 1: -1, [-1]: 0, 0: 1 }[order.way] : 1 };
        sort();
      });
      return input;
    });
    table.tHead.append(filters);

    const sort = () => {
      showOrder(head.cells, (header, column) => (column === order.column ? order.way : 0));
      body.append(...(order.way ? ordered(original, (row) => keyOf(row.cells[order.column]), order.way) : original));
    };
    const filter = () => {
      for (const row of original) {
        const cells = [...row.cells];
        row.hidden = !(inputs.every((input, column) => !input.value.trim() || meets(cells[column], input.value.trim())) &&
          chosen(row) && holdsAll(cells.map((cell) => cell.textContent).join("\n"), everywhere.value));
      }
      count.textContent = `${original.filter((row) => !row.hidden).length} of ${original.length} rows`;
      clear.hidden = inputs.every((input) => !input.value);
    };
    for (const input of inputs) input.addEventListener("input", redraw);
    clear.addEventListener("click", () => {
      for (const input of inputs) input.value = "";
      redraw();
      inputs[0]?.focus();
    });
    redraws.push(filter);
    sort();
    filter();
  };

  // The charts of the first table: its columns of numbers, the keys of its settings and labels, and curves of the data.
  const drawCharts = (data, table) => {
    const rows = [...table.tBodies[0].rows];
    const headers = [...table.tHead.rows[0].cells];
    const columns = Object.fromEntries(headers.flatMap((cell, place) => (cell.classList.contains("number") ? [[cell.textContent, place]] : [])));
    const textOf = (setting) => Object.entries(setting).map(([key, value]) => `${key} ${value}`).join(", ");
    // A label is a method and its knobs: afl gamma=1. What follows is the same without one of them.
    const knobsOf = (name) => Object.fromEntries(name.split(" ").filter((word) => word.includes("=")).map((word) => word.split("=")));
    const all = data.map((one) => {
      const setting = settingOf(rows[one.row]);
      return { ...one, element: rows[one.row], setting, keys: { ...setting, ...knobsOf(one.name) } };
    });
    const names = [...new Set(all.map((one) => one.name))];
    const at = (one, header) => {
      const cell = one.element.cells[columns[header]];
      const key = cell && keyOf(cell);
      return typeof key === "number" ? key : null;
    };
    // What a cell says behind its mean.
    const half = (one, header) => Number(/± ([\d.e+-]+)/.exec(one.element.cells[columns[header]].textContent)?.[1] ?? NaN) || null;
    const [setting, height, cost, key, method] = ["#setting", "#height", "#cost", "#key", "#one"].map(find);
    const show = (where, isThere) => { find(where).closest("figure").hidden = !isThere; };
    const go = (one) => {
      each("tr.here", (row) => row.classList.remove("here"));
      one.element.classList.add("here");
      one.element.scrollIntoView({ block: "center" });
    };

    const drawLines = (shown, colorOf) => {
      const lines = shown.filter((one) => one.curve?.length > 1).slice(0, MOST_LINES).map((one) => ({
        name: one.name, values: charts.overTasks(one.curve, one.spread), color: colorOf(one), dash: one.ceiling ? "2 3" : null,
      }));
      show("#lines", lines.length);
      charts.lines(find("#lines"), { title: "Accuracy after each task", x: "task", y: "accuracy (%)", say: (task) => `after task ${task}`, lines });
    };
    // Rows that were tested within their tasks, then others, with a point per task.
    const drawRounds = (shown, colorOf) => {
      const isTested = (one) => one.rounds?.length > one.curve.length;
      const lines = [...shown.filter(isTested), ...shown.filter((one) => !isTested(one))].map((one) => ({
        name: one.name, values: (one.rounds ?? []).filter(([, value]) => value !== null), color: colorOf(one),
      })).filter((line) => line.values.length).slice(0, MOST_LINES);
      const lasts = lines.map((line) => line.values.at(-1)[0]);
      show("#rounds", shown.some(isTested));
      charts.lines(find("#rounds"), {
        title: "Accuracy over rounds", x: "rounds so far", y: "accuracy (%)", say: (round) => `after round ${round}`, lines,
        log: Math.max(...lasts) >= 8 * Math.min(...lasts),
      });
    };
    const drawPoints = (shown, colorOf) => {
      const known = shown.filter((one) => at(one, height.value) !== null);
      const points = known.filter((one) => !one.ceiling && at(one, cost.value) !== null).map((one) => ({
        name: one.name, x: at(one, cost.value), y: at(one, height.value), half: half(one, height.value), shape: 0, gated: one.gated,
        color: one.gated ? null : colorOf(one), pick: () => go(one),
        tip: [one.name, `${height.value} ${percent(at(one, height.value))}`, `${cost.value} ${size(at(one, cost.value))}`],
      }));
      show("#points", points.length > 1);
      charts.points(find("#points"), {
        title: `${height.value} against ${cost.value}`, x: cost.value, y: height.value, points,
        // A ceiling has all data in one place, so its costs do not compare: it is a line.
        levels: known.filter((one) => one.ceiling).map((one) => ({ name: one.name, y: at(one, height.value) })),
      });
    };
    // Rows that differ from those of the chosen setting in the key alone, a line for each label without it.
    const drawSwept = (left, colorOf) => {
      const kindOf = (one) => ({
        name: one.name.split(" ").filter((word) => !word.startsWith(`${key.value}=`)).join(" "),
        setting: textOf(Object.fromEntries(Object.entries(one.setting).filter(([name]) => name !== key.value))),
      });
      const here = left.find((one) => textOf(one.setting) === setting.value);
      const others = here && kindOf(here).setting;
      const kinds = new Map();
      for (const one of left) {
        const kind = kindOf(one);
        if (Number.isNaN(Number(one.keys[key.value])) || at(one, height.value) === null || kind.setting !== others) continue;
        kinds.set(kind.name, [...(kinds.get(kind.name) ?? []), one]);
      }
      const lines = [...kinds].filter(([, of]) => of.length > 1).slice(0, MOST_LINES).map(([name, of]) => ({
        name, color: colorOf(of[0]),
        values: of.map((one) => [Number(one.keys[key.value]), at(one, height.value), half(one, height.value)]).sort((a, b) => a[0] - b[0]),
      }));
      const places = lines.flatMap((line) => line.values.map(([x]) => x));
      show("#swept", lines.length);
      find("#swept").closest("figure").querySelector("h2").textContent = `Accuracy against ${key.value}`;
      charts.lines(find("#swept"), {
        title: `${height.value} against ${key.value}`, x: key.value, y: height.value, lines,
        log: Math.min(...places) > 0 && Math.max(...places) >= 8 * Math.min(...places),
      });
    };
    const drawMatrix = (shown) => {
      const matrix = shown.find((one) => one.name === method.value)?.matrix ?? [];
      const known = matrix.flat().filter((value) => value !== null);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const share = (value) => 5 + (45 * (value - low)) / (high - low || 1);
      const cell = (value) => make("td", value === null ? {} : { style: `background: color-mix(in srgb, var(--mark) ${share(value)}%, var(--paper))` },
        value === null ? "" : value.toFixed(matrix.length > 10 ? 0 : 1));
      const head = (text) => make("th", {}, text);
      show("#matrix", known.length > 1);
      find("#matrix").replaceChildren(make("tr", {}, head("after task"), ...matrix.map((_, task) => head(task + 1))),
        ...matrix.map((row, task) => make("tr", {}, head(task + 1), ...row.map(cell))));
    };

    const draw = () => {
      const left = all.filter((one) => !one.element.hidden);
      fill(setting, [...new Set(left.map((one) => textOf(one.setting)))]);
      const shown = ordered(left.filter((one) => textOf(one.setting) === setting.value), (one) => at(one, height.value), -1);
      fill(method, shown.filter((one) => one.matrix?.length > 1).map((one) => one.name));
      // A row keeps its colour while the filters change, if there are enough for all.
      const slots = names.length <= MOST_LINES ? names : shown.slice(0, MOST_LINES).map((one) => one.name);
      const colorOf = (one) => (slots.includes(one.name) ? `var(--s${slots.indexOf(one.name)})` : "var(--plain)");
      drawLines(shown, colorOf);
      drawRounds(shown, colorOf);
      drawPoints(shown, colorOf);
      drawSwept(left, colorOf);
      drawMatrix(shown);
    };
    const numbers = Object.keys(columns);
    const accuracies = numbers.filter((header) => header.startsWith("A_"));
    fill(height, accuracies.length ? accuracies : numbers);
    height.value = accuracies.find((header) => header.startsWith("A_T (")) ?? height.value;
    fill(cost, numbers.filter((header) => /MiB|second|\/|kept/.test(header)));
    const isSwept = (name) => new Set(all.map((one) => one.keys[name]).filter((value) => Number(value) === Number(value))).size > 1;
    fill(key, [...new Set(all.flatMap((one) => Object.keys(one.keys)))].filter(isSwept));
    for (const select of [setting, height, cost, key, method]) select.addEventListener("change", draw);
    each(".chart", (box) => charts.kept(box, draw));
    redraws.push(draw);
    draw();
  };

  each(".scripted", (element) => { element.hidden = false; });
  offerChoices();
  const tables = document.querySelectorAll("section table:not(.matrix)");
  tables.forEach(equip);
  everywhere.addEventListener("input", redraw);
  const isNarrow = innerWidth < 640;
  const data = find("#data");
  if (data) drawCharts(JSON.parse(data.textContent), tables[0]);

  // On a screen, what the charts show again is folded, and on a telephone what the first table has already and notes.
  const folded = (part) => part.querySelector("figure") !== null || (isNarrow && part.closest("section") !== find("section"));
  if (data) each("details.part", (part) => { part.open = !folded(part); });
  each("details.same, details.notes", (part) => { part.open &&= !isNarrow && part.textContent.length < 700; });
  const unfold = () => { const part = document.getElementById(location.hash.slice(1))?.querySelector("details.part"); if (part) part.open = true; };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => each("details", (part) => { part.open = true; }));
  unfold();
})();
