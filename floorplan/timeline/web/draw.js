/* Drawing: a canvas in CSS pixels with a cached picture under what moves. */
const LEFT = 58, RIGHT = 6;

class Surface {
  constructor(canvas, top, bottom) {
    this.canvas = canvas;
    this.cache = document.createElement("canvas");
    this.top = top;
    this.bottom = bottom;
  }

  fit() {
    const box = this.canvas.getBoundingClientRect();
    this.ratio = window.devicePixelRatio || 1;
    this.width = Math.max(box.width, LEFT + RIGHT + 10);
    this.height = box.height;
    for (const c of [this.canvas, this.cache]) {
      c.width = Math.round(this.width * this.ratio);
      c.height = Math.round(this.height * this.ratio);
    }
    this.inner = {x: LEFT, y: this.top, w: this.width - LEFT - RIGHT, h: this.height - this.top - this.bottom};
  }

  context(cached) {
    const g = (cached ? this.cache : this.canvas).getContext("2d");
    g.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    g.font = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
    if (cached) g.clearRect(0, 0, this.width, this.height);
    return g;
  }

  show() {
    const g = this.canvas.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.cache, 0, 0);
    return this.context(false);
  }
}

/* A colour most of the way to the ground: unlike transparency it stays faint where thin things lie on each other. */
function faint(colour, ground) {
  const part = (hex, k) => parseInt(hex.slice(k, k + 2), 16);
  return "#" + [1, 3, 5].map(k => Math.round(part(colour, k) * 0.17 + part(ground, k) * 0.83).toString(16).padStart(2, "0")).join("");
}

function theme(bands) {
  const style = getComputedStyle(document.documentElement), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const get = name => style.getPropertyValue(name).trim();
  const solid = bands.map(b => (dark ? b.dark : b.light));
  return {
    ink: get("--ink"), muted: get("--muted"), bg: get("--bg"), grid: get("--grid"), line: get("--line"),
    cursor: get("--cursor"), shade: get("--shade"), soft: get("--soft"), bands: solid,
    faint: solid.map(c => faint(c, get("--shade"))),
  };
}

/* Ticks of 1, 2 or 5 times a power of ten, about one for each 40 pixels. */
function ticks(most, pixels) {
  const rough = most / Math.max(2, Math.floor(pixels / 40)), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * [1, 2, 5, 10].find(k => k * power >= rough);
  const found = [];
  for (let v = 0; v <= most; v += step) found.push(v);
  return found;
}

function tickText(v, most) {
  const [unit, name] = most >= 1e6 ? [1e6, "MB"] : most >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${+(v / unit).toPrecision(6)} ${name}`;
}

function axes(g, s, most, colours, title) {
  const {x, y, w, h} = s.inner;
  g.fillStyle = colours.shade;
  g.fillRect(x, y, w, h);
  g.textAlign = "right";
  g.textBaseline = "middle";
  for (const v of ticks(most, h)) {
    const at = Math.round(y + h - (v / most) * h) + 0.5;
    g.strokeStyle = colours.grid;
    g.beginPath();
    g.moveTo(x, at);
    g.lineTo(x + w, at);
    g.stroke();
    g.fillStyle = colours.muted;
    g.fillText(tickText(v, most), x - 6, Math.min(at, y + h - 5));
  }
  g.textAlign = "left";
  g.fillStyle = colours.ink;
  g.fillText(title, 0, 8);
}

/* The directions of the step, under the time axis. */
function phaseBar(g, s, line, view, colours) {
  const {x, y, w, h} = s.inner, top = y + h + 3, span = view.to - view.from;
  g.textBaseline = "middle";
  g.textAlign = "center";
  line.phases.forEach(([start, end, name]) => {
    const a = x + (Math.max(start, view.from) - view.from) / span * w;
    const b = x + (Math.min(end, view.to) - view.from) / span * w;
    if (b <= a) return;
    g.fillStyle = colours.soft;
    g.fillRect(a, top, b - a, 17);
    g.fillStyle = colours.line;
    g.fillRect(a, top, 1, 17);
    g.fillStyle = colours.muted;
    if (g.measureText(name).width < b - a - 8) g.fillText(name, (a + b) / 2, top + 9);
  });
}

/* One column a device pixel: the fullest event that falls into it, so that no spike is lost. */
function drawStack(g, s, line, view, most, colours, only) {
  const {x, y, w, h} = s.inner, columns = Math.round(w * s.ratio), span = view.to - view.from, unit = 1 / s.ratio;
  for (let c = 0; c < columns; c++) {
    let e = Math.floor(view.from + (c / columns) * span);
    const end = Math.min(Math.ceil(view.from + ((c + 1) / columns) * span), line.events);
    for (let k = e + 1; k < end; k++) if (line.total[k] > line.total[e]) e = k;
    let base = 0;
    line.live.forEach((values, band) => {
      if (values[e] > 0) {
        const top = y + h - ((base + values[e]) / most) * h, bottom = y + h - (base / most) * h;
        g.fillStyle = (only === null || only === band ? colours.bands : colours.faint)[band];
        g.fillRect(x + c * unit, top, unit, bottom - top);
        base += values[e];
      }
    });
  }
}

function drawBlocks(g, s, line, view, most, colours, only) {
  const faded = i => only !== null && only !== line.band[i];
  const order = Array.from(line.offset.keys()).sort((a, b) => faded(b) - faded(a) || line.bytes[b] - line.bytes[a]);
  g.save();
  g.beginPath();
  g.rect(s.inner.x, s.inner.y, s.inner.w, s.inner.h);
  g.clip();
  for (const i of order) {
    if (line.died[i] <= view.from || line.born[i] >= view.to) continue;
    const r = blockBox(s, line, view, most, i);
    g.fillStyle = (faded(i) ? colours.faint : colours.bands)[line.band[i]];
    g.fillRect(r.x, r.y, Math.max(r.w, 0.8), Math.max(r.h, 0.8));
    if (r.w > 3 && r.h > 3) {
      g.strokeStyle = colours.bg;
      g.lineWidth = 0.7;
      g.strokeRect(r.x, r.y, r.w, r.h);
    }
    if (!faded(i) && r.h > 15 && r.w > 54) label(g, s, r, line.node[i] || line.direction[i], colours.bands[line.band[i]]);
  }
  g.restore();
}

function blockBox(s, line, view, most, i) {
  const {x, y, w, h} = s.inner, span = view.to - view.from;
  const left = x + ((line.born[i] - view.from) / span) * w, right = x + ((line.died[i] - view.from) / span) * w;
  const top = y + h - ((line.offset[i] + line.bytes[i]) / most) * h;
  return {x: left, y: top, w: right - left, h: (line.bytes[i] / most) * h};
}

function label(g, s, r, name, ground) {
  const left = Math.max(r.x, s.inner.x) + 4, right = Math.min(r.x + r.w, s.inner.x + s.inner.w) - 4;
  let short = name; // the end of a node's name says more than its beginning
  while (short.length > 3 && g.measureText("…" + short).width > right - left && g.measureText(name).width > right - left) {
    short = short.slice(1);
  }
  if (short.length <= 3 && short !== name) return;
  const [red, green, blue] = [1, 3, 5].map(k => parseInt(ground.slice(k, k + 2), 16));
  g.fillStyle = red * 0.299 + green * 0.587 + blue * 0.114 > 125 ? "#000000" : "#ffffff";
  g.textAlign = "left";
  g.textBaseline = "middle";
  g.fillText(short === name ? name : "…" + short, left, r.y + r.h / 2);
}

/* A dashed line at the peak with its figure, kept inside the picture. */
function peakMark(g, s, line, view, most, colours) {
  if (!line.peak) return;
  const {x, y, w, h} = s.inner, at = y + h - (line.peak / most) * h;
  const px = x + ((line.peakAt + 0.5 - view.from) / (view.to - view.from)) * w, inside = px >= x && px <= x + w;
  g.strokeStyle = colours.ink;
  g.setLineDash([5, 4]);
  g.beginPath();
  g.moveTo(x, at);
  g.lineTo(x + w, at);
  g.stroke();
  g.setLineDash([]);
  g.fillStyle = colours.ink;
  if (inside) {
    g.beginPath();
    g.arc(px, at, 3.5, 0, 7);
    g.fill();
  }
  const words = `peak ${formatBytes(line.peak)}`, width = g.measureText(words).width;
  // Beside the peak: the cursor starts on it, and would cross the words.
  const left = !inside ? x + 4 : px + 8 + width < x + w ? px + 8 : px - 8 - width;
  g.textAlign = "left";
  g.textBaseline = "bottom";
  g.fillText(words, Math.max(left, x + 2), at - 4);
}
