// Charts as SVG: points with names beside them, and lines named at their ends; no two texts overlap. Colours are the page's.
"use strict";
const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SIZE = 12;
  const LINE = 15;
  const RADIUS = 5;
  const STRONG = 600;
  const MOST_NAMES = 15;
  const MOST_DOTS = 40;
  const node = (name, attributes = {}, ...inside) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const number = (value) => new Intl.NumberFormat("en", { maximumSignificantDigits: 12 }).format(value);

  // Texts: their width, and what fits.
  const ruler = document.createElement("canvas").getContext("2d");
  const widthOf = (text, weight = 400) => {
    ruler.font = `${weight} ${SIZE}px ${getComputedStyle(document.body).fontFamily}`;
    return ruler.measureText(text).width + 2;
  };
  const fitted = (text, most) => {
    if (widthOf(text, STRONG) <= most) return text;
    let short = text;
    while (short && widthOf(`${short}…`, STRONG) > most) short = short.slice(0, -1);
    return `${short}…`;
  };
  const write = (text, x, y, attributes = {}) =>
    node("text", { x: x.toFixed(1), y: y.toFixed(1), "dominant-baseline": "central", ...attributes }, text);

  // Ticks of a linear axis at multiples of 1, 2 or 5; of a log axis at 1, 2, 5, 10, ... or at each (second, third) power.
  const linearTicks = (low, high, most) => {
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: count }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  };
  const logTicks = (low, high, most) => {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const decades = Array.from({ length: last - first + 1 }, (_, place) => first + place);
    const within = (times, every) =>
      decades.filter((_, place) => place % every === 0)
        .flatMap((decade) => times.map((one) => Number(`${one}e${decade}`))).filter((tick) => tick >= low && tick <= high);
    const choices = [[[1, 2, 5], 1], [[1, 3], 1], [[1], 1], [[1], 2], [[1], 3], [[1], 6]];
    return choices.map((choice) => within(...choice)).find((ticks) => ticks.length <= most) ?? [];
  };
  // The least and the most, and some room; percentages stay within 0 and 100, but for bars that reach beyond.
  const percents = (values) => {
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 100];
    const room = Math.max(0.06 * (high - low), 0.5);
    return [Math.min(low, Math.max(0, low - room)), Math.max(high, Math.min(100, high + room))];
  };
  const ends = (values) => values.flatMap(([, y, half]) => [y - (half ?? 0), y + (half ?? 0)]);

  let count = 0;
  // Axes, grid and scales of a chart in a box that it fills; x is {label, low, high, log, ticks}, y is {label, low, high}.
  const frame = (box, { title, description, x, y, right = 12 }) => {
    const [width, height] = [Math.max(box.clientWidth, 200), Math.max(box.clientHeight, 160)];
    const yTicks = linearTicks(y.low, y.high, Math.max(2, (height - 70) / 42));
    const area = { left: Math.max(...yTicks.map((tick) => widthOf(number(tick)))) + 10, top: 28, right: width - right, bottom: height - 44 };
    const zero = x.zero ? 30 : 0;
    const of = x.log ? Math.log10 : (value) => value;
    const across = (area.right - area.left - zero) / (of(x.high) - of(x.low) || 1);
    const px = (value) => (x.log && value <= 0 ? area.left + zero / 2 : area.left + zero + (of(value) - of(x.low)) * across);
    const py = (value) => area.bottom - ((value - y.low) / (y.high - y.low)) * (area.bottom - area.top);
    const id = `drawing-${++count}`;
    const svg = node("svg", { width, height, role: "group", "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-text` });
    svg.append(node("title", { id: `${id}-title` }, title), node("desc", { id: `${id}-text` }, description));
    const grid = node("g", { class: "axes" });
    for (const tick of yTicks) {
      grid.append(node("line", { x1: area.left, x2: area.right, y1: py(tick), y2: py(tick) }));
      grid.append(write(number(tick), area.left - 6, py(tick), { "text-anchor": "end" }));
    }
    const most = (area.right - area.left) / 52;
    const xTicks = x.ticks ?? (x.log ? logTicks(x.low, x.high, most) : linearTicks(x.low, x.high, most));
    for (const tick of [...(x.zero ? [0] : []), ...xTicks]) {
      grid.append(node("line", { x1: px(tick), x2: px(tick), y1: area.top, y2: area.bottom, class: "faint" }));
      grid.append(write(number(tick), px(tick), area.bottom + 16, { "text-anchor": "middle" }));
    }
    grid.append(write(y.label, 0, 10, { class: "name" }));
    grid.append(write(x.label, area.right, height - 9, { "text-anchor": "end", class: "name" }));
    svg.append(grid);
    return { svg, area, px, py };
  };

  // What is said beside the pointer or the focus.
  const tipOf = (box) => {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("aria-hidden", "true");
    tip.hidden = true;
    box.append(tip);
    const show = (lines, x, y) => {
      tip.replaceChildren(...lines.map((line, place) => {
        const part = document.createElement(place ? "span" : "b");
        part.textContent = line;
        return part;
      }));
      tip.hidden = false;
      const left = Math.min(Math.max(0, x - tip.offsetWidth / 2), box.clientWidth - tip.offsetWidth);
      const above = y - tip.offsetHeight - 12;
      tip.style.transform = `translate(${left}px, ${above >= 0 ? above : y + 14}px)`;
    };
    return { show, hide: () => { tip.hidden = true; } };
  };

  // Rectangles are [left, top, right, bottom].
  const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  const within = (a, b) => a[0] >= b[0] && a[1] >= b[1] && a[2] <= b[2] && a[3] <= b[3];
  const along = ([x1, y1], [x2, y2]) =>
    Array.from({ length: 9 }, (_, place) => [x1 + ((x2 - x1) * place) / 8, y1 + ((y2 - y1) * place) / 8]);
  const WAYS = [[1, 0], [0, -1], [-1, 0], [0, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]];
  // A free place for a text beside a point: at its side, else some steps away with a line to it, else null.
  const placed = (width, x, y, taken, room, steps) => {
    const half = width / 2;
    for (const far of steps) {
      for (const [dx, dy] of WAYS) {
        const [side, lift] = [dx * (half + (dy && !far ? 2 : RADIUS + 3) + far), dy * (LINE / 2 + RADIUS + 1 + far)];
        const rectangle = [x + side - half, y + lift - LINE / 2, x + side + half, y + lift + LINE / 2];
        const from = [x + dx * (RADIUS + 1), y + dy * (RADIUS + 1)];
        const to = [x + side - dx * half, y + lift - dy * (LINE / 2)];
        const dots = far ? along(from, to).map(([a, b]) => [a - 1, b - 1, a + 1, b + 1]) : [];
        const free = (other) => !meet(rectangle, other) && !dots.slice(3).some((dot) => meet(dot, other));
        if (within(rectangle, room) && taken.every(free)) {
          return { taken: [rectangle, ...dots], x: x + side, y: y + lift, line: far ? [from, to] : null };
        }
      }
    }
    return null;
  };
  const SHAPES = [
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0", "M-4,-4H4V4H-4Z", "M0,-5.8L5.4,4H-5.4Z", "M0,-5.8L5.6,0L0,5.8L-5.6,0Z",
    "M0,5.8L5.4,-4H-5.4Z", "M-1.8,-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
    "M0,-6L1.5,-2L5.7,-1.9L2.4,0.7L3.5,4.9L0,2.5L-3.5,4.9L-2.4,0.7L-5.7,-1.9L-1.5,-2Z", "M-5,-2.5L0,-5.5L5,-2.5V2.5L0,5.5L-5,2.5Z",
    "M-5.2,-3.4L-3.4,-5.2L0,-1.8L3.4,-5.2L5.2,-3.4L1.8,0L5.2,3.4L3.4,5.2L0,1.8L-3.4,5.2L-5.2,3.4L-1.8,0Z", "M-5.5,-2.5H5.5V2.5H-5.5Z",
  ];
  const mark = (shape, attributes = {}) => node("path", { d: SHAPES[shape % SHAPES.length], class: "mark", ...attributes });

  // Those that no other beats with a smaller x, from left to right; what met a gate takes no part.
  const frontOf = (all) => {
    const ordered = all.filter((one) => !one.gated).sort((a, b) => a.x - b.x || b.y - a.y);
    return ordered.filter((one, place) => ordered.slice(0, place).every((other) => other.y < one.y));
  };

  // Points {name, x, y, half, shape, color, gated, tip, pick}: x is on a log axis, y ± half an interval. Those of the front are
  // joined, and named first, then the others in their order, 15 at most. `levels` {name, y} are horizontal lines.
  const points = (box, { title, x, y, points: all, levels = [] }) => {
    box.replaceChildren();
    const front = frontOf(all);
    const heights = [...ends(all.map((one) => [one.x, one.y, one.half])), ...levels.map((one) => one.y)];
    const sizes = all.map((one) => one.x).filter((size) => size > 0);
    const [least, most] = sizes.length ? [Math.min(...sizes), Math.max(...sizes)] : [1, 10];
    const [low, high] = percents(heights);
    const widen = Math.max((most / least) ** 0.06, 1.3);
    const { svg, area, px, py } = frame(box, {
      title, y: { label: y, low, high },
      description: `None has more with a smaller ${x}: ${front.map((one) => one.tip.join(", ")).join("; ") || "none"}.`,
      x: { label: x, log: true, low: least / widen, high: most * widen, zero: all.some((one) => one.x <= 0) },
    });
    const tip = tipOf(box);
    const room = [area.left + 2, area.top - 8, area.right + 8, area.bottom - 1];
    const spot = (one) => [px(one.x) - RADIUS, py(one.y) - RADIUS, px(one.x) + RADIUS, py(one.y) + RADIUS];
    const taken = [...all.map(spot), ...levels.map(({ y: at }) => [area.left, py(at) - 1, area.right, py(at) + 1])];
    const names = node("g", { class: "names" });
    for (const level of levels) {
      svg.append(node("line", { x1: area.left, x2: area.right, y1: py(level.y), y2: py(level.y), class: "level" }));
      const half = widthOf(level.name) / 2;
      const middles = [area.right - half, area.left + half + 4, (area.left + area.right) / 2];
      const places = middles.flatMap((middle) => [[middle, py(level.y) - 9], [middle, py(level.y) + 10]]);
      for (const [middle, at] of places) {
        const rectangle = [middle - half, at - LINE / 2, middle + half, at + LINE / 2];
        if (!within(rectangle, room) || taken.some((other) => meet(rectangle, other))) continue;
        taken.push(rectangle);
        names.append(write(level.name, middle, at, { "text-anchor": "middle", class: "soft" }));
        break;
      }
    }
    const corners = front.map((one) => [px(one.x), py(one.y)]);
    const steps = corners.map(([a, b], place) => (place ? `H${a}V${b}` : `M${a},${b}`)).join("");
    if (front.length > 1) svg.append(node("path", { d: steps, class: "front" }));
    for (const [place, [a, b]] of corners.slice(1).entries()) {
      const [before, top] = corners[place];
      taken.push([before + RADIUS, top - 1, a, top + 1], [a - 1, b + RADIUS, a + 1, top]);
    }
    for (const one of all.filter(({ half }) => half)) {
      const [at, top, bottom] = [px(one.x), py(one.y + one.half), py(one.y - one.half)];
      svg.append(node("line", { x1: at, x2: at, y1: top, y2: bottom, class: "leader" }));
      taken.push([at - 1, top, at + 1, bottom]);
    }
    let named = 0;
    for (const one of [...front, ...all.filter((other) => !front.includes(other))]) {
      if (named >= MOST_NAMES) break;
      const isFront = front.includes(one);
      const width = widthOf(one.name, isFront ? STRONG : 400);
      const place = placed(width, px(one.x), py(one.y), taken, room, isFront ? [0, 12, 26, 42, 60] : [0, 12, 26]);
      if (place === null) continue;
      named += 1;
      taken.push(...place.taken);
      if (place.line) {
        const [[x1, y1], [x2, y2]] = place.line;
        names.append(node("line", { x1, y1, x2, y2, class: "leader" }));
      }
      names.append(write(one.name, place.x, place.y, { "text-anchor": "middle", class: isFront ? "strong" : null }));
    }
    // One stop of the Tab key for all points; arrows go from one to the next, from left to right.
    const ordered = [...all].sort((a, b) => a.x - b.x);
    const marks = ordered.map((one, place) => {
      const point = node("g", {
        transform: `translate(${px(one.x).toFixed(1)},${py(one.y).toFixed(1)})`, tabindex: place ? -1 : 0,
        role: "button", "aria-label": one.tip.join(", "), class: "point",
      }, node("circle", { r: 9, class: "target" }), mark(one.shape, one.color ? { style: `fill: ${one.color}` } : { class: "mark plain" }));
      const say = () => tip.show(one.tip, px(one.x), py(one.y));
      for (const event of ["pointerenter", "focus"]) point.addEventListener(event, say);
      for (const event of ["pointerleave", "blur"]) point.addEventListener(event, tip.hide);
      point.addEventListener("click", () => one.pick?.());
      point.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (step) {
          const next = marks[(place + step + marks.length) % marks.length];
          point.setAttribute("tabindex", -1);
          next.setAttribute("tabindex", 0);
          next.focus();
        } else if (event.key === "Enter" || event.key === " ") one.pick?.();
        else return;
        event.preventDefault();
      });
      return point;
    });
    // Those with a colour lie on top.
    svg.append(...marks.filter((_, place) => !ordered[place].color), ...marks.filter((_, place) => ordered[place].color), names);
    box.append(svg);
  };

  // Names at the ends of lines, one under the other where the ends are close.
  const spread = (wanted, low, high) => {
    const order = wanted.map((_, place) => place).sort((a, b) => wanted[a] - wanted[b]);
    const found = [];
    order.forEach((place, rank) => { found[place] = Math.max(wanted[place], rank ? found[order[rank - 1]] + LINE : low); });
    let limit = high;
    for (const place of order.reverse()) {
      found[place] = Math.min(found[place], limit);
      limit = found[place] - LINE;
    }
    return found;
  };

  // Lines {name, values, color, dash}: values are [x, y, half] from left to right; y ± half is a band. `log` asks for a log
  // axis, and `say` puts an x into words.
  const lines = (box, { title, x, y, log = false, say = (at) => `${x} ${number(at)}`, lines: all }) => {
    box.replaceChildren();
    const shown = all.filter((line) => line.values.length);
    const [low, high] = percents(shown.flatMap((line) => ends(line.values)));
    const last = shown.map((line) => line.values.at(-1));
    const names = shown.map((line) => fitted(line.name, box.clientWidth * 0.36));
    const places = [...new Set(shown.flatMap((line) => line.values.map(([at]) => at)))].sort((a, b) => a - b);
    const [least, most] = places.length > 1 ? [places[0], places.at(-1)] : [1, 2];
    const right = Math.max(0, ...names.map((text) => widthOf(text, STRONG))) + 26;
    // A tick at each x if their texts have room, else at round numbers.
    const of = log ? Math.log10 : (value) => value;
    const each = (box.clientWidth - right - 50) / (of(most) - of(least));
    const isFree = (at, place) => !place || (of(at) - of(places[place - 1])) * each > widthOf(number(at)) + 8;
    const ticks = places.every(isFree) ? places : null;
    const { svg, area, px, py } = frame(box, {
      title, description: `At the end: ${last.map(([, value], place) => `${shown[place].name} ${value.toFixed(2)} %`).join("; ") || "none"}.`,
      right, y: { label: y, low, high }, x: { label: x, low: least, high: most, log, ticks },
    });
    const tip = tipOf(box);
    const heights = spread(last.map(([, value]) => py(value)), area.top, area.bottom + 12);
    const spots = [];
    const path = (dots) => dots.map(([a, b], step) => `${step ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");
    for (const line of shown) {
      const side = (way) => line.values.map(([at, value, half]) => [px(at), py(value + way * (half ?? 0))]);
      if (line.values.some(([, , half]) => half)) {
        svg.append(node("path", { d: `${path([...side(1), ...side(-1).reverse()])}Z`, class: "band", style: `fill: ${line.color}` }));
      }
    }
    shown.forEach((line, place) => {
      const dots = line.values.map(([at, value]) => [px(at), py(value)]);
      const style = `stroke: ${line.color}; color: ${line.color}`;
      svg.append(node("path", { d: path(dots), class: "line", style, "stroke-dasharray": line.dash ?? null }));
      for (const [a, b] of dots.length > MOST_DOTS ? [] : dots) svg.append(node("circle", { cx: a.toFixed(1), cy: b.toFixed(1), r: 2.6, style: `fill: ${line.color}` }));
      line.values.forEach(([at, value, half], step) => {
        const told = `${say(at)}: ${value.toFixed(2)}${half ? ` ± ${half.toFixed(2)}` : ""} %`;
        spots.push({ at: dots[step], tip: [line.name, told] });
      });
      const [x1, y1] = dots.at(-1);
      const end = area.right + 15;
      svg.append(node("path", { d: `M${x1 + 4},${y1}L${area.right + 6},${y1}L${end - 2},${heights[place]}`, class: "leader", style }));
      svg.append(write(names[place], end + 1, heights[place], { style: `fill: ${line.color}`, class: "strong" }));
    });
    svg.addEventListener("pointermove", (event) => {
      const corner = svg.getBoundingClientRect();
      const [a, b] = [event.clientX - corner.left, event.clientY - corner.top];
      const near = spots.map((spot) => [Math.hypot(spot.at[0] - a, spot.at[1] - b), spot]).sort((one, two) => one[0] - two[0])[0];
      if (near && near[0] < 24) tip.show(near[1].tip, ...near[1].at);
      else tip.hide();
    });
    svg.addEventListener("pointerleave", tip.hide);
    box.append(svg);
  };

  // Draws again when the box gets another width.
  const kept = (box, redraw) => {
    let before = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth === before || !box.clientWidth) return;
      before = box.clientWidth;
      redraw();
    }).observe(box);
  };

  // A curve over tasks as a line's values: those that are there.
  const overTasks = (curve, spread = []) =>
    curve.map((value, place) => [place + 1, value, spread[place] ?? null]).filter(([, value]) => value !== null);

  return { points, lines, overTasks, mark, kept };
})();
