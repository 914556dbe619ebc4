// A log of any size through a window of about a megabyte: follows the end, pages by bytes, searches the whole file in pieces.

import { button, bytes, fill, h, note, say } from './dom.js';
import { call, get, jobPath, rest, stream } from './api.js';
import { line, plain, row } from './ansi.js';

const PIECE = 128 * 1024;
const KEPT = 8;
const SCAN = 4 * 1024 * 1024;
const encoder = new TextEncoder();
const size = (text) => encoder.encode(text).length;

export class LogView {
  constructor(job, signal) {
    Object.assign(this, { job, signal, attempt: job.attempt || null, source: null, pieces: [], total: 0, following: true, generation: 0 });
    this.lines = h('div', { class: 'lines', role: 'log', 'aria-label': 'Log', 'aria-live': 'off' });
    this.box = h('div', { class: 'log', tabindex: 0, 'aria-label': 'Log, scrollable', onscroll: () => this.scrolled() }, this.lines);
    this.attempts = h('select', { 'aria-label': 'Attempt', onchange: () => this.open({ attempt: Number(this.attempts.value) }) });
    this.sources = h('select', { 'aria-label': 'Source', onchange: () => this.open({ source: this.sources.value }) });
    this.status = h('span', { class: 'told' });
    this.follow = button('Follow', () => (this.following ? this.pause() : this.open()), { kind: 'chip', pressed: 'true' });
    this.search = h('input', { type: 'search', placeholder: 'Search the whole log…', 'aria-label': 'Search the log', onkeydown: (event) => { if (event.key === 'Enter') { event.preventDefault(); this.find(event.shiftKey ? -1 : 1); } if (event.key === 'Escape') this.searching?.abort(); } });
    this.found = h('span', { class: 'told', role: 'status' });
    const wrap = button('Wrap', () => wrap.setAttribute('aria-pressed', String(this.box.classList.toggle('wrap'))), { kind: 'chip', pressed: 'false' });
    this.element = h('div', { class: 'card logcard' },
      h('div', { class: 'row tools' }, this.attempts, this.sources, this.follow, wrap, button('Start', () => this.jump(0), { kind: 'chip' }), button('End', () => this.open(), { kind: 'chip' }), h('span', { class: 'grow' }),
        this.found, this.search, button('', () => this.find(-1), { kind: 'bare', glyph: 'up', title: 'Match before (Shift Enter)' }), button('', () => this.find(1), { kind: 'bare', glyph: 'below', title: 'Next match (Enter)' })),
      this.box, h('div', { class: 'row foot' }, this.status));
    signal.addEventListener('abort', () => { this.stop?.abort(); this.searching?.abort(); clearHits(); });
  }

  query(more) { return { attempt: this.attempt, source: this.source, ...more }; }
  path() { return jobPath(this.job.job_uuid, '/logs'); }
  get start() { return this.pieces[0]?.from ?? 0; }
  get end() { return this.pieces[this.pieces.length - 1]?.to ?? 0; }

  // Show the end, and follow what is written as long as the job lives.
  async open(changes = {}) {
    if ('attempt' in changes) this.source = null;
    Object.assign(this, changes);
    this.set(true);
    const mine = this.begin();
    let piece;
    try { piece = await get(this.path(), this.query({ tail: 500 }), this.signal); } catch (error) {
      if (error.code !== 'not_found' && error.status !== 404) throw error;
      this.show([]);
      fill(this.status, error.message);
      await rest(2000, this.signal);
      if (mine === this.generation && !this.signal.aborted) this.open();
      return;
    }
    if (mine !== this.generation) return;
    this.choices(piece);
    this.show([{ from: piece.offset, to: piece.next_offset, text: piece.text }], piece.size_bytes);
    this.box.scrollTop = this.box.scrollHeight;
    this.listen(piece);
  }

  begin() { this.stop?.abort(); this.stop = new AbortController(); this.generation += 1; return this.generation; }

  choices(piece) {
    const attempts = Object.keys(piece.sources).map(Number);
    [this.attempt, this.source] = [piece.attempt, piece.source];
    fill(this.attempts, attempts.map((n) => h('option', { value: n, selected: n === piece.attempt }, `Attempt ${n}`)));
    fill(this.sources, (piece.sources[piece.attempt] ?? []).map((name) => h('option', { selected: name === piece.source }, name)));
    this.attempts.classList.toggle('hidden', attempts.length < 2);
  }

  listen(piece) {
    if (['succeeded', 'failed', 'cancelled'].includes(this.job.status)) return;
    const { signal } = this.stop;
    const query = { attempt: piece.attempt, source: piece.source, after: `${piece.attempt}:${piece.next_offset}` };
    stream(this.path(), { query, signal, onItem: (event, data, id) => { if (event === 'log') this.arrived(data.text, Number(id.split(':').pop())); } })
      .catch((error) => { if (!signal.aborted) fill(this.status, error.message); });
  }

  arrived(text, to) {
    const last = this.pieces[this.pieces.length - 1];
    if (last && last.text.length < PIECE) Object.assign(last, { text: last.text + text, to });
    else this.pieces.push({ from: this.end, to, text });
    this.total = Math.max(this.total, to);
    this.fresh = (this.fresh ?? '') + text;
    if (this.painting) return;
    this.painting = requestAnimationFrame(() => {
      this.painting = null;
      if (this.pieces.length > KEPT) { this.pieces = this.pieces.slice(-KEPT); this.paint(); } else this.append(this.fresh);
      this.fresh = '';
      if (this.following) this.box.scrollTop = this.box.scrollHeight;
    });
  }

  // Only the line that was open and those after it are made anew.
  append(text) {
    const parts = (this.openLine + text).split('\n');
    if (this.lines.lastChild && this.openLine !== '') this.lines.lastChild.remove();
    Object.assign(this.style, this.openStyle);
    this.rows(parts);
    this.where();
  }

  rows(parts) {
    const rows = [];
    parts.forEach((part, at) => {
      const isLast = at === parts.length - 1;
      if (isLast) { this.openLine = part; this.openStyle = { ...this.style }; if (part === '') return; }
      rows.push(row(line(part, this.style)));
    });
    this.lines.append(...rows);
  }

  show(pieces, total = 0) {
    Object.assign(this, { pieces, total });
    this.paint();
  }

  paint() {
    Object.assign(this, { style: plain(), openLine: '', openStyle: plain() });
    clearHits();
    this.lines.replaceChildren();
    this.rows(this.pieces.map((piece) => piece.text).join('').split('\n'));
    this.where();
  }

  where() {
    const part = this.start > 0 || this.end < this.total;
    say(this.status, part ? `${bytes(this.start)} to ${bytes(this.end)} of ${bytes(this.total)}` : bytes(this.total));
  }

  set(following) { this.following = following; this.follow.setAttribute('aria-pressed', String(following)); }

  pause() { this.set(false); }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const gap = scrollHeight - scrollTop - clientHeight;
    if (this.following && gap > 80 && !this.painting) this.pause();
    else if (!this.following && gap < 4 && this.end >= this.total && !this.stop?.signal.aborted) this.set(true);
    if (this.loading) return;
    if (scrollTop < 300 && this.start > 0) this.page(-1);
    else if (gap < 300 && this.end < this.total) this.page(1);
  }

  // Read the piece before or after the window, and let go of the one at its other end.
  async page(way) {
    this.loading = true;
    const mine = this.generation;
    const from = way < 0 ? Math.max(0, this.start - PIECE) : this.end;
    const limit = way < 0 ? this.start - from : PIECE;
    try {
      const piece = await get(this.path(), this.query({ offset: from, limit }), this.signal);
      if (mine !== this.generation) return;
      const fresh = { from: piece.offset, to: piece.next_offset, text: piece.text };
      this.total = piece.size_bytes;
      const height = this.box.scrollHeight;
      const top = this.box.scrollTop;
      if (way < 0) {
        this.pieces = [fresh, ...this.pieces];
        if (this.pieces.length > KEPT) { this.pieces.length = KEPT; this.begin(); this.pause(); }
        this.paint();
        this.box.scrollTop = top + this.box.scrollHeight - height;
      } else if (fresh.to > fresh.from) {
        this.pieces.push(fresh);
        const dropped = this.pieces.length > KEPT;
        if (!dropped) { this.append(fresh.text); return; }
        const gone = this.lines.childElementCount;
        this.pieces.shift();
        this.paint();
        this.box.scrollTop = top - (gone - this.lines.childElementCount) * 18;
      }
    } catch (error) { if (error.name !== 'AbortError') note(error.message, 'bad'); } finally { this.loading = false; }
  }

  async jump(offset) {
    this.pause();
    const mine = this.begin();
    const from = Math.max(0, offset - PIECE / 2);
    const piece = await get(this.path(), this.query({ offset: from, limit: PIECE }), this.signal);
    if (mine !== this.generation) return;
    this.choices(piece);
    this.show([{ from: piece.offset, to: piece.next_offset, text: piece.text }], piece.size_bytes);
    if (offset === 0) this.box.scrollTop = 0;
  }

  // The next match from where the last one was; within the file, not only within what is shown. A byte that is no UTF-8
  // counts as three here, so that behind such bytes a match is looked for in the neighbourhood of its place.
  async find(way) {
    const words = this.search.value;
    if (!words) return;
    this.searching?.abort();
    const searching = this.searching = new AbortController();
    if (this.words !== words) { this.words = words; this.at = way > 0 ? -1 : this.total; }
    try {
      const hit = await this.scan(words.toLowerCase(), way, searching.signal);
      if (searching.signal.aborted) { fill(this.found, 'Stopped.'); return; }
      if (hit === null) { this.at = way > 0 ? -1 : this.total; fill(this.found, 'No match. The next search begins anew.'); return; }
      this.at = hit;
      fill(this.found, `at ${bytes(hit)}`);
      if (hit < this.start || hit + size(words) > this.end || !this.pieces.length) await this.jump(hit);
      else this.pause();
      this.mark(words.toLowerCase(), hit);
    } catch (error) { if (error.name !== 'AbortError') fill(this.found, error.message); }
  }

  // The byte of the match, or null. The next piece is on its way while this one is looked through.
  async scan(words, way, signal) {
    const lap = size(words) - 1;
    const own = new AbortController();
    signal.addEventListener('abort', () => own.abort());
    const ask = (from, limit) => {
      const asked = call('GET', this.path(), { query: this.query({ offset: from, limit }), headers: { accept: 'text/plain' }, signal: own.signal });
      asked.catch(() => { /* told where it is waited for */ });
      return { from, asked };
    };
    const before = (until) => (until > 0 ? ask(Math.max(0, until - SCAN), Math.min(SCAN, until)) : null);
    let piece = way > 0 ? ask(this.at + 1, SCAN) : before(this.at);
    try {
      while (piece && !signal.aborted) {
        const { from } = piece;
        const response = await piece.asked;
        const [total, next] = ['x-log-size', 'x-log-next-offset'].map((name) => Number(response.headers.get(name)));
        if (way > 0) piece = next >= total || next <= from ? null : ask(Math.max(from + 1, next - lap), SCAN);
        else piece = from > 0 ? before(from + lap) : null;
        const text = await response.text();
        const low = text.toLowerCase();
        const place = way > 0 ? low.indexOf(words) : low.lastIndexOf(words);
        if (place >= 0) return from + size(text.slice(0, place));
        fill(this.found, `${Math.round((100 * (way > 0 ? next : total - from)) / Math.max(1, total))} % searched (Esc stops)`);
      }
    } finally { own.abort(); }
    return null;
  }

  mark(words, hit) {
    const text = this.pieces.map((piece) => piece.text).join('');
    const low = text.toLowerCase();
    let best = null;
    let bytesBefore = this.start;
    let from = 0;
    for (let place = low.indexOf(words); place >= 0; place = low.indexOf(words, place + 1)) {
      bytesBefore += size(text.slice(from, place));
      from = place;
      if (best === null || Math.abs(bytesBefore - hit) < Math.abs(best.bytes - hit)) best = { place, bytes: bytesBefore };
      else break;
    }
    if (best === null) return;
    const target = this.lines.children[text.slice(0, best.place).split('\n').length - 1];
    this.lines.querySelector('.hit')?.classList.remove('hit');
    target?.classList.add('hit');
    this.box.scrollTop = (target?.offsetTop ?? 0) - this.box.clientHeight / 2;
    highlight(this.lines, words);
  }
}

function clearHits() { CSS.highlights?.delete('log-search'); }

// Marks without touching the text: the browser's own highlights, over text nodes.
function highlight(element, words) {
  if (!CSS.highlights) return;
  const ranges = [];
  for (const child of element.children) {
    const text = child.textContent.toLowerCase();
    for (let place = text.indexOf(words); place >= 0 && ranges.length < 2000; place = text.indexOf(words, place + words.length)) ranges.push(rangeIn(child, place, words.length));
  }
  CSS.highlights.set('log-search', new Highlight(...ranges));
}

function rangeIn(element, place, length) {
  const range = document.createRange();
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let passed = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const next = passed + node.length;
    if (place >= passed && place < next) range.setStart(node, place - passed);
    if (place + length > passed && place + length <= next) { range.setEnd(node, place + length - passed); break; }
    passed = next;
  }
  return range;
}
