/* The timelines as the page holds them: columns of numbers, live bytes by band, what is alive when. */
function formatBytes(n) {
  if (n >= 999950) return (n / 1e6).toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2}) + " MB";
  return n >= 1000 ? (n / 1e3).toFixed(1) + " kB" : n + " B";
}

function count(n) {
  return n.toLocaleString("en");
}

class Line {
  constructor(raw, strings, bands) {
    Object.assign(this, raw);
    this.bands = bands;
    const word = column => column.map(i => strings[i]);
    for (const name of ["node", "op", "shape", "direction"]) this[name] = word(raw[name]);
    this.size = this.born.length;
    this.live = bands.map(() => new Float64Array(this.events + 1));
    for (let i = 0; i < this.size; i++) {
      this.live[this.band[i]][this.born[i]] += this.bytes[i];
      this.live[this.band[i]][this.died[i]] -= this.bytes[i];
    }
    this.total = new Float64Array(this.events + 1);
    for (const values of this.live) {
      for (let e = 0, now = 0; e <= this.events; e++) {
        now += values[e];
        values[e] = now;
        this.total[e] += now;
      }
    }
    this.byBirth = Array.from(this.born.keys()).sort((a, b) => this.born[a] - this.born[b]);
  }

  alive(event) {
    const found = [];
    for (let i = 0; i < this.size; i++) if (this.born[i] <= event && event < this.died[i]) found.push(i);
    return found.sort((a, b) => this.bytes[b] - this.bytes[a] || this.born[a] - this.born[b]);
  }

  /* The op that runs at an event is the one that allocated last. */
  moment(event) {
    let low = 0, high = this.size;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (this.born[this.byBirth[mid]] <= event) low = mid + 1;
      else high = mid;
    }
    const i = this.byBirth[Math.max(low - 1, 0)];
    if (i === undefined) return "";
    const node = this.node[i];
    return node && node !== this.direction[i] ? `${this.direction[i]} of ${node}` : this.direction[i];
  }

  /* The block at an event and an address; the nearest within the given slack where none is there. */
  at(event, address, slackEvents, slackBytes) {
    let best = -1, least = Infinity;
    if (!this.offset) return best;
    for (let i = 0; i < this.size; i++) {
      const dx = Math.max(this.born[i] - event, event - this.died[i], 0) / slackEvents;
      const dy = Math.max(this.offset[i] - address, address - this.offset[i] - this.bytes[i], 0) / slackBytes;
      const far = Math.max(dx, dy);
      if (far <= 1 && (far < least || (far === least && this.bytes[i] < this.bytes[best]))) [best, least] = [i, far];
    }
    return best;
  }
}
