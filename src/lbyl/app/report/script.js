"use strict";
(function () {
  const all = (query, within) => Array.from((within || document).querySelectorAll(query));
  const byId = (id) => document.getElementById(id);

  // Tabs: arrows, Home and End move; the address remembers which one is open.
  const tabs = all("[role=tab]");
  function open(tab, focus) {
    tabs.forEach((other) => {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      byId(other.getAttribute("aria-controls")).hidden = !chosen;
    });
    if (focus) tab.focus();
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  function named() {
    return tabs.find((tab) => "#" + tab.getAttribute("aria-controls") === location.hash);
  }
  tabs.forEach((tab, position) => {
    tab.addEventListener("click", () => {
      open(tab);
      history.replaceState(null, "", "#" + tab.getAttribute("aria-controls"));
    });
    tab.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const moves = { ArrowRight: position === last ? 0 : position + 1, ArrowLeft: position ? position - 1 : last, Home: 0, End: last };
      if (event.key in moves) {
        event.preventDefault();
        open(tabs[moves[event.key]], true);
      }
    });
  });
  window.addEventListener("hashchange", () => named() && open(named()));
  open(named() || tabs[0]);

  // Light and dark: the system's choice until the reader makes one.
  const root = document.documentElement;
  function remembered(value) {
    try {
      if (value) localStorage.setItem("lbyl-theme", value);
      return localStorage.getItem("lbyl-theme");
    } catch (error) {
      return null; // pages opened from disk may not be allowed to remember
    }
  }
  if (remembered()) root.dataset.theme = remembered();
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remembered(root.dataset.theme);
    paint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paint());

  // Charts are laid out for the width they have, so that letters keep their size and nothing is
  // cut off: what lies along the axis moves together, names that would touch are left out.
  const SLANT = Math.cos((42 * Math.PI) / 180), LETTER = 7, BETWEEN = 9;
  function layOut(chart) {
    const room = Math.round(chart.parentElement.clientWidth);
    if (!room || chart.dataset.room === String(room)) return; // not open yet, or done
    chart.dataset.room = room;
    const [, , first, height] = (chart.dataset.box = chart.dataset.box || chart.getAttribute("viewBox")).split(" ").map(Number);
    const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
    const scale = (room - left - right) / (first - left - right);
    const place = (x) => left + (x - left) * scale;
    chart.setAttribute("viewBox", "0 0 " + room + " " + height);
    all(".across", chart).forEach((line) => line.setAttribute("x2", room - right));
    all("[data-x]", chart).forEach((thing) => {
      const { x, y, turn } = thing.dataset;
      thing.setAttribute("transform", "translate(" + place(Number(x)).toFixed(1) + " " + y + ")" + (turn || ""));
    });
    all("rect", chart).filter((bar) => bar.parentElement.matches(".bar")).forEach((bar) => {
      const width = (bar.dataset.width = bar.dataset.width || bar.getAttribute("width")) * scale;
      bar.setAttribute("width", width.toFixed(2));
      bar.setAttribute("x", (-width / 2).toFixed(2));
    });
    all(".line", chart).forEach((line) => {
      const path = (line.dataset.path = line.dataset.path || line.getAttribute("d"));
      line.setAttribute("d", path.replace(/([ML])([\d.]+)/g, (_, pen, x) => pen + place(Number(x)).toFixed(1)));
    });
    let taken = -Infinity;
    all(".along", chart).forEach((label) => {
      const name = (label.dataset.name = label.dataset.name || label.textContent);
      const x = place(Number(label.dataset.x)), slanted = Boolean(label.dataset.turn);
      const letters = slanted ? Math.max(4, Math.floor(x / (LETTER * SLANT))) : name.length;
      label.textContent = name.length > letters ? "…" + name.slice(1 - letters) : name;
      const half = slanted ? 7.5 : (name.length * LETTER) / 2 + 3;
      const free = x - half >= taken;
      label.style.display = free ? "" : "none";
      if (free) taken = x + half;
      if (!slanted) { // at either end a name leans on the edge instead of being cut
        const over = x + half > room, under = x - half < 0;
        label.setAttribute("text-anchor", over ? "end" : under ? "start" : "middle");
        label.setAttribute("transform", "translate(" + (over ? room : under ? 0 : x) + " " + label.dataset.y + ")");
      }
    });
    all(".series", chart).forEach((series) => {
      const dots = all(".dot", series).map((dot) => place(Number(dot.dataset.x)));
      const gap = (Math.max(...dots) - Math.min(...dots)) / Math.max(1, dots.length - 1);
      series.classList.toggle("dense", dots.length > 1 && gap < BETWEEN && Boolean(all(".line", series)[0].dataset.path));
    });
  }
  const fitted = new ResizeObserver((seen) => seen.forEach((one) => all(".chart", one.target).forEach(layOut)));
  all(".fitted").forEach((box) => fitted.observe(box));

  // Tips: by pointer and by touch.
  const tip = byId("tip");
  function show(event) {
    const owner = event.target.closest && event.target.closest("[data-tip]");
    tip.hidden = !owner;
    if (!owner) return;
    tip.textContent = owner.dataset.tip;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = Math.max(6, event.clientY - box.height - 12) + "px";
  }
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);

  // Legends hide and show a method in the charts of their own part.
  all(".key").forEach((key) => key.addEventListener("click", () => {
    const on = key.getAttribute("aria-pressed") !== "true";
    key.setAttribute("aria-pressed", String(on));
    all(".series", key.closest("section")).forEach((series) => {
      if (series.dataset.series === key.dataset.key) series.classList.toggle("off", !on);
    });
  }));

  // Tables sort by any column.
  all("table.sortable").forEach((table) => all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.classList.add("ordered");
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.value || row.cells[column].textContent;
      const rows = Array.from(body.rows).sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const numeric = !isNaN(parseFloat(x)) && !isNaN(parseFloat(y)) && !/[a-z_]/i.test(x.replace(/e[+-]/i, ""));
        return (up ? 1 : -1) * (numeric ? parseFloat(x) - parseFloat(y) : x.localeCompare(y, undefined, { numeric: true }));
      });
      body.append(...rows);
    });
  }));

  all(".copy").forEach((button) => button.addEventListener("click", () => {
    const source = byId(button.dataset.copy);
    const copied = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const select = () => { getSelection().selectAllChildren(source); button.textContent = "Selected"; };
    if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(copied, select);
    else select();
  }));

  // The heat map: signed bytes, red above zero and blue below, stronger in the mid-range.
  const held = byId("matrices");
  const matrices = held ? JSON.parse(held.textContent) : [];
  matrices.forEach((matrix) => {
    matrix.values = Int8Array.from(atob(matrix.data), (c) => (c.charCodeAt(0) << 24) >> 24);
  });
  function isDark() {
    const chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function colour(level, dark) {
    const zero = dark ? [24, 32, 42] : [255, 255, 255];
    const end = level > 0 ? (dark ? [255, 150, 92] : [196, 62, 12]) : dark ? [110, 176, 255] : [22, 84, 190];
    const strength = Math.pow(Math.abs(level) / 127, 0.6);
    return zero.map((z, i) => Math.round(z + (end[i] - z) * strength));
  }
  function paint() {
    if (!matrices.length) return;
    const dark = isDark() && !matchMedia("print").matches;
    const matrix = matrices[Number(byId("unit").value)];
    const canvas = byId("heat");
    canvas.width = matrix.rows; // channels go across, as there are more of them than kept ones
    canvas.height = matrix.columns;
    canvas.style.aspectRatio = matrix.rows + " / " + matrix.columns;
    canvas.parentElement.style.maxWidth = Math.round(Math.min(960, (520 * matrix.rows) / matrix.columns)) + "px";
    const pen = canvas.getContext("2d");
    const picture = pen.createImageData(matrix.rows, matrix.columns);
    matrix.values.forEach((level, i) => {
      const [row, column] = [Math.floor(i / matrix.columns), i % matrix.columns];
      picture.data.set([...colour(level, dark), 255], 4 * (column * matrix.rows + row));
    });
    pen.putImageData(picture, 0, 0);
    canvas.setAttribute("aria-label", "Delivery matrix of " + matrix.unit + ", " + matrix.channels + " channels from " + matrix.kept + " kept ones");
    const bar = byId("scale").getContext("2d");
    for (let y = 0; y < 160; y += 1) {
      bar.fillStyle = "rgb(" + colour(Math.round(127 - (254 * y) / 159), dark).join() + ")";
      bar.fillRect(0, y, 16, 1);
    }
    byId("high").textContent = "+" + matrix.scale.toPrecision(3);
    byId("low").textContent = "−" + matrix.scale.toPrecision(3);
    say(null);
  }
  function say(position) {
    const matrix = matrices[Number(byId("unit").value)];
    const whole = matrix.rows === matrix.channels && matrix.columns === matrix.kept;
    const size = matrix.unit + ": " + matrix.channels + " channels, " + matrix.kept + " kept" + (whole ? "" : ", drawn smaller");
    if (!position) { byId("cell").textContent = size; return; }
    const value = (matrix.values[position[0] * matrix.columns + position[1]] * matrix.scale) / 127;
    const row = Math.floor((position[0] * matrix.channels) / matrix.rows);
    const column = Math.floor((position[1] * matrix.kept) / matrix.columns);
    byId("cell").textContent = "channel " + row + " from kept channel number " + column + ": " + value.toFixed(3);
  }
  if (matrices.length) {
    const canvas = byId("heat");
    let cursor = [0, 0];
    byId("unit").addEventListener("change", () => { cursor = [0, 0]; paint(); });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const inside = (at, size, count) => Math.max(0, Math.min(count - 1, Math.floor((at / size) * count)));
      cursor = [inside(event.clientX - box.left, box.width, canvas.width), inside(event.clientY - box.top, box.height, canvas.height)];
      say(cursor);
    });
    canvas.addEventListener("pointerleave", () => say(null));
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (!(event.key in moves)) return;
      event.preventDefault();
      cursor = [0, 1].map((i) => Math.max(0, Math.min([canvas.width, canvas.height][i] - 1, cursor[i] + moves[event.key][i])));
      say(cursor);
    });
    paint();
  }
  // A painted map does not follow style sheets: for paper it is painted anew.
  matchMedia("print").addEventListener("change", () => paint());
})();
