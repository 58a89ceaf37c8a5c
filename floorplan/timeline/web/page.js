/* What the panels share: colours, scale, the band shown alone, the tip. */
const page = {
  only: null,
  same: true,
  tip: document.getElementById("tip"),

  start() {
    const data = JSON.parse(document.getElementById("data").textContent);
    this.bands = data.bands;
    this.colours = theme(this.bands);
    this.lines = data.lines.map(raw => new Line(raw, data.strings, data.bands));
    this.panels = this.lines.map(line => new Panel(line, this));
    document.getElementById("panels").append(...this.panels.map(p => p.root));
    document.getElementById("tools").hidden = false;
    const scale = document.getElementById("scale"), box = scale.querySelector("input");
    scale.hidden = this.lines.length < 2;
    box.addEventListener("change", () => {
      this.same = box.checked;
      this.draw();
    });
    this.panels.forEach(p => {
      p.tell();
      p.pick(-1);
    });
    new ResizeObserver(() => this.draw()).observe(document.getElementById("panels"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
  },

  draw() {
    cancelAnimationFrame(this.due);
    this.due = requestAnimationFrame(() => this.panels.forEach(p => p.draw()));
  },

  retheme() {
    this.colours = theme(this.bands);
    this.panels.forEach(p => {
      p.tell();
      p.pick(p.picked);
    });
    this.draw();
  },

  single(band) {
    this.only = band;
    this.panels.forEach(p => p.tell());
    this.draw();
  },

  placeTip(x, y) {
    if (this.tip.hidden) return;
    const box = this.tip.getBoundingClientRect(), gap = 14;
    const left = x + gap + box.width > innerWidth - 8 ? x - gap - box.width : x + gap;
    const top = y + gap + box.height > innerHeight - 8 ? y - gap - box.height : y + gap;
    this.tip.style.left = `${Math.min(Math.max(left, 8), Math.max(innerWidth - box.width - 8, 8))}px`;
    this.tip.style.top = `${Math.max(top, 8)}px`;
  },
};

page.start();
