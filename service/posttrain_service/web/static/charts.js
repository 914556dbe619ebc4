// Curves of one or several runs: live, smoothed, on a linear or logarithmic scale, zoomed together.

import { button, bytes, fill, h, number } from './dom.js';
import { get, jobPath, stream } from './api.js';

const GROUPS = [
  { title: 'Loss', names: [['loss', 'training'], ['validation_loss', 'validation']], wide: true, log: true },
  { title: 'Learning rate', names: [['learning_rate', '']] },
  { title: 'Throughput', unit: 'tokens/s', names: [['tokens_per_s', '']] },
  { title: 'Gradient norm', names: [['grad_norm', '']], log: true },
  { title: 'Accuracy', names: [['accuracy', 'training'], ['validation_accuracy', 'validation']] },
  { title: 'Rewards', names: [['rewards_chosen', 'chosen'], ['rewards_rejected', 'rejected'], ['rewards_margin', 'margin']] },
  { title: 'Memory', names: [['memory_bytes', '']], show: bytes },
  { title: 'Step time', unit: 's', names: [['step_time_s', 'step'], ['forward_time_s', 'forward'], ['backward_time_s', 'backward']] },
  { title: 'Utilisation (MFU)', names: [['mfu', '']] },
];
const DASHES = [null, [6, 4], [2, 3]];
const MOST_POINTS = 4000;
const STEPS = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((power) => n * 10 ** power)).sort((a, b) => a - b); // no half steps

// Exponential moving average without the pull to zero at its start, as TensorBoard shows it (Kingma & Ba 2015, section 3).
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean * weight + (1 - weight) * value;
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

// Points of a run by step; of two records with one step (a step and its validation) one point is made.
export class Run {
  constructor(id, label) { Object.assign(this, { id, label, points: new Map() }); }
  add(point) { this.points.set(point.step, { ...this.points.get(point.step), ...point }); }
  // Points thinned out by the server in the place of many; what came after them stays.
  replace(points) {
    const last = points.length ? points[points.length - 1].step : 0;
    const newer = [...this.points.values()].filter((point) => point.step > last);
    this.points = new Map();
    [...points, ...newer].forEach((point) => this.add(point));
  }
  ordered() { return [...this.points.values()].sort((a, b) => a.step - b.step); }
}

export function columns(points, name, axis) {
  const begin = points.length ? Date.parse(points[0].time) : 0;
  const at = { step: (p) => p.step, epoch: (p) => p.epoch, minutes: (p) => (Date.parse(p.time) - begin) / 60000 }[axis];
  const found = new Map();
  for (const point of points) {
    const [x, y] = [at(point), point[name]];
    if (Number.isFinite(x) && typeof y === 'number' && Number.isFinite(y)) found.set(x, y);
  }
  const xs = [...found.keys()].sort((a, b) => a - b);
  return [xs, xs.map((x) => found.get(x))];
}

export class Board {
  constructor(signal) {
    this.runs = new Map();
    this.charts = [];
    this.options = { smoothing: 0, log: false, axis: 'step', zoom: null };
    this.grid = h('div', { class: 'charts' });
    this.empty = h('p', { class: 'told' }, 'No step is done yet: the curves begin with the first one.');
    this.reset = button('Whole run', () => this.zoom(null), { kind: 'small hidden' });
    this.extra = h('span', { class: 'row' });
    this.element = h('div', {}, this.toolbar(), this.empty, this.grid);
    const redo = () => { this.shape = null; this.draw(); };
    document.addEventListener('themechange', redo);
    const watch = new ResizeObserver(() => this.charts.forEach((chart) => chart.fit()));
    watch.observe(this.grid);
    signal.addEventListener('abort', () => { watch.disconnect(); document.removeEventListener('themechange', redo); this.charts.forEach((chart) => chart.plot.destroy()); });
  }

  toolbar() {
    const value = h('output', { for: 'smoothing' }, '0');
    const slider = h('input', { type: 'range', id: 'smoothing', min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => { value.textContent = slider.value; this.set({ smoothing: Number(slider.value) }); } });
    const log = button('Log scale', () => { this.set({ log: !this.options.log }); log.setAttribute('aria-pressed', String(this.options.log)); }, { kind: 'chip', pressed: 'false' });
    const axis = h('select', { id: 'axis', onchange: () => { this.options.zoom = null; this.set({ axis: axis.value }); } }, ['step', 'epoch', 'minutes'].map((name) => h('option', {}, name)));
    return h('div', { class: 'row tools charttools' }, h('label', { class: 'inline', for: 'smoothing' }, 'Smoothing', slider, value), log, h('label', { class: 'inline', for: 'axis' }, 'Over', axis), this.reset, h('span', { class: 'grow' }), this.extra);
  }

  set(changes) { Object.assign(this.options, changes); this.shape = null; this.draw(); }

  add(run) { this.runs.set(run.id, run); this.shape = null; this.soon(); }
  drop(id) { this.runs.delete(id); this.shape = null; this.soon(); }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    setTimeout(() => { this.waiting = false; if (this.grid.isConnected) this.draw(); }, 150);
  }

  zoom(range) {
    this.options.zoom = range;
    this.reset.classList.toggle('hidden', range === null);
    for (const chart of this.charts) chart.zoom(range);
  }

  draw() {
    const runs = [...this.runs.values()].map((run, at) => ({ run, at, points: run.ordered() }));
    const groups = GROUPS.filter((group) => group.names.some(([name]) => runs.some(({ points }) => points.some((point) => Number.isFinite(point[name])))));
    const series = groups.map((group) => runs.flatMap(({ run, at, points }) => group.names.map(([name, label], kind) => ({ run, at, kind, label, rough: !/^validation|^learning_rate/.test(name), data: columns(points, name, this.options.axis) }))).filter((one) => one.data[0].length));
    const shape = JSON.stringify([groups.map((group) => group.title), series.map((list) => list.map((one) => [one.run.id, one.kind]))]);
    this.empty.classList.toggle('hidden', groups.length > 0);
    if (shape !== this.shape) {
      this.shape = shape;
      this.charts.forEach((chart) => chart.plot.destroy());
      this.charts = groups.map((group, at) => new Chart(this, group, series[at]));
      this.grid.replaceChildren(...this.charts.map((chart) => chart.element));
      this.charts.forEach((chart) => chart.fit());
      if (this.options.zoom) this.zoom(this.options.zoom);
    } else this.charts.forEach((chart, at) => chart.update(series[at]));
  }
}

class Chart {
  constructor(board, group, series) {
    Object.assign(this, { board, group, series });
    this.legend = h('ul', { class: 'legend' });
    this.place = h('div', { class: 'plot' });
    this.element = h('figure', { class: `card chart${group.wide ? ' wide' : ''}`, tabindex: 0, onkeydown: (event) => this.key(event) }, h('figcaption', {}, h('h3', {}, group.title, group.unit && h('small', {}, group.unit)), this.legend), this.place);
    const colours = palette();
    const { smoothing } = board.options;
    this.log = board.options.log && group.log;
    const lines = series.flatMap((one) => {
      const stroke = colours.runs[(board.runs.size > 1 ? one.at : one.kind) % colours.runs.length];
      const few = one.data[0].length < 40;
      const dash = board.runs.size > 1 ? DASHES[one.kind] : null;
      const base = { stroke, dash, spanGaps: true, points: { show: few, size: 5, fill: stroke } };
      return smoothing && one.rough ? [{ ...base, stroke: `${stroke}55`, width: 1, points: { show: false } }, { ...base, width: 2, points: { show: false } }] : [{ ...base, width: 2 }];
    });
    const show = group.show ?? number;
    const axis = (size, values) => ({ stroke: colours.muted, grid: { stroke: colours.line, width: 1 }, ticks: { show: false }, font: '11px Inter, sans-serif', size, values });
    this.plot = new uPlot({
      width: 400, height: group.wide ? 280 : 190, padding: [8, 18, 0, 0], legend: { show: false }, series: [{}, ...lines],
      scales: { x: { time: false }, y: this.log ? { distr: 3, range: (plot, low, high) => (low === null ? [0.1, 1] : [low * 0.97, high * 1.03]) } : {} },
      axes: [{ ...axis(28, null), ...(board.options.axis === 'step' ? { incrs: STEPS } : {}) }, axis(58, (plot, ticks) => ticks.map((tick) => (tick === null ? '' : show(tick, 4))))],
      cursor: { sync: { key: 'board' }, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, bind: { dblclick: () => () => { board.zoom(null); return null; } } },
      hooks: {
        setCursor: [() => this.told(this.plot?.cursor.idx ?? null)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          board.zoom([plot.posToVal(plot.select.left, 'x'), plot.posToVal(plot.select.left + plot.select.width, 'x')]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, this.data(), this.place);
    this.items = series.map((one) => {
      const value = h('b', {});
      const name = [board.runs.size > 1 ? one.run.label : '', one.label].filter(Boolean).join(' · ') || 'now';
      const swatch = h('i', { 'aria-hidden': 'true' });
      swatch.style.background = colours.runs[(board.runs.size > 1 ? one.at : one.kind) % colours.runs.length];
      return { value, element: h('li', {}, swatch, name, ' ', value) };
    });
    fill(this.legend, this.items.map((item) => item.element));
    this.told(null);
  }

  data() {
    const positive = (values) => (this.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = this.series.flatMap(({ rough, data: [xs, ys] }) => { // a validation is a mean over its whole set already
      const smoothed = this.board.options.smoothing && rough ? [[xs, positive(smooth(ys, this.board.options.smoothing))]] : [];
      return [[xs, positive(ys)], ...smoothed];
    });
    return uPlot.join(tables);
  }

  update(series) {
    this.series = series;
    this.plot.setData(this.data(), this.board.options.zoom === null);
    if (this.board.options.zoom) this.zoom(this.board.options.zoom);
    this.told(null);
  }

  zoom(range) {
    const xs = this.plot.data[0];
    this.plot.setScale('x', { min: range?.[0] ?? xs[0], max: range?.[1] ?? xs[xs.length - 1] });
  }

  fit() {
    const width = Math.floor(this.place.clientWidth);
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }

  // The values at the cursor, or the newest.
  told(index) {
    const show = this.group.show ?? number;
    const x = index === null ? Infinity : this.plot.data[0][index];
    this.items?.forEach((item, at) => {
      const [xs, ys] = this.series[at].data;
      let place = xs.length - 1;
      while (place > 0 && xs[place] > x) place -= 1;
      item.value.textContent = show(ys[place]);
    });
    if (index !== null || !this.items) return;
    const parts = this.series.map(({ run, label, data: [xs, ys] }) => {
      const low = ys.reduce((best, value, at) => (value < ys[best] ? at : best), 0);
      return `${run.label} ${label}: newest ${show(ys[ys.length - 1])}, lowest ${show(ys[low])} at ${this.board.options.axis} ${number(xs[low])}`;
    });
    this.element.setAttribute('aria-label', `${this.group.title}. ${parts.join('. ')}. Keys: plus, minus and arrows zoom, 0 shows all.`);
  }

  key(event) {
    const xs = this.plot.data[0];
    const [low, high] = this.board.options.zoom ?? [xs[0], xs[xs.length - 1]];
    const width = high - low;
    const to = { '+': [low + width / 4, high - width / 4], '-': [low - width / 2, high + width / 2], ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5] }[event.key];
    if (event.key === '0') this.board.zoom(null);
    else if (to) this.board.zoom([Math.max(xs[0], to[0]), Math.min(xs[xs.length - 1], to[1])]);
    else return;
    event.preventDefault();
  }
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { muted: of('--muted'), line: of('--line'), runs: [1, 2, 3, 4, 5, 6].map((n) => of(`--c${n}`)) };
}

// Fill a board with a job's points, and go on with what is measured until the job ends.
export async function follow(job, board, signal) {
  const run = new Run(job.job_uuid, job.name ?? job.job_uuid.slice(0, 8));
  board.add(run);
  const { data } = await get(jobPath(job.job_uuid, '/metrics'), { max_points: MOST_POINTS }, signal);
  data.forEach((point) => run.add(point));
  board.soon();
  if (['succeeded', 'failed', 'cancelled'].includes(job.status)) return run;
  // One step back: the validation of the last step is a record of its own, and may come later.
  const last = data.length ? data[data.length - 1].step : 0;
  let thinning = false;
  stream(jobPath(job.job_uuid, '/metrics'), { query: { after_step: Math.max(0, last - 1) }, signal, onItem: (event, point) => {
    if (event !== 'metric') return;
    run.add(point);
    board.soon();
    if (run.points.size > 3 * MOST_POINTS && !thinning) {
      thinning = true;
      get(jobPath(job.job_uuid, '/metrics'), { max_points: MOST_POINTS }, signal).then((found) => run.replace(found.data)).finally(() => { thinning = false; });
    }
  } }).catch(() => { /* the page's own look at the job tells what is wrong */ });
  return run;
}
