// Sorting and filtering for every table of the page. Without it the page is the same, less the controls.
"use strict";
(() => {
  const COMPARISON = /^(<=|>=|<|>|=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)$/i;
  const HOLDS = {
    "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
  };
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  const make = (name, attributes = {}, text = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };

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
  const holdsAll = (text, typed) => {
    const where = text.toLowerCase();
    return typed.toLowerCase().split(/\s+/).every((word) => where.includes(word));
  };

  const everywhere = document.querySelector("#everywhere");
  const redraws = [];

  // The setting of each row, key by key; what a choice has fixed is not repeated in the rows.
  const settings = [...document.querySelectorAll("tr[data-setting]")].map((row) => JSON.parse(row.dataset.setting));
  const facets = document.querySelector("#facets");
  const choices = {};
  const chosen = (row) => {
    const setting = row.dataset.setting ? JSON.parse(row.dataset.setting) : {};
    return Object.entries(choices).every(([key, { value }]) => !value || !(key in setting) || setting[key] === value);
  };
  const offerChoices = () => {
    const [box, list] = [make("details"), make("div")];
    box.append(make("summary", {}, "Settings"), list);
    facets.append(box);
    for (const key of new Set(settings.flatMap(Object.keys))) {
      const values = [...new Set(settings.filter((one) => key in one).map((one) => one[key]))].sort(collator.compare);
      const label = make("label", {}, `${key} `);
      const select = make("select", { "aria-label": key });
      select.append(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, value)));
      label.append(select);
      list.append(label);
      choices[key] = select;
      select.addEventListener("change", () => {
        for (const part of document.querySelectorAll("td.setting [data-key]")) {
          part.hidden = Boolean(choices[part.dataset.key]?.value);
        }
        redraws.forEach((redraw) => redraw());
      });
    }
    facets.hidden = !settings.length;
    box.open = Object.keys(choices).length <= 8;
  };

  const equip = (table) => {
    const [head, body] = [table.tHead.rows[0], table.tBodies[0]];
    const original = [...body.rows];
    const tools = table.closest("section").querySelector(".tools");
    const count = make("span", { class: "count", role: "status" });
    const clear = make("button", { type: "button" }, "Clear filters");
    tools.append(clear, count);
    let order = { column: -1, direction: 0 };

    const filters = make("tr", { class: "filters" });
    const inputs = [...head.cells].map((header, column) => {
      const name = header.textContent;
      const isNumber = header.classList.contains("number");
      const hint = isNumber ? ">70" : "words";
      const input = make("input", { type: "search", "aria-label": `Filter ${name}`, placeholder: hint });
      const box = make("th", isNumber ? { class: "number" } : {});
      box.append(input);
      filters.append(box);
      const button = make("button", { type: "button", title: "Sort: up, down, as given" }, name);
      header.replaceChildren(button);
      header.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = order.column === column ? { 1: -1, [-1]: 0, 0: 1 }[order.direction] : 1;
        order = { column, direction: next };
        sort();
      });
      return input;
    });
    table.tHead.append(filters);

    const sort = () => {
      [...head.cells].forEach((header, column) => {
        const here = column === order.column ? order.direction : 0;
        header.setAttribute("aria-sort", { 1: "ascending", [-1]: "descending", 0: "none" }[here]);
      });
      const rows = [...original];
      if (order.direction) {
        const keys = new Map(rows.map((row) => [row, keyOf(row.cells[order.column])]));
        rows.sort((left, right) => {
          const [a, b] = [keys.get(left), keys.get(right)];
          // What has no value is last, whichever way the others go.
          if (a === null || b === null) return (a === null) - (b === null);
          const [first, second] = [typeof a === "number", typeof b === "number"];
          if (first !== second) return first ? -1 : 1;
          return order.direction * (first ? a - b : collator.compare(a, b));
        });
      }
      body.append(...rows);
    };

    const filter = () => {
      let shown = 0;
      for (const row of original) {
        const cells = [...row.cells];
        const fits =
          inputs.every((input, column) => !input.value.trim() || meets(cells[column], input.value.trim())) &&
          chosen(row) && holdsAll(cells.map((cell) => cell.textContent).join("\n"), everywhere.value.trim());
        row.hidden = !fits;
        if (fits) shown += 1;
      }
      count.textContent = `${shown} of ${original.length} rows`;
      clear.hidden = inputs.every((input) => !input.value);
    };
    for (const input of inputs) input.addEventListener("input", filter);
    clear.addEventListener("click", () => {
      for (const input of inputs) input.value = "";
      filter();
      inputs[0]?.focus();
    });
    redraws.push(filter);
    filter();
  };

  document.querySelector("#search").hidden = false;
  offerChoices();
  document.querySelectorAll("section table").forEach(equip);
  everywhere.addEventListener("input", () => redraws.forEach((redraw) => redraw()));
})();
