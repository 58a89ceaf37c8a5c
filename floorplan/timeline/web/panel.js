/* The page: one panel a timeline, a cursor in each, a table of what is alive there. */
const ROWS = 12;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function swatch(colour) {
  const node = make("span", {class: "swatch"});
  node.style.background = colour;
  return node;
}

class Panel {
  constructor(line, page) {
    this.line = line;
    this.page = page;
    this.cursor = line.peakAt;
    this.view = {from: 0, to: Math.max(line.events, 1)};
    this.picked = -1;
    this.all = false;
    this.build();
  }

  build() {
    const name = make("bdi", {}, this.line.name);
    this.now = make("p", {class: "now", "aria-live": "polite"});
    this.chips = make("div", {class: "chips", role: "group", "aria-label": "Bands: press one to show it alone"});
    this.chart = new Surface(this.canvas("chart", "live bytes"), 18, 22);
    this.table = make("div");
    const tools = make("span", {class: "bar"}, ...this.buttons());
    this.root = make("section", {class: "panel", "aria-label": this.line.name},
      make("div", {class: "bar"}, make("h2", {}, name), tools), this.now, this.chips, make("div", {}, this.chart.canvas));
    const plan = make("div");
    if (this.line.offset) {
      this.plan = new Surface(this.canvas("plan", "floorplan"), 18, 22);
      plan.append(this.plan.canvas);
    }
    this.detail = make("p", {class: "detail", "aria-live": "polite"});
    this.root.append(plan, this.detail, this.table);
    this.surfaces = [this.chart, this.plan].filter(Boolean);
    this.surfaces.forEach(s => this.listen(s));
  }

  buttons() {
    const button = (words, title, act) => {
      const node = make("button", {type: "button", title, "aria-label": title}, words);
      node.addEventListener("click", act);
      return node;
    };
    return [
      button("Peak", "go to the peak (P)", () => this.go(this.line.peakAt)),
      button("−", "zoom out (−)", () => this.zoom(2)),
      button("+", "zoom in on the cursor (+)", () => this.zoom(0.5)),
      button("All", "show the whole step (0)", () => this.zoom(Infinity)),
    ];
  }

  canvas(kind, what) {
    return make("canvas", {class: kind, tabindex: "0", role: "slider", "aria-label": `${this.line.name}: ${what}, event`,
      "aria-valuemin": "0", "aria-valuemax": String(Math.max(this.line.events - 1, 0))});
  }

  listen(s) {
    const c = s.canvas, plan = s === this.plan;
    const place = e => this.locate(s, e.clientX, e.clientY);
    c.addEventListener("pointermove", e => {
      if (e.buttons & 1) this.go(place(e).event);
      this.hover(s, plan, e);
    });
    c.addEventListener("pointerleave", () => {
      this.page.tip.hidden = true;
      this.over = this.pointed = undefined;
      this.overlay();
    });
    c.addEventListener("click", e => {
      const at = place(e);
      if (plan) this.pick(this.block(at));
      this.go(at.event);
    });
    c.addEventListener("keydown", e => this.key(e, plan));
  }

  locate(s, clientX, clientY) {
    const box = s.canvas.getBoundingClientRect(), {x, y, w, h} = s.inner;
    const share = Math.min(Math.max((clientX - box.left - x) / w, 0), 1);
    const exact = this.view.from + share * (this.view.to - this.view.from);
    const event = Math.min(Math.max(Math.floor(exact), 0), Math.max(this.line.events - 1, 0));
    return {exact, event, address: (1 - (clientY - box.top - y) / h) * this.most().plan};
  }

  block(at) {
    const {w, h} = this.plan.inner, slack = 4;
    return this.line.at(at.exact, at.address, (slack / w) * (this.view.to - this.view.from), (slack / h) * this.most().plan);
  }

  key(e, plan) {
    const step = e.shiftKey ? 10 : 1, leap = Math.ceil((this.view.to - this.view.from) / 20);
    const moves = {ArrowRight: step, ArrowLeft: -step, PageUp: leap, PageDown: -leap, Home: -Infinity, End: Infinity};
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key in moves) this.go(this.cursor + moves[e.key]);
    else if (e.key === "p" || e.key === "P") this.go(this.line.peakAt);
    else if (e.key === "+" || e.key === "=") this.zoom(0.5);
    else if (e.key === "-") this.zoom(2);
    else if (e.key === "0") this.zoom(Infinity);
    else if (plan && (e.key === "ArrowUp" || e.key === "ArrowDown")) this.climb(e.key === "ArrowUp" ? 1 : -1);
    else return;
    e.preventDefault();
  }

  /* Pick the next tensor alive at the cursor, by address. */
  climb(by) {
    const alive = this.line.alive(this.cursor).sort((a, b) => this.line.offset[a] - this.line.offset[b]);
    const at = alive.indexOf(this.picked);
    this.pick(alive[at < 0 ? (by > 0 ? 0 : alive.length - 1) : Math.min(Math.max(at + by, 0), alive.length - 1)] ?? -1);
  }

  go(event) {
    this.cursor = Math.min(Math.max(event, 0), Math.max(this.line.events - 1, 0));
    const span = this.view.to - this.view.from;
    if (this.cursor < this.view.from || this.cursor >= this.view.to) this.look(this.cursor - span / 2, span);
    this.tell();
    this.overlay();
  }

  zoom(by) {
    const span = Math.min((this.view.to - this.view.from) * by, this.line.events);
    this.look(this.cursor + 0.5 - span / 2, span);
  }

  look(from, span) {
    const width = Math.max(span, Math.min(8, this.line.events), 1), last = Math.max(this.line.events - width, 0);
    this.view.from = Math.min(Math.max(from, 0), last);
    this.view.to = this.view.from + width;
    this.draw();
  }

  pick(i) {
    this.picked = i;
    const none = [["Pick a tensor in the table", this.line.offset ? " or the floorplan." : "."]];
    this.detail.replaceChildren(...(i < 0 ? none : this.about(i)).flatMap((words, k) => (k ? [" · ", ...words] : words)));
    for (const row of this.table.querySelectorAll("tr[data-i]")) row.classList.toggle("on", +row.dataset.i === i);
    this.overlay();
  }

  /* Everything that is known of one tensor, a line each. */
  about(i) {
    const l = this.line;
    return [
      [make("b", {}, swatch(this.page.colours.bands[l.band[i]]), make("bdi", {}, l.node[i] || l.direction[i]))],
      [l.bands[l.band[i]].name + (l.bands[l.band[i]].name.startsWith("temporary") ? "" : `, born in ${l.direction[i]}`)],
      [make("bdi", {}, `${l.op[i]} ${l.shape[i]}`)],
      [formatBytes(l.bytes[i]) + (l.bytes[i] >= 1000 ? ` (${count(l.bytes[i])} B)` : "")],
      [`alive from event ${count(l.born[i])} to ${count(l.died[i])}` + (l.offset ? `, at address ${count(l.offset[i])}` : "")],
    ];
  }

  hover(s, plan, e) {
    const at = this.locate(s, e.clientX, e.clientY), tip = this.page.tip, l = this.line;
    this.over = plan ? this.block(at) : undefined;
    if (plan && this.over >= 0) {
      tip.replaceChildren(...this.about(this.over).map(words => make("p", {}, ...words)));
    } else if (!plan) {
      const parts = l.live.map((v, band) => [v[at.event], band]).filter(p => p[0] > 0).sort((a, b) => b[0] - a[0]);
      tip.replaceChildren(
        make("p", {}, make("b", {}, formatBytes(l.total[at.event]))),
        make("p", {}, make("small", {}, `event ${count(at.event)}, `, make("bdi", {}, l.moment(at.event)))),
        ...parts.map(([n, band]) => make("p", {}, swatch(this.page.colours.bands[band]), `${l.bands[band].name} ${formatBytes(n)}`)));
    }
    this.pointed = at.event;
    tip.hidden = plan && !(this.over >= 0);
    this.page.placeTip(e.clientX, e.clientY);
    this.overlay();
  }

  most() {
    const lines = this.page.same ? this.page.lines : [this.line];
    return {chart: Math.max(1, ...lines.map(l => l.peak)) * 1.12, plan: Math.max(1, ...lines.map(l => l.arena)) * 1.02};
  }

  draw() {
    const {colours, only} = this.page, most = this.most();
    this.surfaces.forEach(s => s.fit());
    const g = this.chart.context(true);
    axes(g, this.chart, most.chart, colours, "bytes alive");
    drawStack(g, this.chart, this.line, this.view, most.chart, colours, only);
    peakMark(g, this.chart, this.line, this.view, most.chart, colours);
    phaseBar(g, this.chart, this.line, this.view, colours);
    if (this.plan) {
      const p = this.plan.context(true);
      axes(p, this.plan, most.plan, colours, "floorplan: address by time");
      drawBlocks(p, this.plan, this.line, this.view, most.plan, colours, only);
      phaseBar(p, this.plan, this.line, this.view, colours);
    }
    this.overlay();
  }

  /* What moves: the cursor, and the outline of the tensor that is picked or under the pointer. */
  overlay() {
    if (!this.chart.inner) return;
    const {colours} = this.page, span = this.view.to - this.view.from;
    const marks = this.line.events ? [[this.pointed, colours.muted, 1], [this.cursor, colours.cursor, 1.5]] : [];
    for (const s of this.surfaces) {
      const g = s.show(), {x, y, w, h} = s.inner;
      g.save();
      g.beginPath();
      g.rect(x, y - 4, w, h + 4);
      g.clip();
      for (const [event, colour, width] of marks) {
        if (event === undefined) continue;
        g.fillStyle = colour;
        g.fillRect(x + ((event + 0.5 - this.view.from) / span) * w - width / 2, y - 4, width, h + 4);
      }
      if (s === this.plan) [this.picked, this.over ?? -1].filter(i => i >= 0).forEach(i => this.outline(g, i));
      g.restore();
    }
  }

  outline(g, i) {
    const r = blockBox(this.plan, this.line, this.view, this.most().plan, i);
    g.lineWidth = 2;
    g.strokeStyle = this.page.colours.ink;
    g.strokeRect(r.x - 1, r.y - 1, Math.max(r.w, 1) + 2, Math.max(r.h, 1) + 2);
  }
}
