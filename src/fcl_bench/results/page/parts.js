// What the scripts of all pages share: elements, words and numbers, the order of rows, choices, a button that copies.
"use strict";
const parts = (() => {
  const make = (name, attributes = {}, ...inside) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...inside.filter((part) => part !== null));
    return element;
  };

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const three = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const size = (value) => (Math.abs(value) >= 1000 ? whole.format(value) : three.format(value));
  const percent = (value) => value.toFixed(2);

  // Whether every word that was typed is somewhere in a text.
  const holdsAll = (text, typed) => {
    const where = text.toLowerCase();
    return typed.trim().toLowerCase().split(/\s+/).every((word) => where.includes(word));
  };

  // A copy of a list in the order of its values, up (1) or down (-1): numbers before texts, and last, either way, what has
  // no value (null). `tie` compares two with the same value.
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const ordered = (list, valueOf, way, tie = () => 0) => {
    const values = new Map(list.map((one) => [one, valueOf(one)]));
    return [...list].sort((left, right) => {
      const [a, b] = [values.get(left), values.get(right)];
      if (a === null || b === null) return (a === null) - (b === null) || tie(left, right);
      const [first, second] = [typeof a === "number", typeof b === "number"];
      if (first !== second) return first ? -1 : 1;
      return way * (first ? a - b : collator.compare(a, b)) || tie(left, right);
    });
  };
  // Says in each header whether the table is in its order: 1, -1, or 0 for not.
  const showOrder = (headers, wayOf) => [...headers].forEach((header, place) => {
    header.setAttribute("aria-sort", { 1: "ascending", [-1]: "descending", 0: "none" }[wayOf(header, place)]);
  });

  // A list of choices that keeps what was chosen if it is still there, and is not shown if there is none to make.
  const fill = (select, texts) => {
    const before = select.value;
    select.replaceChildren(...texts.map((text) => make("option", { value: text }, text || "all")));
    if (texts.includes(before)) select.value = before;
    select.closest("label").hidden = texts.length < 2;
  };

  const copied = async (code, button) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Without the clipboard's permission: what is selected is copied.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const withCopy = (box) => {
    const button = make("button", { type: "button", "aria-label": "Copy the command" }, "Copy");
    button.addEventListener("click", () => copied(box.querySelector("code"), button));
    box.append(button);
    return box;
  };
  document.querySelectorAll("header .command").forEach(withCopy);

  return { make, whole, size, percent, holdsAll, collator, ordered, showOrder, fill, withCopy };
})();
