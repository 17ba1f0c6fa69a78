// The leaderboard's table, its filters, and the charts of the rows that are shown.
"use strict";
(() => {
  const { make, whole, size, percent: points, holdsAll, ordered, showOrder, withCopy } = parts;
  const MOST_LINES = 10;
  const FIRST_LINES = 5;
  const find = (where) => document.querySelector(where);
  const board = JSON.parse(find("#data").textContent);
  const rows = board.rows.map((values) => Object.fromEntries(board.keys.map((key, place) => [key, values[place]])));
  const methods = [...new Set(rows.map((row) => row.method))];
  const families = [...new Set(rows.map((row) => row.family))].sort();
  const ran = (row) => row.status === "run";
  const tasks = Math.max(1, ...rows.map((row) => row.curve?.length ?? 0));
  const form = find("#filters form");
  const state = {
    setting: 0, kind: rows.some((row) => row.kind === "tuned" && ran(row)) ? "tuned" : "defaults",
    sort: "rank", way: 1, open: new Set(), ticked: null,
  };

  // Words and numbers.
  const told = (value, form = size) => (value === null ? "–" : form(value));
  const spaced = (name) => (name ?? "").replaceAll("_", " ");
  const settingText = (setting) => Object.entries(setting).map(([key, value]) => `${key} ${value}`).join(", ") || "all";
  const interval = (row) => (row.low === null || row.high === null ? "" : `${points(row.low)} to ${points(row.high)}`);
  const spread = (row, key) => (row[`${key}_std`] === null ? "" : ` ± ${points(row[`${key}_std`])}`);
  const afterTask = (task) => `after task ${task}`;
  const perTask = () => form.elements.per.value === "task";
  const upload = (row) => (row.up_mib === null ? null : row.up_mib / (perTask() ? tasks : 1));
  const seconds = (row) =>
    row.client_seconds === null && row.server_seconds === null ? null : (row.client_seconds ?? 0) + (row.server_seconds ?? 0);

  // One row per method: the one of the chosen setting and kind, else the one that there is.
  const better = (a, b) => Number(ran(b)) - Number(ran(a)) || (b.A_T ?? -1) - (a.A_T ?? -1);
  const preferred = { defaults: (row) => row.kind === "defaults", tuned: (row) => row.kind === "tuned" };
  const chosen = () => methods.flatMap((method) => {
    const here = rows.filter((row) => row.method === method && row.setting === state.setting);
    if (state.kind === "best") return here.sort(better).slice(0, 1);
    const wanted = preferred[state.kind];
    const kinds = [here.filter(wanted), state.kind === "tuned" ? here.filter((row) => !wanted(row)) : []].flat();
    return (kinds.find(ran) ?? kinds[0]) ? [kinds.find(ran) ?? kinds[0]] : [];
  });
  const ranked = (list) => {
    const scores = list.filter((row) => !row.ceiling && row.A_T !== null).map((row) => row.A_T).sort((a, b) => b - a);
    for (const row of list) row.rank = row.ceiling || row.A_T === null ? null : scores.indexOf(row.A_T) + 1;
    return list;
  };

  // Filters. What is not known is not at most anything.
  const limit = (name) => (form.elements[name].value === "" ? null : Number(form.elements[name].value));
  const FILTERS = {
    words: (row, field) => {
      const text = [row.title, row.method, spaced(row.family), ...(row.gates ?? []), row.ceiling ? "ceiling" : ""].join(" ");
      return holdsAll(text, field.value);
    },
    family: (row, field) => !field.value || row.family === field.value,
    up: (row) => limit("up") === null || (upload(row) !== null && upload(row) <= limit("up")),
    kept: (row) => limit("kept") === null || (row.kept_mib !== null && row.kept_mib <= limit("kept")),
    rounds: (row) => limit("rounds") === null || (row.rounds !== null && row.rounds <= limit("rounds")),
    keepsnone: (row, field) => !field.checked || row.samples_kept === 0,
    revealsnone: (row, field) => !field.checked || row.revealed === 0,
    nogates: (row, field) => !field.checked || !row.gates?.length,
  };
  const passes = (row, names) => names.every((name) => FILTERS[name](row, form.elements[name]));
  const inUse = () => Object.keys(FILTERS).filter((name) => {
    const field = form.elements[name];
    return field.type === "checkbox" ? field.checked : field.value.trim() !== "";
  });

  // Columns of the table: value to sort by, way of the first click, what a cell shows.
  const name = (row) => row.title || row.method;
  const COLUMNS = [
    { key: "rank", head: "#", says: "Place by A_T", value: (row) => row.rank, first: 1, number: true, cell: (row) => [told(row.rank, whole.format)] },
    { key: "method", head: "Method", says: "Method", value: name, first: 1, cell: (row) => [opener(row), ...tags(row)] },
    { key: "family", head: "Family", says: "Family", value: (row) => row.family, first: 1, cell: (row) => [spaced(row.family)] },
    { key: "A_T", head: "A_T", unit: "%", says: "Accuracy after the last task", value: (row) => row.A_T, first: -1, number: true, cell: (row) => accuracy(row) },
    { key: "behind", head: "Behind", unit: "%", says: "Distance to the best, with its paired 95 % interval", value: (row) => row.behind ?? (row.mark === "bold" ? 0 : null), first: 1, number: true, cell: (row) => behind(row) },
    { key: "A_avg", head: "A_avg", unit: "%", says: "Mean of the accuracies after each task", value: (row) => row.A_avg, first: -1, number: true, cell: (row) => [told(row.A_avg, points)] },
    { key: "up", head: "Upload", unit: "MiB", says: "Upload of the busiest client", value: upload, first: 1, number: true, cell: (row) => [told(upload(row))] },
    { key: "kept", head: "Kept", unit: "MiB", says: "What a client stores between its turns", value: (row) => row.kept_mib, first: 1, number: true, cell: (row) => kept(row) },
    { key: "rounds", head: "Rounds", says: "Communication rounds in all", value: (row) => row.rounds, first: 1, number: true, cell: (row) => [told(row.rounds, whole.format)] },
    { key: "seconds", head: "Seconds", says: "Of all clients and the server", value: seconds, first: 1, number: true, cell: (row) => [told(seconds(row))] },
    { key: "gates", head: "Gates", says: "Why a row may not be a fair sample", value: (row) => (row.gates ?? []).join(" ") || null, first: 1, cell: (row) => gates(row) },
  ];
  const opener = (row) => {
    const open = state.open.has(row.method);
    const button = make("button", { type: "button", class: "title", "aria-expanded": open, "data-method": row.method }, name(row));
    if (open) button.setAttribute("aria-controls", `details-${methods.indexOf(row.method)}`);
    return button;
  };
  const tags = (row) => [
    row.ceiling ? make("span", { class: "tag" }, "ceiling") : null,
    row.kind !== state.kind ? make("span", { class: "tag" }, row.kind) : null,
  ];
  const accuracy = (row) => {
    if (row.A_T === null) return ["–"];
    const text = points(row.A_T);
    return [row.mark === "bold" ? make("strong", {}, text) : text, make("span", { class: "small under" }, spread(row, "A_T"))];
  };
  const behind = (row) => {
    if (row.behind === null) return [row.mark === "bold" ? "best" : "–"];
    const between = interval(row);
    return [points(row.behind), between ? make("span", { class: "small under" }, between) : null];
  };
  const kept = (row) => [
    told(row.kept_mib), row.samples_kept ? make("span", { class: "small under" }, `${whole.format(row.samples_kept)} samples`) : null,
  ];
  const gates = (row) => (row.gates ?? []).map((gate) => make("div", { class: "gate", title: row.gate_texts || null }, spaced(gate)));

  const sorted = (list) => {
    const { value } = COLUMNS.find((column) => column.key === state.sort);
    const best = (left, right) => right.A_T - left.A_T || Number(right.ceiling) - Number(left.ceiling);
    // By rank, a ceiling stands where its accuracy puts it.
    return state.sort === "rank" ? [...list].sort((left, right) => state.way * best(left, right)) : ordered(list, value, state.way, best);
  };

  // Which rows are drawn over tasks, each in a colour that it keeps: until a box is clicked, the first five.
  const drawn = (list) => {
    if (state.ticked === null) {
      const first = list.filter((row) => row.curve?.length && !row.ceiling).sort((a, b) => b.A_T - a.A_T).slice(0, FIRST_LINES);
      return new Map(first.map((row, place) => [row.method, place]));
    }
    return state.ticked;
  };
  const colorOf = (slot) => `var(--s${slot})`;
  const tick = (method, isOn, now) => {
    state.ticked = new Map(now);
    if (!isOn) state.ticked.delete(method);
    else {
      const taken = new Set(state.ticked.values());
      const free = Array.from({ length: MOST_LINES }, (_, slot) => slot).find((slot) => !taken.has(slot));
      if (free !== undefined) state.ticked.set(method, free);
    }
    update();
    find(`#rows input[data-method="${CSS.escape(method)}"]`)?.focus();
  };

  // What a click on a row shows.
  const part = (title, ...inside) => make("div", {}, make("h3", {}, title), ...inside);
  const tuningText = (row) => {
    const knobs = Object.entries(row.tuning ?? {}).map(([key, value]) => `${key}=${value}`);
    return knobs.length ? knobs.join(", ") : row.kind === "tuned" ? "no knob was tuned" : "none: the method's defaults";
  };
  const SIDE = [
    ["Setting", (row) => settingText(board.settings[row.setting])], ["Knobs", (row) => row.kind],
    ["A_T (%)", (row) => told(row.A_T, points) + spread(row, "A_T")],
    ["Behind", (row) => (row.behind === null ? (row.mark === "bold" ? "best" : "–") : `${points(row.behind)} (${interval(row)})`)],
    ["A_avg (%)", (row) => told(row.A_avg, points) + spread(row, "A_avg")], ["Forgetting (%)", (row) => told(row.forgetting, points)],
    ["Upload (MiB)", (row) => told(upload(row))], ["Download (MiB)", (row) => told(row.down_mib)],
    ["Kept (MiB)", (row) => told(row.kept_mib)], ["Samples kept", (row) => told(row.samples_kept, whole.format)],
    ["Revealed (%)", (row) => told(row.revealed)], ["Rounds", (row) => told(row.rounds, whole.format)],
    ["Gradient steps", (row) => told(row.steps, whole.format)], ["Client s", (row) => told(row.client_seconds)],
    ["Server s", (row) => told(row.server_seconds)], ["Seeds", (row) => told(row.n, whole.format)],
    ["Gates", (row) => (ran(row) ? (row.gates ?? []).map(spaced).join(", ") || "–" : `not run: ${row.why}`)],
  ];
  const sideBySide = (row) => {
    const own = rows.filter((one) => one.method === row.method).sort((a, b) => a.setting - b.setting || a.kind.localeCompare(b.kind));
    const head = make("tr", {}, ...SIDE.map(([title]) => make("th", { scope: "col" }, title)));
    const body = own.map((one) => make("tr", one === row ? { class: "here" } : {}, ...SIDE.map(([, text], place) =>
      make("td", place > 1 && place < SIDE.length - 1 ? { class: "number" } : {}, text(one)))));
    return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${name(row)} in all settings` },
      make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  };
  const curveOf = (box, row) => {
    const other = rows.find((one) => one.method === row.method && one.setting === row.setting && one.kind !== row.kind && ran(one));
    const best = ranked(chosen()).find((one) => one.rank === 1 && one.method !== row.method);
    const lines = [
      { name: row.kind, values: charts.overTasks(row.curve ?? []), color: "var(--s0)" },
      ...(other ? [{ name: other.kind, values: charts.overTasks(other.curve ?? []), color: "var(--s1)", dash: "5 3" }] : []),
      ...(best ? [{ name: `${name(best)} (best)`, values: charts.overTasks(best.curve ?? []), color: "var(--soft)", dash: "2 3" }] : []),
    ];
    charts.lines(box, { title: `${name(row)} over tasks`, x: "task", y: "accuracy (%)", say: afterTask, lines });
  };
  const panel = (row) => {
    const command = make("p", { class: "command" }, make("code", {}, row.command ?? ""));
    const chart = make("div", { class: "chart" });
    const list = (words) => make("p", {}, ...(words ?? []).flatMap((word, place) => [place ? ", " : "", make("code", {}, word)]));
    const said = [row.gate_texts].flat().filter(Boolean).join(" ");
    const box = make("div", { class: "panel" },
      make("div", { class: "whole" }, make("h3", {}, "Command"), row.command ? withCopy(command) : make("p", {}, "none")),
      part("Over tasks, in this setting", chart),
      make("div", {},
        part(`Tuning${row.trials ? ` (${row.trials} trials)` : ""}`, make("p", {}, tuningText(row))),
        part("Gates", make("p", {}, said || (row.gates ?? []).map(spaced).join(", ") || "none")),
        part("Runs", list(row.run_ids)), part("Code", list(row.commits))),
      make("div", { class: "whole" }, make("h3", {}, "In all settings"), sideBySide(row)));
    return { box, chart };
  };
  const toggle = (method) => {
    if (!state.open.delete(method)) state.open.add(method);
    update();
    find(`#rows .title[data-method="${CSS.escape(method)}"]`)?.focus();
  };
  // Opens a row from a chart and brings it into sight.
  const go = (method) => {
    state.open.add(method);
    update();
    const title = find(`#rows .title[data-method="${CSS.escape(method)}"]`);
    title.focus();
    title.scrollIntoView({ block: "center" });
  };

  const head = find("#rows thead tr");
  const offerColumns = () => {
    head.append(make("th", { scope: "col", class: "box" }, make("span", { title: "Draw over tasks" }, "∿")));
    for (const column of COLUMNS) {
      const unit = column.unit ? make("span", { class: "small under" }, column.unit) : null;
      const button = make("button", { type: "button", title: `${column.says}; click to sort` }, column.head, unit);
      head.append(make("th", { scope: "col", class: column.number ? "number" : null, "data-key": column.key }, button));
      button.addEventListener("click", () => {
        state.way = state.sort === column.key ? -state.way : column.first;
        state.sort = column.key;
        update();
      });
    }
  };
  const fillTable = (list, now) => {
    showOrder(head.querySelectorAll("th[data-key]"), (header) => (header.dataset.key === state.sort ? state.way : 0));
    head.querySelector('[data-key="up"] .small').textContent = perTask() ? "MiB a task" : "MiB";
    const late = [];
    const full = now.size >= MOST_LINES;
    const body = list.flatMap((row) => {
      const slot = now.get(row.method);
      const box = make("input", { type: "checkbox", "data-method": row.method, "aria-label": `Draw ${name(row)} over tasks` });
      box.checked = slot !== undefined;
      box.disabled = !row.curve?.length || (full && !box.checked);
      if (box.checked) box.style.accentColor = colorOf(slot);
      box.addEventListener("change", () => tick(row.method, box.checked, now));
      const cells = COLUMNS.map((column) => make(column.key === "method" ? "th" : "td", {
        class: column.number ? "number" : null, scope: column.key === "method" ? "row" : null,
      }, ...column.cell(row)));
      const isOpen = state.open.has(row.method);
      const classes = ["row", row.mark === "bold" ? "best" : "", isOpen ? "open" : ""].filter(Boolean).join(" ");
      const shown = make("tr", { class: classes }, make("td", { class: "box" }, box), ...cells);
      shown.addEventListener("click", (event) => {
        if (!event.target.closest("input") && getSelection().isCollapsed) toggle(row.method);
      });
      if (!isOpen) return [shown];
      const { box: inside, chart } = panel(row);
      late.push(() => { curveOf(chart, row); charts.kept(chart, () => curveOf(chart, row)); });
      const id = `details-${methods.indexOf(row.method)}`;
      return [shown, make("tr", { class: "details", id }, make("td", { colspan: COLUMNS.length + 1 }, inside))];
    });
    find("#rows tbody").replaceChildren(...body);
    late.forEach((task) => task());
  };
  const fillAbsent = (list) => {
    find("#absent").hidden = !list.length;
    find("#absent summary").textContent = `${list.length} not run in this setting`;
    find("#absent tbody").replaceChildren(...list.map((row) =>
      make("tr", {}, make("th", { scope: "row" }, name(row)), make("td", {}, spaced(row.family)), make("td", {}, row.why || "–"))));
  };
  const fillPoints = (list, now) => {
    const sent = list.filter((row) => !row.ceiling && row.A_T !== null && upload(row) !== null).sort((a, b) => b.A_T - a.A_T);
    const pointOf = (row) => ({
      name: name(row), x: upload(row), y: row.A_T, half: row.A_T_std, gated: row.gates?.length > 0, shape: families.indexOf(row.family),
      color: now.has(row.method) ? colorOf(now.get(row.method)) : null, pick: () => go(row.method),
      tip: [name(row), `A_T ${points(row.A_T)} %${spread(row, "A_T")}`, `${size(upload(row))} MiB${perTask() ? " per task" : ""}, ${spaced(row.family)}`],
    });
    const levels = list.filter((row) => row.ceiling && row.A_T !== null).map((row) => ({ name: name(row), y: row.A_T }));
    charts.points(find("#points"), {
      title: "A_T against the upload of the busiest client", y: "A_T (%)", points: sent.map(pointOf), levels,
      x: perTask() ? "upload per task (MiB)" : "upload over the whole stream (MiB)",
    });
    const there = [...new Set(sent.map((row) => row.family))].sort();
    find("#shapes").replaceChildren(...there.map((family) => {
      const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      icon.setAttribute("viewBox", "-7 -7 14 14");
      icon.setAttribute("aria-hidden", "true");
      icon.append(charts.mark(families.indexOf(family), { class: "mark plain" }));
      return make("span", {}, icon, spaced(family));
    }));
  };
  const fillLines = (list, now) => {
    const lines = list.filter((row) => now.has(row.method) && row.curve?.length)
      .map((row) => ({ name: name(row), values: charts.overTasks(row.curve), color: colorOf(now.get(row.method)) }));
    charts.lines(find("#lines"), { title: "Accuracy after each task", x: "task", y: "accuracy (%)", say: afterTask, lines });
  };

  let fillCharts = () => {};
  const update = () => {
    const all = ranked(chosen());
    const names = Object.keys(FILTERS);
    const there = all.filter(ran);
    const shown = sorted(there.filter((row) => passes(row, names)));
    const now = drawn(shown);
    fillTable(shown, now);
    const absent = all.filter((row) => !ran(row) && passes(row, ["words", "family"]));
    fillAbsent(absent);
    fillCharts = () => { fillPoints(shown, now); fillLines(shown, now); };
    fillCharts();
    find("#count").textContent = `${shown.length} of ${there.length} methods${absent.length ? `; ${absent.length} not run, at the end` : ""}`;
    find("#top").hidden = state.ticked === null;
    const count = inUse().length;
    find("#active").textContent = count ? `(${count} in use)` : "";
    form.querySelector('[type="reset"]').hidden = !count;
  };

  const offer = (where, group, choices, before, pick) => {
    const box = find(where);
    for (const [value, text] of choices) {
      const input = make("input", { type: "radio", name: group, value });
      input.checked = value === before;
      input.addEventListener("change", () => { pick(value); update(); });
      box.append(make("label", {}, input, text));
    }
    box.hidden = choices.length < 2;
  };
  const kinds = [["defaults", "Defaults"], ["tuned", "Tuned"], ["best", "The better of both"]];
  offer("#settings", "setting", board.settings.map((setting, place) => [place, settingText(setting)]), 0, (value) => { state.setting = value; });
  offer("#kinds", "kind", rows.some((row) => row.kind === "tuned") ? kinds : [], state.kind, (value) => { state.kind = value; });
  form.elements.family.append(...families.map((family) => make("option", { value: family }, spaced(family))));
  form.addEventListener("input", update);
  form.addEventListener("reset", () => setTimeout(update));
  form.addEventListener("submit", (event) => event.preventDefault());
  find("#top").addEventListener("click", () => { state.ticked = null; update(); });
  find("#rows tbody").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.classList.contains("title")) return;
    const titles = [...document.querySelectorAll("#rows .title")];
    titles[titles.indexOf(event.target) + step]?.focus();
    event.preventDefault();
  });
  addEventListener("beforeprint", () => { find("#absent").open = true; });
  find("#filters").open = innerWidth >= 640;
  find("#board").hidden = false;
  offerColumns();
  update();
  charts.kept(find("#points"), () => fillCharts());
})();
