/* In words and figures: what is alive at the cursor of a panel. */
Panel.prototype.tell = function () {
  const l = this.line, e = this.cursor, alive = l.alive(e), total = l.total[e];
  const peak = !l.events ? "" : e === l.peakAt ? " — the peak" : ` — ${l.peak ? ((100 * total) / l.peak).toFixed(1) : 0} % of the peak`;
  this.now.replaceChildren(make("b", {}, formatBytes(total)), ` in ${count(alive.length)} tensors`, peak,
    make("span", {title: l.moment(e)}, 
      ...(l.events ? [`event ${count(e)} of ${count(l.events)}, `, make("bdi", {}, l.moment(e))] : ["a step without events"])));
  for (const s of this.surfaces) {
    s.canvas.setAttribute("aria-valuenow", String(e));
    s.canvas.setAttribute("aria-valuetext", `event ${e}, ${l.moment(e)}, ${formatBytes(total)}`);
  }
  this.tellBands(e, total);
  this.tellAlive(alive, total);
};

Panel.prototype.tellBands = function (e, total) {
  const l = this.line, page = this.page;
  if (!this.chips.children.length) {
    l.bands.forEach((band, i) => {
      const value = make("b"), chip = make("button", {type: "button", class: "chip"}, swatch(""), band.name, value);
      chip.addEventListener("click", () => page.single(page.only === i ? null : i));
      this.chips.append(chip);
    });
  }
  Array.from(this.chips.children).forEach((chip, i) => {
    const n = l.live[i][e];
    chip.querySelector(".swatch").style.background = page.colours.bands[i];
    chip.querySelector("b").textContent = n ? formatBytes(n) : "0";
    chip.title = `${l.bands[i].name}: ${count(n)} B${total ? `, ${((100 * n) / total).toFixed(1)} %` : ""}`;
    chip.classList.toggle("none", !n);
    chip.setAttribute("aria-pressed", String(page.only === i));
  });
};

Panel.prototype.tellAlive = function (alive, total) {
  const shown = this.all ? alive : alive.slice(0, ROWS), page = this.page, l = this.line;
  const rows = shown.map(i => {
    const colour = page.colours.bands[l.band[i]], role = l.bands[l.band[i]].name;
    const first = make("td", {}, make("span", {class: "only-narrow"}, swatch(colour)), make("bdi", {}, l.node[i] || l.direction[i]),
      make("small", {}, make("span", {class: "only-narrow"}, `${role} · `), make("bdi", {}, `${l.op[i].replace(/^aten\.|\.default$/g, "")} · ${l.shape[i]}`)));
    const row = make("tr", {"data-i": String(i)}, first, make("td", {class: "c-role"}, swatch(colour), role),
      make("td", {class: "num c-bytes"}, formatBytes(l.bytes[i])),
      make("td", {class: "num c-share"}, `${((100 * l.bytes[i]) / (total || 1)).toFixed(1)} %`));
    row.classList.toggle("on", i === this.picked);
    row.addEventListener("click", () => this.pick(i));
    row.addEventListener("pointerenter", () => { this.over = i; this.overlay(); });
    row.addEventListener("pointerleave", () => { this.over = undefined; this.overlay(); });
    return row;
  });
  const head = make("tr", {}, make("th", {}, "tensor"), make("th", {class: "c-role"}, "role"),
    make("th", {class: "num c-bytes"}, "bytes"), make("th", {class: "num c-share"}, "share"));
  const table = make("table", {class: "alive"}, make("caption", {}, `Alive at event ${count(this.cursor)}, largest first`),
    make("thead", {}, head), make("tbody", {}, ...rows));
  this.table.replaceChildren(table);
  if (alive.length > ROWS) this.table.append(this.moreButton(alive, total));
};

Panel.prototype.moreButton = function (alive, total) {
  const rest = alive.slice(ROWS), bytes = rest.reduce((sum, i) => sum + this.line.bytes[i], 0);
  const words = this.all ? `show the largest ${ROWS}` : `show ${count(rest.length)} more (${formatBytes(bytes)})`;
  const button = make("button", {type: "button"}, words);
  button.style.marginTop = "8px";
  button.addEventListener("click", () => {
    this.all = !this.all;
    this.tellAlive(alive, total);
    this.table.lastElementChild.focus();
  });
  return button;
};
