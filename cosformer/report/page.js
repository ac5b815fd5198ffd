"use strict";
// Draws what the JSON block `data` holds: charts with switches, maps of heads, rows behind numbers.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = 8;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

  // ---- elements

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawn(name, attributes = {}, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  // ---- rows behind a number

  function spelt(number) {
    const { run, config, ...own } = data.rows[number];
    const lines = (value, before = "") =>
      Object.entries(value).map(([key, each]) => `${before}${JSON.stringify(key)}: ${JSON.stringify(each)}`);
    return [...lines(own), ...lines(config, "config."), ...lines(data.runs[run])].join("\n");
  }

  function showRows(button) {
    const dialog = document.getElementById("rows");
    const numbers = button.dataset.rows.split(" ").map(Number);
    const many = numbers.length === 1 ? "1 row" : `${numbers.length} rows`;
    dialog.querySelector("h2").textContent = `${button.textContent}: ${many}`;
    dialog.querySelector("pre").textContent = numbers.map(spelt).join("\n\n");
    dialog.showModal();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.rows");
    if (button) showRows(button);
    else if (event.target.id === "rows") event.target.close(); // beside the dialog
  });

  // ---- scales and ticks

  function scale(domain, range, isLog) {
    const along = isLog ? Math.log : (value) => value;
    const [low, high] = domain.map(along);
    return (value) => range[0] + ((along(value) - low) / (high - low || 1)) * (range[1] - range[0]);
  }

  function ticks([low, high], isLog, most) {
    if (!isLog) {
      const rough = (high - low || 1) / most;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
      const first = Math.ceil(low / step);
      return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, n) => (first + n) * step);
    }
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    const inside = (list) => list.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    const tens = inside(found.filter((_, n) => n % 3 === 0));
    if (tens.length >= 3) return tens.filter((_, n) => n % Math.ceil(tens.length / most) === 0);
    const few = inside(found);
    return few.length >= 3 ? few : ticks([low, high], false, most);
  }

  function lengthTicks([low, high], most) {
    const found = [];
    const first = 2 ** Math.ceil(Math.log2(low) - 0.001);
    for (let length = first; length <= high * 1.001; length *= 2) found.push(length);
    return found.filter((_, n) => (found.length - 1 - n) % Math.ceil(found.length / most) === 0);
  }

  function number(value) {
    if (Math.abs(value) >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  }
  const short = (value) => (value >= 1024 && value % 1024 === 0 ? `${value / 1024}k` : number(value));

  // ---- lines that differ in colour, dashes and marks

  const colour = (n) => `var(--c${n % COLOURS})`;
  const dashes = (n) => DASHES[Math.floor(n / COLOURS) % DASHES.length];

  const MARKS = [
    "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0", // a circle
    "m-3.4 -3.4h6.8v6.8h-6.8z", // a square
    "m0 -4.7l4.3 7.9h-8.6z", // a triangle
    "m0 -5l5 5l-5 5l-5 -5z", // a diamond
  ];

  function mark(n, x, y) {
    const d = `M${x.toFixed(1)} ${y.toFixed(1)}${MARKS[n % MARKS.length]}`;
    return drawn("path", { d, class: "mark", fill: colour(n), stroke: "var(--paper)" });
  }

  function stroke(n, more) {
    return { class: "drawn", stroke: colour(n), "stroke-dasharray": dashes(n), ...more };
  }

  function swatch(n) {
    const svg = drawn("svg", { class: "swatch", viewBox: "0 0 30 12", "aria-hidden": "true" });
    svg.append(drawn("line", stroke(n, { x1: 0, x2: 30, y1: 6, y2: 6 })), mark(n, 15, 6));
    return svg;
  }

  function span(values, isLog) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (isLog) return [low / (high / low) ** 0.03, high * (high / low || 2) ** 0.03];
    return [low - 0.04 * (high - low || 1), high + 0.04 * (high - low || 1)];
  }

  // Lines {name, points, n, below} as an SVG that is as wide as the place it stands in.
  function plot(place, spec, lines, title) {
    const width = Math.max(260, place.clientWidth);
    const isWide = width > 560 && lines.length > 0 && lines.length < 13;
    const height = Math.min(420, Math.max(220, 0.55 * width));
    const longest = Math.max(0, ...lines.map((line) => line.name.length));
    const margin = isWide ? Math.min(220, 7 * longest + 16) : 12;
    const box = { left: 52, right: width - margin, top: 12, bottom: height - 40 };
    const shown = lines.map((line) => line.name).join(", ") || "no line is switched on";
    const about = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${shown}` };
    const svg = drawn("svg", about);
    const write = (x, y, text, more) => svg.append(drawn("text", { x, y, "text-anchor": "middle", ...more }, text));
    place.replaceChildren(svg);
    const points = lines.flatMap((line) => line.points);
    if (!points.length) return write(width / 2, height / 2, shown);
    const [across, up] = [0, 1].map((n) => points.map((point) => point[n]));
    const domains = { x: span(across, spec.x.log), y: spec.y.domain ?? span(up, spec.y.log) };
    const x = scale(domains.x, [box.left, box.right], spec.x.log);
    const y = scale(domains.y, [box.bottom, box.top], spec.y.log);
    for (const value of ticks(domains.y, spec.y.log, 6)) {
      svg.append(drawn("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
      write(box.left - 6, y(value) + 4, number(value), { "text-anchor": "end" });
    }
    const isLength = /^(tokens|position)/.test(spec.x.label) && spec.x.log;
    const along = isLength ? lengthTicks(domains.x, width / 60) : ticks(domains.x, spec.x.log, width / 80);
    for (const value of spec.x.names ? spec.x.names.keys() : along) {
      svg.append(drawn("line", { class: "grid", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }));
      write(x(value), box.bottom + 16, spec.x.names ? spec.x.names[value] : short(value));
    }
    const middle = (box.top + box.bottom) / 2;
    write((box.left + box.right) / 2, height - 4, spec.x.label);
    write(12, middle, spec.y.label, { transform: `rotate(-90 12 ${middle})` });
    for (const { name, points, n, below } of lines) {
      const d = points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
      svg.append(drawn("path", stroke(n, { d })));
      for (const [a, b] of points.length > 16 ? points.slice(-1) : points) {
        const dot = mark(n, x(a), y(b));
        dot.append(drawn("title", {}, `${name}: ${number(b)} ${spec.y.label} at ${number(a)} ${spec.x.label}`));
        svg.append(dot);
      }
      if (below) svg.append(drawn("circle", { class: "crossing", cx: x(below), cy: y(between(points, below)), r: 7 }));
    }
    if (isWide) names(svg, lines, box, y);
  }

  // The height of a line between its points, both axes logarithmic.
  function between(points, at) {
    const right = Math.max(1, points.findIndex(([a]) => a >= at));
    const [[a, b], [c, d]] = [points[right - 1], points[right]];
    return b * (d / b) ** (Math.log(at / a) / Math.log(c / a));
  }

  // Names at the ends of lines, pushed apart.
  function names(svg, lines, box, y) {
    const ends = lines.map((line) => ({ ...line, at: y(line.points.at(-1)[1]) }));
    ends.sort((a, b) => a.at - b.at);
    let last = -Infinity;
    for (const end of ends) last = end.at = Math.max(end.at, last + 14);
    let limit = box.bottom + 6;
    for (const end of ends.reverse()) limit = (end.at = Math.min(end.at, limit)) - 14;
    for (const { at, n, name } of ends)
      svg.append(drawn("text", { x: box.right + 8, y: at + 4, style: `fill:${colour(n)}` }, name));
  }

  // ---- charts with switches

  function chart(spec) {
    const figure = document.getElementById(`chart-${spec.id}`);
    if (!figure) return;
    const numbers = new Map(spec.names.map((name, n) => [name, n])); // a name looks the same in every view
    const views = spec.views.map((view, n) => element("option", { value: n }, view.name));
    const choice = element("select", { id: `view-${spec.id}` }, ...views);
    const place = element("div", { class: "plot" });
    const crossings = element("p", { class: "crossings", "aria-live": "polite" });
    const switches = element("fieldset", {}, element("legend", {}, "Lines:"));
    const all = element("button", { type: "button" }, "all");
    const none = element("button", { type: "button" }, "none");
    const label = element("label", { for: choice.id }, "Show");
    const controls = element("p", { class: "control" }, label, choice, all, none);
    figure.append(controls, place, crossings, switches);

    const view = () => spec.views[choice.value];
    function redraw() {
      const on = view().lines.filter((line) => line.on && line.points.length);
      const against = on.some((line) => line.name === view().against);
      const lines = on.map((line) => ({ ...line, n: numbers.get(line.name), below: against && line.below }));
      plot(place, spec, lines, `${spec.title}, ${view().name}`);
      const found = on.filter((line) => against && line.below !== undefined);
      const told = found.map((line) => `${line.name} ${crossing(line.below)}`).join("; ");
      crossings.textContent = told ? `Below ${view().against}, in circles: ${told}.` : "";
    }
    function list() {
      const ordered = [...view().lines].sort((a, b) => numbers.get(a.name) - numbers.get(b.name));
      const labels = ordered.map((line) => {
        const n = numbers.get(line.name);
        const box = element("input", { type: "checkbox" });
        box.checked = line.on;
        box.addEventListener("change", () => { line.on = box.checked; redraw(); });
        return element("label", {}, box, swatch(n), line.name);
      });
      switches.replaceChildren(switches.firstChild, ...labels);
      redraw();
    }
    for (const [button, isOn] of [[all, true], [none, false]])
      button.addEventListener("click", () => { for (const line of view().lines) line.on = isOn; list(); });
    choice.addEventListener("change", list);
    list();
    watch(place, redraw);
  }

  function crossing(below) {
    if (below === null) return "nowhere";
    return below === 0 ? "at every length" : `from about ${number(Number(below.toPrecision(2)))} tokens on`;
  }

  function watch(place, redraw) {
    let width = place.clientWidth;
    const look = () => { if (place.clientWidth !== width) { width = place.clientWidth; redraw(); } };
    new ResizeObserver(() => requestAnimationFrame(look)).observe(place); // not inside: sizes change again
  }

  // ---- maps of heads

  function maps(models) {
    const ids = ["layer", "layer-shown", "maps-drawn", "distances", "weight", "heads-key"];
    const [slider, output, place, distances, readout, key] = ids.map((id) => document.getElementById(id));
    const config = (model) => data.rows[model.layers[Math.min(slider.value, model.layers.length) - 1]].config;
    const column = (model, inner) => element("div", {}, element("h3", {}, model.name), inner);
    function redraw() {
      output.textContent = `${slider.value} of ${slider.max}`;
      const heads = models.map((model) => config(model).heads);
      const drawnOf = (model, m) => heads[m].map((head, n) => map(model, config(model), head, n, readout));
      place.replaceChildren(
        ...models.map((model, m) => column(model, element("div", { class: "heads" }, ...drawnOf(model, m)))),
      );
      const count = Math.max(...heads.map((each) => each.length));
      const named = (_, n) => element("span", {}, swatch(n), ` head ${n + 1}`);
      key.replaceChildren(...Array.from({ length: count }, named));
      distances.replaceChildren(...models.map((model) => column(model, element("div", { class: "plot" }))));
      const most = Math.max(...heads.flat().flatMap((head) => head.by_distance));
      models.forEach((model, m) => distance(distances.children[m].lastChild, model, heads[m], most));
    }
    slider.addEventListener("input", redraw);
    redraw();
    watch(distances, redraw);
  }

  function distance(place, model, heads, most) {
    const names = heads[0].by_distance.map((_, n) => (n < 2 ? String(n) : short(2 ** (n - 1))));
    const x = { label: "tokens back, up to twice as many", log: false, names };
    const y = { label: "share of the weight", log: false, domain: [0, most] };
    const points = (head) => head.by_distance.map((share, n) => [n, share]);
    const lines = heads.map((head, n) => ({ name: `head ${n + 1}`, n, points: points(head) }));
    plot(place, { x, y }, lines, `${model.name}, weight by distance`);
  }

  function map(model, config, head, n, readout) {
    const count = config.pieces.length;
    const about = `${model.name}, layer ${config.layer}, head ${n + 1}: ${head.reach} tokens back in the mean`;
    const canvas = element("canvas", { width: count, height: count, tabindex: 0, role: "img", "aria-label": about });
    const image = new ImageData(count, count);
    const shade = (i, j) => DIGITS.indexOf(head.map[(i * (i + 1)) / 2 + j]);
    for (let i = 0; i < count; i++)
      for (let j = 0; j <= i; j++) image.data.set([16, 122, 184, shade(i, j) * 4.05], 4 * (i * count + j));
    canvas.getContext("2d").putImageData(image, 0, 0);
    let [i, j] = [0, 0];
    function tell(row, column) {
      [i, j] = [Math.max(0, Math.min(count - 1, row)), Math.max(0, Math.min(count - 1, column))];
      const weight = j > i ? 0 : head.scale * (shade(i, j) / 63) ** 2;
      const [query, key] = [i, j].map((k) => `${JSON.stringify(config.pieces[k])} (${k + 1})`);
      readout.textContent = `${model.name}, head ${n + 1}: ${query} gives ${weight.toFixed(3)} to ${key}`;
    }
    canvas.addEventListener("pointermove", (event) => {
      const [down, across] = [event.offsetY / canvas.clientHeight, event.offsetX / canvas.clientWidth];
      tell(Math.floor(down * count), Math.floor(across * count));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step) { event.preventDefault(); tell(i + step[0], j + step[1]); }
    });
    const signed = head.is_signed ? ", sizes of signed weights" : "";
    const caption = element("figcaption", {}, `head ${n + 1}: ${head.reach.toFixed(1)} back${signed}`);
    return element("figure", {}, canvas, caption);
  }

  // ---- paper shows what is folded

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("section:not(#further) details:not([open])")];
    for (const each of folded) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of folded) each.open = false;
  });

  for (const spec of data.charts) chart(spec);
  if (data.maps.length) maps(data.maps);
})();
