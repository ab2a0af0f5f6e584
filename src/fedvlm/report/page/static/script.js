"use strict";
(() => {
  const all = (query, within = document) => [...within.querySelectorAll(query)];
  const tip = document.getElementById("tip");
  const found = document.getElementById("fedvlm");
  const model = found ? JSON.parse(found.textContent) : { runs: [] };
  document.documentElement.classList.add("scripted");

  // Tables: sort by a column's numbers or words, the second press the other way round.
  const words = (cell) => cell.dataset.words ?? cell.textContent.trim().replace(/\s+/g, " ");
  const key = (cell) => {
    const text = cell.dataset.sort ?? words(cell);
    const number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === typeof b) return a.localeCompare(b);
    return typeof a === "number" ? 1 : -1; // what is no number stands below all numbers
  };
  for (const button of all(".sort")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const place = head.cellIndex;
      const down = head.getAttribute("aria-sort") !== "descending";
      all("th", head.parentNode).forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = head.closest("table").tBodies[0];
      const rows = [...body.rows].sort((a, b) => compare(key(a.cells[place]), key(b.cells[place])));
      body.append(...(down ? rows.reverse() : rows));
    });
  }

  // Tables as text.
  const forms = {
    Markdown: (rows) => {
      const line = (row) => `| ${row.map((one) => one.replace(/\|/g, "\\|")).join(" | ")} |`;
      const rule = rows[0].map((_, place) => (place ? "---:" : "---"));
      return [line(rows[0]), line(rule), ...rows.slice(1).map(line)].join("\n") + "\n";
    },
    LaTeX: (rows) => {
      const safe = (one) => one.replace(/\\/g, "\\textbackslash ").replace(/[_%&#${}]/g, "\\$&")
        .replace(/±/g, "$\\pm$").replace(/ε/g, "$\\varepsilon$");
      const lines = rows.map((row) => `${row.map(safe).join(" & ")} \\\\`);
      return [`\\begin{tabular}{l${"r".repeat(rows[0].length - 1)}}`, "\\hline", lines[0], "\\hline",
        ...lines.slice(1), "\\hline", "\\end{tabular}", ""].join("\n");
    },
    CSV: (rows) => rows.map((row) => row.map((one) =>
      (/[",\n]/.test(one) ? `"${one.replace(/"/g, '""')}"` : one)).join(",")).join("\n") + "\n",
  };
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea"); // where the clipboard is not to be had
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  for (const button of all("[data-copy]")) {
    button.addEventListener("click", async () => {
      const table = document.getElementById(button.dataset.copy);
      const text = forms[button.dataset.form]([...table.rows].map((row) => [...row.cells].map(words)));
      const said = button.parentNode.querySelector(".said");
      said.dataset.text = text;
      said.textContent = (await copy(text)) ? " copied" : " cannot copy here";
    });
  }

  // Runs are hidden and shown by their keys, in every panel.
  const hidden = new Set();
  for (const button of all("button.key")) {
    button.addEventListener("click", () => {
      const run = button.dataset.run;
      if (!hidden.delete(run)) hidden.add(run);
      for (const one of all(`[data-run="${run}"]`)) {
        if (one.matches(".key")) one.setAttribute("aria-pressed", String(!hidden.has(run)));
        else one.toggleAttribute("hidden", hidden.has(run));
      }
    });
  }

  // Panels: a place in the drawing and the number it stands for.
  const numbers = (text) => text.split(" ").map(Number);
  const scale = (panel) => {
    const [x0, x1] = numbers(panel.dataset.x);
    const [y0, y1] = numbers(panel.dataset.y);
    const [left, top, right, base] = numbers(panel.dataset.box);
    const log = panel.dataset.log === "1";
    return {
      place: (x, y) => [left + ((log ? Math.log10(x) : x) - x0) / (x1 - x0) * (right - left),
        base - (y - y0) / (y1 - y0) * (base - top)],
      x: (at) => { const v = x0 + (at - left) / (right - left) * (x1 - x0); return log ? 10 ** v : v; },
      y: (at) => y0 + (base - at) / (base - top) * (y1 - y0),
    };
  };
  const points = (line) => (line.getAttribute("points") || "").split(" ").filter(Boolean)
    .map((pair) => pair.split(",").map(Number));
  const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

  // Curves of one seed or one training, or of all of them.
  const average = (curves, name, across) => {
    const seeds = new Map();
    for (const one of curves) if (name in one) seeds.set(one.seed, [...(seeds.get(one.seed) || []), one]);
    const groups = [...seeds.values()];
    const length = Math.min(...groups.flat().map((one) => one.kB.length));
    const out = [];
    for (let n = 0; groups.length && n < length; n += 1) {
      const each = groups.map((group) => group.map((one) => one[name][n]).filter((v) => v !== null))
        .filter((values) => values.length).map(mean);
      const moved = mean(groups.flat().map((one) => one.kB[n]));
      if (!each.length || (across === "kB" && !moved)) continue;
      const middle = mean(each);
      const wide = each.length > 1
        ? Math.sqrt(each.reduce((sum, v) => sum + (v - middle) ** 2, 0) / (each.length - 1)) : 0;
      out.push([across === "kB" ? moved : n, middle, wide]);
    }
    return out;
  };
  const seed = document.getElementById("seed");
  const training = document.getElementById("training");
  const redraw = () => {
    for (const panel of all(".panel[data-key]")) {
      const { place } = scale(panel);
      const write = (line, pairs) => line.setAttribute("points",
        pairs.map((pair) => pair.map((v) => v.toFixed(1)).join(",")).join(" "));
      model.runs.forEach((run, number) => {
        const curves = run.curves.filter((one) => (!seed.value || String(one.seed) === seed.value)
          && (!training.value || one.training === training.value));
        const drawn = average(curves, panel.dataset.key, panel.dataset.across);
        for (const line of all(`.line[data-run="${number}"]`, panel)) write(line, drawn.map(([x, y]) => place(x, y)));
        const banded = drawn.some(([, , wide]) => wide) ? drawn : [];
        for (const band of all(`.band[data-run="${number}"]`, panel)) {
          write(band, [...banded.map(([x, y, w]) => place(x, y + w)),
            ...banded.map(([x, y, w]) => place(x, y - w)).reverse()]);
        }
      });
    }
  };
  if (seed && training) [seed, training].forEach((one) => one.addEventListener("change", redraw));

  // Hovering, or the arrow keys: the numbers of all runs there, and a rule in every like panel.
  const show = (panel, at, where) => {
    const { x, y } = scale(panel);
    const across = panel.dataset.across;
    const rows = [];
    let nearest = at;
    let gap = Infinity;
    const lines = all(".line", panel).filter((line) => !line.hasAttribute("hidden"));
    for (const line of lines) {
      for (const [px] of points(line)) if (Math.abs(px - at) < gap) { gap = Math.abs(px - at); nearest = px; }
    }
    for (const line of lines) {
      const near = points(line).filter(([px]) => Math.abs(px - nearest) < 12)
        .sort((a, b) => Math.abs(a[0] - nearest) - Math.abs(b[0] - nearest))[0];
      if (!near) continue;
      const value = y(near[1]);
      const text = panel.dataset.percent === "1" ? `${(100 * value).toFixed(1)} %` : value.toPrecision(3);
      rows.push([value, `${model.runs[line.dataset.run].name}: ${text}`]);
    }
    rows.sort((a, b) => b[0] - a[0]);
    const head = across === "round" ? `round ${Math.round(x(nearest))}` : `at ${x(nearest).toPrecision(3)}`;
    tip.replaceChildren(...[head, ...rows.map((row) => row[1])].map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(where.x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(where.y + 14, innerHeight - box.height - 8))}px`;
    for (const other of all(".panel")) {
      const rule = other.querySelector(".rule");
      const alike = other === panel || (across && other.dataset.across === across && other.dataset.x === panel.dataset.x);
      rule.toggleAttribute("hidden", !alike);
      rule.setAttribute("x1", nearest);
      rule.setAttribute("x2", nearest);
    }
    panel.dataset.at = nearest;
  };
  const leave = () => {
    tip.hidden = true;
    all(".rule").forEach((rule) => rule.setAttribute("hidden", ""));
  };
  for (const panel of all(".panel")) {
    panel.addEventListener("pointermove", (event) => {
      const box = panel.getBoundingClientRect();
      const wide = panel.viewBox.baseVal.width;
      show(panel, (event.clientX - box.left) / box.width * wide, { x: event.clientX, y: event.clientY });
    });
    panel.addEventListener("pointerleave", leave);
    panel.addEventListener("blur", leave);
    panel.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      const places = [...new Set(all(".line", panel).flatMap(points).map(([x]) => x))].sort((a, b) => a - b);
      const now = Number(panel.dataset.at ?? -1);
      const next = step > 0 ? places.find((x) => x > now + 0.01) : places.findLast((x) => x < now - 0.01);
      if (next === undefined) return;
      const box = panel.getBoundingClientRect();
      show(panel, next, { x: box.left + next / panel.viewBox.baseVal.width * box.width, y: box.top + 20 });
    });
  }
})();
