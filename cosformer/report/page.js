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
    const lines = (value) => Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${JSON.stringify(each)}`);
    return [...lines(own), ...lines(config).map((line) => `config.${line}`), ...lines(data.runs[run])].join("\n");
  }

  function showRows(button) {
    const dialog = document.getElementById("rows");
    const numbers = button.dataset.rows.split(" ").map(Number);
    dialog.querySelector("h2").textContent = `${button.textContent}: ${numbers.length} row${numbers.length === 1 ? "" : "s"}`;
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
    for (let length = 2 ** Math.ceil(Math.log2(low) - 0.001); length <= high * 1.001; length *= 2) found.push(length);
    return found.filter((_, n) => (found.length - 1 - n) % Math.ceil(found.length / most) === 0);
  }

  const number = (value) => (Math.abs(value) >= 1000 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
  const short = (value) => (value >= 1024 && value % 1024 === 0 ? `${value / 1024}k` : number(value));

  // ---- lines that differ in colour, dashes and marks

  const colour = (n) => `var(--c${n % COLOURS})`;
  const dashes = (n) => DASHES[Math.floor(n / COLOURS) % DASHES.length];

  function mark(n, x, y, size = 3.6) {
    const shapes = [
      `M${x - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0`,
      `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
      `M${x} ${y - size * 1.3}l${size * 1.2} ${size * 2.2}h${-size * 2.4}z`,
      `M${x} ${y - size * 1.4}l${size * 1.4} ${size * 1.4}l${-size * 1.4} ${size * 1.4}l${-size * 1.4} ${-size * 1.4}z`,
    ];
    return drawn("path", { d: shapes[n % shapes.length], class: "mark", fill: colour(n), stroke: "var(--paper)" });
  }

  function swatch(n) {
    const svg = drawn("svg", { class: "swatch", viewBox: "0 0 30 12", "aria-hidden": "true" });
    svg.append(drawn("line", { x1: 0, x2: 30, y1: 6, y2: 6, class: "drawn", stroke: colour(n), "stroke-dasharray": dashes(n) }), mark(n, 15, 6));
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
    const box = { left: 52, right: width - (isWide ? Math.min(220, 7 * longest + 16) : 12), top: 12, bottom: height - 40 };
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${lines.map((line) => line.name).join(", ") || "no line is switched on"}` });
    const points = lines.flatMap((line) => line.points);
    place.replaceChildren(svg);
    if (!points.length) return svg.append(drawn("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no line is switched on"));
    const domains = { x: span(points.map((p) => p[0]), spec.x.log), y: spec.y.domain ?? span(points.map((p) => p[1]), spec.y.log) };
    const x = scale(domains.x, [box.left, box.right], spec.x.log);
    const y = scale(domains.y, [box.bottom, box.top], spec.y.log);
    for (const value of ticks(domains.y, spec.y.log, 6)) {
      svg.append(drawn("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
      svg.append(drawn("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    const isLength = /token|position/.test(spec.x.label) && !/million/.test(spec.x.label) && spec.x.log;
    const along = isLength ? lengthTicks(domains.x, width / 60) : ticks(domains.x, spec.x.log, width / 80);
    for (const value of spec.x.names ? spec.x.names.keys() : along) {
      svg.append(drawn("line", { class: "grid", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }));
      svg.append(drawn("text", { x: x(value), y: box.bottom + 16, "text-anchor": "middle" }, spec.x.names ? spec.x.names[value] : short(value)));
    }
    svg.append(drawn("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x.label));
    svg.append(drawn("text", { x: 12, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(box.top + box.bottom) / 2})` }, spec.y.label));
    for (const { name, points, n, below } of lines) {
      const path = points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
      svg.append(drawn("path", { class: "drawn", d: path, stroke: colour(n), "stroke-dasharray": dashes(n) }));
      const marked = points.length > 16 ? points.slice(-1) : points;
      for (const [a, b] of marked) {
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
    const ends = lines.map((line) => ({ ...line, at: y(line.points.at(-1)[1]) })).sort((a, b) => a.at - b.at);
    let last = -Infinity;
    for (const end of ends) last = end.at = Math.max(end.at, last + 14);
    let limit = box.bottom + 6;
    for (const end of ends.reverse()) limit = (end.at = Math.min(end.at, limit)) - 14;
    for (const end of ends) svg.append(drawn("text", { class: "name", x: box.right + 8, y: end.at + 4, style: `fill:${colour(end.n)}` }, end.name));
  }

  // ---- charts with switches

  function chart(spec) {
    const figure = document.getElementById(`chart-${spec.id}`);
    if (!figure) return;
    const numbers = new Map(spec.names.map((name, n) => [name, n])); // a name looks the same in every view
    const choice = element("select", { id: `view-${spec.id}` }, ...spec.views.map((view, n) => element("option", { value: n }, view.name)));
    const place = element("div", { class: "plot" });
    const crossings = element("p", { class: "crossings", "aria-live": "polite" });
    const switches = element("fieldset", {}, element("legend", {}, "Lines:"));
    const all = element("button", { type: "button" }, "all");
    const none = element("button", { type: "button" }, "none");
    const controls = element("p", { class: "control" }, element("label", { for: choice.id }, "Show"), choice, all, none);
    figure.append(controls, place, crossings, switches);

    const view = () => spec.views[choice.value];
    function redraw() {
      const on = view().lines.filter((line) => line.on && line.points.length);
      const against = on.some((line) => line.name === view().against);
      plot(place, spec, on.map((line) => ({ ...line, n: numbers.get(line.name), below: against && line.below })), `${spec.title}, ${view().name}`);
      const found = on.filter((line) => against && line.below !== undefined).map((line) => `${line.name} ${crossing(line.below)}`);
      crossings.textContent = found.length ? `Below ${view().against}, in circles: ${found.join("; ")}.` : "";
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
    const slider = document.getElementById("layer");
    const [place, distances, readout, key] = ["maps-drawn", "distances", "weight", "heads-key"].map((id) => document.getElementById(id));
    const config = (model) => data.rows[model.layers[Math.min(slider.value, model.layers.length) - 1]].config;
    function redraw() {
      document.getElementById("layer-shown").textContent = `${slider.value} of ${slider.max}`;
      place.replaceChildren(...models.map((model) => element("div", {}, element("h3", {}, model.name), element("div", { class: "heads" }, ...config(model).heads.map((head, n) => map(model, config(model), head, n, readout))))));
      const count = Math.max(...models.map((model) => config(model).heads.length));
      key.replaceChildren(...Array.from({ length: count }, (_, n) => element("span", {}, swatch(n), ` head ${n + 1}`)));
      const most = Math.max(...models.flatMap((model) => config(model).heads.flatMap((head) => head.by_distance)));
      distances.replaceChildren(...models.map((model) => element("div", {}, element("h3", {}, model.name), element("div", { class: "plot" }))));
      models.forEach((model, m) => {
        const heads = config(model).heads;
        const names = heads[0].by_distance.map((_, n) => (n < 2 ? String(n) : short(2 ** (n - 1))));
        const spec = { x: { label: "tokens back, up to twice as many", log: false, names }, y: { label: "share of the weight", log: false, domain: [0, most] } };
        const lines = heads.map((head, n) => ({ name: `head ${n + 1}`, n, points: head.by_distance.map((share, i) => [i, share]) }));
        plot(distances.children[m].lastChild, spec, lines, `${model.name}, layer ${slider.value}, weight by distance`);
      });
    }
    slider.addEventListener("input", redraw);
    redraw();
    watch(distances, redraw);
  }

  function map(model, config, head, n, readout) {
    const count = config.pieces.length;
    const canvas = element("canvas", { width: count, height: count, tabindex: 0, role: "img", "aria-label": `${model.name}, layer ${config.layer}, head ${n + 1}: ${head.reach} tokens back in the mean` });
    const image = new ImageData(count, count);
    const shade = (i, j) => DIGITS.indexOf(head.map[(i * (i + 1)) / 2 + j]);
    for (let i = 0; i < count; i++)
      for (let j = 0; j <= i; j++) image.data.set([16, 122, 184, shade(i, j) * 4.05], 4 * (i * count + j)); // seen on light and on dark
    canvas.getContext("2d").putImageData(image, 0, 0);
    let [i, j] = [0, 0];
    function tell(row, column) {
      [i, j] = [Math.max(0, Math.min(count - 1, row)), Math.max(0, Math.min(count - 1, column))];
      const weight = j > i ? 0 : head.scale * (shade(i, j) / 63) ** 2;
      const [query, key] = [i, j].map((k) => `${JSON.stringify(config.pieces[k])} (${k + 1})`);
      readout.textContent = `${model.name}, head ${n + 1}: ${query} gives ${weight.toFixed(3)} to ${key}`;
    }
    canvas.addEventListener("pointermove", (event) => tell(Math.floor((event.offsetY / canvas.clientHeight) * count), Math.floor((event.offsetX / canvas.clientWidth) * count)));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step) { event.preventDefault(); tell(i + step[0], j + step[1]); }
    });
    return element("figure", {}, canvas, element("figcaption", {}, `head ${n + 1}: ${head.reach.toFixed(1)} back${head.is_signed ? ", sizes of signed weights" : ""}`));
  }

  // ---- paper shows what is folded

  let folded = [];
  addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; for (const each of folded) each.open = true; });
  addEventListener("afterprint", () => { for (const each of folded) each.open = false; });

  for (const spec of data.charts) chart(spec);
  if (data.maps.length) maps(data.maps);
})();
